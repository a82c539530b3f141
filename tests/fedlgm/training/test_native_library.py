"""How the kernel is compiled, kept and checked: once per compiler, and never used if it is damaged
or wrong."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlgm.errors import ConfigError, Notice
from fedlgm.training.native import instruction_set, kernel_build, library


def test_a_machine_without_a_compiler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ConfigError, match=r"not compiled.*status 1"):
        library.build("portable")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        library.build("portable")
    assert not list((tmp_path / "kernels").glob("*.[!f]*"))  # no kernel, and no part of one


def test_a_compiler_that_fails_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"

    def write(ending: str) -> None:
        compiler.write_text(f'#!/bin/sh\nfor made; do :; done\necho >> "$0.log"; {ending}\n')
        compiler.chmod(0o700)

    def tried() -> int:
        return (tmp_path / "compiler.log").read_text().count("\n")

    kernel = library.build(instruction_set() or "portable")._name
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "instruction_set", lambda: "portable")
    write("echo no such header >&2; exit 3")
    with (
        pytest.raises(ConfigError, match=r"status 3\nno such header$"),
        pytest.warns(Notice, match="compiling"),
    ):
        library.build("portable")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=r"no such header \(`fedlgm doctor` tries again\)"
            ):
                library.build("portable")
    assert tried() == 1
    assert "status 3" in str(library.reason(again=True))
    assert tried() == 2
    write(f'cp {kernel} "$made"')  # another compiler
    assert library.build("portable") is not None
    assert tried() == 3
    assert sorted(file.suffix for file in (tmp_path / "cache" / "kernels").iterdir()) == [
        ".sha256",
        ".so",
    ]
    library.library.cache_clear()


def test_processes_that_start_together_compile_once_and_remove_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = library.build(instruction_set() or "portable")._name
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\nfor made; do :; done\necho >> "$0.log"; sleep 0.2; cp {kernel} "$made"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(mode=0o700, parents=True)
    (folder / "killed.part").touch()
    found: list[ctypes.CDLL] = []
    threads = [
        threading.Thread(target=lambda: found.append(library.build("portable"))) for _ in range(3)
    ]

    def together() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.warns(Notice, match="compiling the training kernel, once"):
        together()
    assert len(found) == 3
    assert (tmp_path / "compiler.log").read_text() == "\n"
    assert sorted(file.suffix for file in folder.iterdir()) == [".sha256", ".so"]


def test_a_kernel_with_other_bits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = library.build(instruction_set() or "portable")._name
    (tmp_path / "kernels").mkdir(mode=0o700)
    kept = tmp_path / "kernels" / Path(name).name
    for file in (kept, kept.with_suffix(".sha256")):
        file.write_bytes(Path(name).with_suffix(file.suffix).read_bytes())
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "_ANSWER", "0" * 32)
    with pytest.raises(ConfigError, match="computes wrong bits"):
        library.build(instruction_set() or "portable")
    assert not kept.exists()  # another compiler can make another one


@pytest.fixture
def _unoptimised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder of kernels, and a compiler that is quick."""
    flags = tuple("-O0" if flag == "-O2" else flag for flag in kernel_build.COMMON)
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_build, "COMMON", flags)


@pytest.mark.usefixtures("_unoptimised")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "subtract(sigmoid(ldn(o + j, lanes))",
            "add(sigmoid(ldn(o + j, lanes))",
        ),  # the loss of binary labels
        ("2.0f * (o[j] - t[j])", "1.0f * (o[j] - t[j])"),  # squared loss
        (
            "order == 1 ? std::fabs",
            "order == 3 ? std::fabs",
        ),  # l1 norms, which Laplace noise relies on
    ],
)
def test_a_kernel_is_tried_on_every_loss_and_norm(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that gets one of them wrong is refused."""
    changed = []
    for source in kernel_build.SOURCES:
        text = source.read_text()
        changed.append(tmp_path / source.name)
        changed[-1].write_text(text.replace(right, wrong))
    assert any(file.read_text().count(wrong) for file in changed)
    monkeypatch.setattr(kernel_build, "SOURCES", tuple(changed))
    with pytest.warns(Notice), pytest.raises(ConfigError, match="computes wrong bits"):
        library.build("portable")


@pytest.mark.usefixtures("_unoptimised")
def test_the_bits_do_not_depend_on_optimisation() -> None:
    """So the wrong kernels above were refused for what is wrong in them."""
    with pytest.warns(Notice):
        library.build("portable")


def _flipped(kernel: bytes) -> bytes:
    at = len(kernel) // 2
    return kernel[:at] + bytes([kernel[at] ^ 1]) + kernel[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda kernel: kernel[: len(kernel) // 2],
    "one bit": _flipped,
    "empty": lambda kernel: b"",
    "longer": lambda kernel: kernel + b"0",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_kernel_is_compiled_again_before_it_is_loaded(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a truncated library would end the process with SIGBUS."""
    name = Path(library.build(instruction_set() or "portable")._name)
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(mode=0o700, parents=True)
    damaged = folder / name.name
    damaged.write_bytes(damage(name.read_bytes()))
    damaged.with_suffix(".sha256").write_bytes(name.with_suffix(".sha256").read_bytes())
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor made; do :; done\ncp {name} "$made"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.warns(Notice, match="compiling the training kernel"):
        library.build(instruction_set() or "portable")
    assert damaged.read_bytes() == name.read_bytes()
