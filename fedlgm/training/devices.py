"""Choice of the device on which a run trains and of the generator of its noise, and control of
PyTorch's global settings.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch

from fedlgm.aggregation import kernels
from fedlgm.errors import ConfigError
from fedlgm.noise.draws import NoiseBackend

NoiseChoice = Literal["auto", "cpu", "torch", "triton"]
_DRAWING = threading.RLock()
_ACCELERATORS = ("cuda", "mps", "xpu")

# If a process calls torch.compile or torch.export before its first gradient, PyTorch starts threads
# for gradients, and forks of the process cannot compute gradients. Computing a gradient here
# prevents this. On a machine with a GPU, PyTorch starts these threads in any case.
if not torch.cuda.is_available():
    torch.ones(1, requires_grad=True).backward()


@dataclass(frozen=True)
class Numerics:
    """Numerical settings of a run. Like the seed and the data, they affect the exact bits of the
    result.

    Attributes:
        threads: number of threads that PyTorch uses during training and planning.
        device: device on which updates are computed, bounded, summed and noised.
        noise_backend: generator of the noise; see `fedlgm.noise.release`.
        block_size: number of clients whose bounded updates are summed before this partial sum is
            added to the round's sum.
    """

    threads: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    noise_backend: NoiseBackend = "cpu"
    block_size: int = 8


def available_devices() -> dict[str, str]:
    """Describe the devices of this machine, by the names that `training.device` accepts."""
    devices = {}
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        devices["cuda"] = names[0]
        devices |= {f"cuda:{i}": name for i, name in enumerate(names)}
    if torch.backends.mps.is_available():
        devices["mps"] = "Metal"
    if torch.xpu.is_available():
        devices["xpu"] = torch.xpu.get_device_name()
    return devices | {"cpu": f"{torch.get_num_threads()} torch threads"}


def resolve(name: str) -> torch.device:
    """Return the device that a recipe names. "auto" means the first accelerator that is found, or
    the CPU if there is none.

    Raises:
        ConfigError: the name is unknown, or this machine has no such device; the message lists the
            known or available names.
    """
    here = available_devices()
    if name == "auto":
        return torch.device(next(iter(here)))
    kind, _, index = name.partition(":")
    if kind not in ("cpu", *_ACCELERATORS) or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(
            f"training.device: unknown device {name!r}; known: auto, cpu, cuda, cuda:N, mps, xpu"
        )
    if name not in here:
        raise ConfigError(
            f"training.device: {name!r} is not available; found here: {', '.join(here)}; or use "
            "'auto'"
        )
    return torch.device(name)


def resolve_noise(choice: NoiseChoice, device: torch.device) -> NoiseBackend:
    """Choose the generator of the noise that is added to sums on `device`.

    "auto" means "cpu" on the CPU, where this generator is three times as fast as "torch"; "triton"
    on a CUDA device if Triton is installed; and "torch" in all other cases.

    Raises:
        ConfigError: the backend is unknown or not installed, or does not run on `device`.
    """
    if choice == "auto":
        if device.type == "cpu":
            return "cpu"
        return "triton" if device.type == "cuda" and kernels.has_triton() else "torch"
    if choice not in get_args(NoiseBackend):
        raise ConfigError(
            f"privacy.noise_backend: unknown {choice!r}; known: {', '.join(get_args(NoiseChoice))}"
        )
    if choice == "cpu" and device.type != "cpu":
        raise ConfigError(
            f"privacy.noise_backend: 'cpu' needs training.device = 'cpu', not {str(device)!r}: use "
            "'auto'"
        )
    if choice == "triton":
        if not kernels.has_triton():
            raise ConfigError(
                "privacy.noise_backend: 'triton' needs the package triton, which is not "
                "installed: pip install 'fedlgm[kernels]', or use 'auto'"
            )
        if device.type != "cuda" and not (device.type == "cpu" and kernels.triton_interprets()):
            raise ConfigError(
                "privacy.noise_backend: 'triton' needs training.device = 'cuda' (for tests: 'cpu' "
                f"with TRITON_INTERPRET=1 in the environment), not {str(device)!r}: use 'auto'"
            )
    return choice


def reason(device: torch.device) -> str:
    """Explain in a few words the choice of `resolve_noise("auto", device)`."""
    if device.type == "cpu":
        return "fastest on a CPU"
    if device.type != "cuda":
        return "the Triton kernels are for CUDA devices"
    return "triton is installed" if kernels.has_triton() else "triton is not installed"


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off TF32 and nondeterministic convolutions inside the block. These switches affect
    only CUDA devices.
    """
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    precisions: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    before = [switch.fp32_precision for switch in precisions]
    choices = cudnn.deterministic, cudnn.benchmark
    matmul, convolutions = _older_switches()
    # PyTorch has two sets of switches for the same settings, and refuses to compute while the two
    # sets contradict each other.
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = False, True, False
    for switch in precisions:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = choices
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if convolutions is not None:
            cudnn.allow_tf32 = convolutions
        for switch, precision in zip(precisions, before, strict=True):
            switch.fp32_precision = precision


