"""Sources, flags and file names of the compiled kernel. The build of a wheel loads this file
without PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

InstructionSet = Literal["avx512", "avx2", "portable"]

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernel.cpp", "lanes.h", "examples.h"))
COMMON = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
FLAGS: dict[InstructionSet, tuple[str, ...]] = {
    "avx512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": ("-DFEDLGM_PORTABLE",),
}
PREBUILT = Path(__file__).with_name("prebuilt")
"""Folder of the kernels in a wheel for one platform; other installations do not have this folder.
"""
SEAL = ".sha256"
"""Suffix of the file that contains a kernel's length and SHA-256."""


def name_kernel(instructions: InstructionSet) -> str:
    """File name of a kernel, made from the instruction set and a digest of the sources and the
    common flags.
    """
    text = b"".join(file.read_bytes() for file in SOURCES) + repr(COMMON).encode()
    return f"{instructions}-{hashlib.sha256(text).hexdigest()[:24]}.so"


def compile_command(
    compiler: Sequence[str], instructions: InstructionSet, file: Path | str
) -> list[str]:
    """Return the command that compiles a kernel into a file."""
    return [*compiler, *COMMON, *FLAGS[instructions], str(SOURCES[0]), "-o", str(file)]


def seal_of(kernel: bytes) -> str:
    """Return the length and SHA-256 of a kernel, by which a damaged file is recognised."""
    return f"{len(kernel)} {hashlib.sha256(kernel).hexdigest()}\n"
