"""The compiled kernel. It is built from `kernel.cpp` with the system's C++ compiler at first use,
and stored on disk; a wheel for one platform already contains it.

The kernel is stored in the cache (`fedlgm.cache.folder`). Its file name is derived from the sources
and the common flags, and its length and SHA-256 are stored beside it. Loading a damaged file would
end the process, so a damaged kernel is not loaded but compiled again. Before use, the kernel must
reproduce a known answer bit for bit, so the kernel of a compiler that reorders arithmetic is
refused. If a compiler fails, this is recorded in the cache, so that the same compiler is not tried
at every start. A different compiler is tried, and `fedlgm doctor` tries the failed compiler again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedlgm import cache as remembered
from fedlgm.errors import ConfigError, Notice
from fedlgm.files import explain_failure, write_durably
from fedlgm.training.native import kernel_build
from fedlgm.training.native.kernel_build import InstructionSet

_LONGEST = 300  # time limit of a compilation, in seconds
_FAILED = ".failed"  # suffix of the record of a compiler that failed
_PART = ".part"  # suffix of a kernel that is being compiled
# arguments of the functions in kernel.cpp and examples.h: a, an address, or n, a number
_TAKEN = {
    "workspace": "ann",
    "train": "anaaannnnaaaa",
    "sizes": "ana",
    "examples": "anaannaannaaaa",
    "add": "anananaaaa",
    "unpack": "anaa",
}
_INSTEAD = "training.kernel = 'torch' needs none"
_ANSWER = "c37cea7d91efdedbfc181eea0393034e"  # result of `answer` on every machine


def instruction_set() -> InstructionSet | None:
    """Return the widest instruction set that both this processor and the kernel support; None
    without AVX2 and AVX-512.

    PyTorch detects the instruction set, so `ATEN_CPU_CAPABILITY=avx2` restricts it to AVX2.
    """
    by_capability: dict[str, InstructionSet] = {"AVX512": "avx512", "AVX2": "avx2"}
    return by_capability.get(torch.backends.cpu.get_cpu_capability())


def reason(*, again: bool = False) -> str | None:
    """Return the reason why this machine has no kernel; None if it has one.

    Args:
        again: whether to try compilers again that have failed before.
    """
    if again:
        for failure in () if (folder := _kernel_folder()) is None else folder.glob(f"*{_FAILED}"):
            failure.unlink(missing_ok=True)
        library.cache_clear()
    try:
        library()
    except ConfigError as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """Load the kernel for this machine, which is compiled at first use.

    Raises:
        ConfigError: there is no suitable instruction set or no compiler, or the compiler fails or
            reorders arithmetic.
    """
    here = instruction_set()
    if here is None:
        raise ConfigError(
            "the native training kernel needs AVX2, which the processor lacks or "
            "ATEN_CPU_CAPABILITY switches off: use training.kernel = 'torch'"
        )
    return build(here)


def build(instructions: InstructionSet) -> ctypes.CDLL:
    """Load the kernel for an instruction set, and compile it if necessary; see `library`."""
    name = kernel_build.name_kernel(instructions)
    if _is_whole(packaged := kernel_build.PREBUILT / name):
        with contextlib.suppress(ConfigError):  # a kernel that cannot be loaded is compiled
            return _load_and_verify(packaged)
    kernel_folder = _kernel_folder()
    if kernel_folder is not None:
        place = kernel_folder / name
        if not _is_whole(place):
            with _alone(kernel_folder):
                if not _is_whole(place):
                    return _compile_and_load(instructions, place)
        return _load_and_verify(place)
    with tempfile.TemporaryDirectory(prefix="fedlgm-kernel-") as folder:
        place = Path(folder) / "kernel.so"
        _compile(instructions, place)
        return _load_and_verify(place)


def _kernel_folder() -> Path | None:
    """Return the folder of compiled kernels; None if kernels are not stored. Only a folder to which
    no other user can write is used, because its files are executed.
    """
    root = remembered.folder()
    if root is None:
        return None
    folder = root / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if private and os.access(folder, os.W_OK) else None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let only one process compile inside the block, while other processes wait. The lock ends with
    the process that holds it. A new holder of the lock deletes unfinished files.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in folder.glob(f"*{_PART}"):
            left.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def _compile_and_load(instructions: InstructionSet, place: Path) -> ctypes.CDLL:
    """Compile and load the kernel, unless the same compiler has failed before."""
    failure, compiler = place.with_suffix(_FAILED), _identity(_compiler())
    failed_compiler, _, words = (
        failure.read_text(encoding="utf-8").partition("\n") if failure.is_file() else ("", "", "")
    )
    if compiler and failed_compiler == compiler:
        raise ConfigError(f"{words} (`fedlgm doctor` tries again)")
    failure.unlink(missing_ok=True)
    try:
        _compile(instructions, place)
        return _load_and_verify(place)
    except ConfigError as error:
        if compiler:
            failure.write_text(f"{compiler}\n{error}", encoding="utf-8")
        raise


def _compiler() -> list[str]:
    """Return the command of the C++ compiler, whose first word is empty if no compiler is found."""
    return shlex.split(os.environ.get("CXX", "")) or [
        shutil.which("c++") or shutil.which("g++") or ""
    ]


def _identity(command: list[str]) -> str:
    """Describe a compiler in one line: its command, and the size and modification time of its file.
    Another version of the compiler has another size or time.
    """
    path = shutil.which(command[0])
    if path is None:
        return ""
    status = Path(path).stat()
    return " ".join(
        [*command, os.path.realpath(path), str(status.st_size), str(status.st_mtime_ns)]
    )


def _compile(instructions: InstructionSet, place: Path) -> None:
    """Compile to a temporary file, and then write the kernel to `place`, with its seal beside it.
    Readers see a complete kernel or no kernel.
    """
    command = _compiler()
    if not command[0]:
        raise ConfigError(
            "the native training kernel needs a C++ compiler: install g++ or clang, or set CXX, "
            "or use training.kernel = 'torch'"
        )
    descriptor, partial = tempfile.mkstemp(suffix=_PART, dir=place.parent)
    os.close(descriptor)
    warnings.warn(
        Notice("compiling the training kernel, once per machine; this takes some seconds"),
        stacklevel=2,
    )
    try:
        done = subprocess.run(
            kernel_build.compile_command(command, instructions, partial),
            capture_output=True,
            text=True,
            timeout=_LONGEST,
        )
        if done.returncode:
            raise ConfigError(
                f"the native training kernel was not compiled: {command[0]} ended with status "
                f"{done.returncode}\n"
                f"{done.stderr.strip()[:500]}"
            )
        kernel = Path(partial).read_bytes()
        seal = kernel_build.seal_of(kernel)
        write_durably(place.with_suffix(kernel_build.SEAL), seal.encode())
        write_durably(place, kernel)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"the native training kernel was not compiled by {command[0]}"
        raise ConfigError(explain_failure(what, error, _INSTEAD)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _is_whole(place: Path) -> bool:
    """Whether a kernel's file matches its seal."""
    try:
        seal = place.with_suffix(kernel_build.SEAL).read_text(encoding="utf-8")
        return seal == kernel_build.seal_of(place.read_bytes())
    except (OSError, UnicodeDecodeError):
        return False