@contextmanager
def plain_defaults() -> Iterator[None]:
    """Inside the block, make float32 and the CPU PyTorch's defaults for new tensors, whatever
    defaults the program has set. Every run needs these defaults.

    This function can also be used as a decorator.

    Example:
        >>> torch.set_default_dtype(torch.bfloat16)
        >>> with plain_defaults():
        ...     torch.zeros(1).dtype
        torch.float32
        >>> torch.zeros(1).dtype, torch.set_default_dtype(torch.float32)
        (torch.bfloat16, None)
    """
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        # A block with a default device would call a Python function in every operation, so it is
        # entered only if the default device is not the CPU.
        usual = torch.get_default_device().type == "cpu"
        with nullcontext() if usual else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def keep_modes(module: torch.nn.Module) -> Iterator[None]:
    """After the block, restore the mode (training or evaluation) of a module and of all modules
    inside it.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def keep_values(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """After the block, restore the values of tensors."""
    held = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in held:
                tensor.copy_(value)


@contextmanager
def drawing() -> Iterator[None]:
    """Let only one thread at a time be inside such a block, where it may draw from PyTorch's global
    generators. All threads share these generators, which dropout uses.

    Runs in several threads therefore give the same results as runs that follow one another. This
    function cannot prevent draws by other threads outside such blocks.

    Example:
        >>> with drawing(), drawing():  # the same thread may enter a second block
        ...     drawn = torch.rand(2)
    """
    with _DRAWING:
        yield


def or_another_thread() -> str:
    """End of a message about random numbers that cannot be repeated, which names draws by another
    thread as a possible cause. The text is empty if the program has only one thread.

    Example:
        >>> or_another_thread() in ("", "; or another thread of this program draws from PyTorch's global generator")
        True
    """
    others = threading.active_count() > 1
    return (
        "; or another thread of this program draws from PyTorch's global generator"
        if others
        else ""
    )


def _renew_lock() -> None:
    """Replace the lock in a forked process, where the thread that may have held the lock does not
    exist.
    """
    global _DRAWING
    _DRAWING = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def fork_rng(seed: int | None, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators for draws inside the block (see `drawing`), and restore the
    generators' state afterwards.

    `torch.manual_seed` is not used, because it also seeds unused devices and records its caller.

    Args:
        seed: seed of the generators; with None, the generators continue from their present state.
        device: device of the draws. The generator of a CUDA device is seeded and restored like the
            CPU's generator; the generators of other devices are not.

    Example:
        >>> with fork_rng(1):
        ...     one = torch.rand(2)
        >>> with fork_rng(1):
        ...     again = torch.rand(2)
        >>> torch.equal(one, again)
        True
    """
    device = torch.device(device)
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    with drawing():
        states = [generator.get_state() for generator in generators]
        try:
            if seed is not None:
                for generator in generators:
                    generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _older_switches() -> tuple[str | None, bool | None]:
    """Read PyTorch's older switches for the precision of matrix products and of convolutions. A
    value is None if PyTorch refuses to read it, because the program has set the newer switch.
    """
    matmul, convolutions = None, None
    with suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        convolutions = torch.backends.cudnn.allow_tf32
    return matmul, convolutions


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use `count` of PyTorch's threads inside the block. The number of threads affects the rounding
    of sums.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def keep_freed_memory() -> None:
    """Make this process reuse the memory that PyTorch frees, instead of returning the memory to the
    operating system after every step of training on the CPU.

    By default, glibc returns large blocks to the operating system at once, and the operating system
    clears every page before it gives the page to a process again. In each training step of
    ResNet-18, about 10,000 pages are cleared, which takes a twentieth of the time. With other C
    libraries, this function changes nothing.
    """
    _call_glibc("mallopt", _MMAP_THRESHOLD, 64 << 20)
    _call_glibc("mallopt", _TRIM_THRESHOLD, 512 << 20)


def return_freed_memory() -> None:
    """Return freed memory to the operating system. Call this function before a fork, because
    otherwise the forked processes would hold this memory too.
    """
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *arguments: int) -> None:
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), name):
        getattr(ctypes.CDLL(None), name)(*arguments)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h
