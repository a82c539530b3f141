"""Builds a wheel with compiled training kernels if FEDLGM_PREBUILT is 1.

    FEDLGM_PREBUILT=1 pip wheel --no-deps .

Such a wheel is for one platform, and its users need no compiler. Otherwise the wheel is for all
platforms, and the kernel is compiled at first use. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILT = os.environ.get("FEDLGM_PREBUILT") == "1"
NATIVE = Path(__file__).parent / "fedlgm/training/native"


class BuildWithKernels(build_py):
    """Compiles the kernel for both instruction sets of x86-64 beside the copied modules."""

    def run(self) -> None:
        """Copy the modules, then compile."""
        super().run()
        if not PREBUILT:
            return
        spec = importlib.util.spec_from_file_location("kernel_build", NATIVE / "kernel_build.py")
        kernel_build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel_build)
        folder = Path(self.build_lib) / "fedlgm/training/native/prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        for instructions in ("avx2", "avx512"):
            kernel = folder / kernel_build.name_kernel(instructions)
            subprocess.run(kernel_build.compile_command(compiler, instructions, kernel), check=True)
            seal = kernel_build.seal_of(kernel.read_bytes())
            kernel.with_suffix(kernel_build.SEAL).write_text(seal, encoding="utf-8")


class PlatformWheel(bdist_wheel):
    """A wheel for every Python, and for one platform if it holds kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform of the wheel."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class Packages(Distribution):
    """The packages, which are for one platform if they hold kernels."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel is for one platform."""
        return PREBUILT


setup(distclass=Packages, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