def _discard(place: Path) -> None:
    """Delete a compiled kernel, so that another compiler is tried. A wheel's kernel stays."""
    if place.parent != kernel_build.PREBUILT:
        place.unlink(missing_ok=True)


def _load_and_verify(place: Path) -> ctypes.CDLL:
    try:
        kernel = ctypes.CDLL(str(place))
        declare(kernel)
    except (OSError, AttributeError) as error:
        _discard(place)
        what = f"the native training kernel in {place} cannot be loaded"
        raise ConfigError(explain_failure(what, error, _INSTEAD)) from error
    if answer(kernel) != _ANSWER:
        _discard(place)
        raise ConfigError(
            f"the native training kernel in {place} computes wrong bits: use another compiler "
            "(CXX) or training.kernel = 'torch'"
        )
    return kernel


def declare(made: ctypes.CDLL) -> None:
    """Declare the types of the kernel's functions, so that addresses and sizes can be passed as
    plain numbers.
    """
    for name, taken in _TAKEN.items():
        function = getattr(made, f"fedlgm_{name}")
        function.argtypes = [{"a": ctypes.c_void_p, "n": ctypes.c_int64}[kind] for kind in taken]
        function.restype = ctypes.c_int64 if name == "workspace" else None


def answer(made: ctypes.CDLL) -> str:
    """Compute a digest of the kernel's results for a fixed small client. The results cover every
    kind of layer, loss, norm and optimizer.
    """
    from fedlgm.training.native.call import Examples, Settings, area, run

    ops = torch.tensor(
        [
            [0, 2, 9, 8, 19, 4, 4, 3, 2, 2, 2, 1, 1, 0, 228],
            [4, 19, 4, 4, 19, 4, 4, 0, 0, 0, 0, 0, 0, 0, -1],
            [1, 19, 4, 4, 19, 3, 3, 2, 2, 1, 1, 0, 0, 0, -1],
            [0, 19, 3, 3, 5, 2, 2, 2, 2, 1, 1, 0, 0, 247, -1],
            [5, 5, 2, 2, 5, 2, 2, 0, 0, 0, 0, 0, 0, 0, -1],
            [2, 5, 2, 2, 5, 1, 2, 2, 1, 2, 1, 0, 0, 0, -1],
            [0, 5, 1, 2, 17, 1, 1, 1, 2, 1, 1, 0, 0, 627, 797],
            [3, 17, 1, 1, 17, 1, 1, 0, 0, 0, 0, 0, 0, 0, -1],
            [0, 17, 1, 1, 3, 1, 1, 1, 1, 1, 1, 0, 0, 814, 865],
        ],
        dtype=torch.int64,
    )

    def numbers(*shape: int) -> Tensor:
        """Compute some fixed numbers in [-1/2, 1/2), without a random generator."""
        count = torch.Size(shape).numel()
        return ((torch.arange(1, count + 1) * 7919 % 1024).float() / 1024 - 0.5).view(shape)

    x, real, model = numbers(7, 2, 9, 8), numbers(7, 3), numbers(868)
    order, update, digest = torch.arange(14).view(2, 7) % 7, torch.empty(868), hashlib.sha256()
    examples = Examples(made, ops, torch.arange(len(ops)).repeat(2, 1).T.contiguous() % 2, 2, 7)
    for loss, y in enumerate((torch.arange(7) % 3, real, (real > 0).float())):
        for settings in (
            Settings(True, 0.01),
            Settings(False, 0.5, momentum=0.9, clip=0.5),
            Settings(False, 0.5),
        ):
            run(made, ops, x, y, order, 3, loss, settings, model, update, area(made, ops, 3))
            digest.update(update.numpy().tobytes())
        run(made, ops, x, y, order[:1], 7, loss, None, model, update, area(made, ops, 7))
        digest.update(update.numpy().tobytes())
        for norm in (1, 2):
            sums = examples.sums()
            examples.add(examples.measure(x, y, loss, model, norm), sums)
            digest.update(examples.unpack(sums, 868).numpy().tobytes())
    return digest.hexdigest()[:32]
