"""`fedlgm doctor`: checks of this machine."""

from __future__ import annotations

import os
import platform

import torch

from fedlgm.aggregation import kernels
from fedlgm.cache import version_of
from fedlgm.training import devices, native

_PACKAGES = (
    "fedlgm",
    "flwr",
    "ray",
    "torch",
    "torchvision",
    "dp-accounting",
    "opacus",
    "flwr-datasets",
    "numpy",
)


def examine() -> dict[str, str | int | list[str] | None]:
    """Findings by name."""
    from fedlgm import data, mechanisms
    from fedlgm.errors import DataError
    from fedlgm.training import models
    from simulations.config import recipe as recipes
    from simulations.runs import trackers

    available = []
    for name in data.names():
        try:
            data.load(name, download=False)
        except DataError:
            continue
        available.append(name)
    return {
        "python": platform.python_version(),
        **{package: version_of(package) or "missing" for package in _PACKAGES},
        "cores": os.cpu_count(),
        "devices": [f"{name} ({what})" for name, what in devices.available_devices().items()],
        "noise backends": [_noise(name) for name in devices.available_devices()],
        "triton": _triton(),
        "training kernel": _kernel(),
        "trackers here": [name for name in trackers.names() if trackers.is_installed(name)],
        "data sets here": available,
        "recipes": list(recipes.names()),
        "mechanisms": list(mechanisms.names()),
        "example-level mechanisms": list(mechanisms.names("example")),
        "models": list(models.names()),
    }


def _kernel() -> str:
    """The resolved value of `training.kernel = "auto"` for a model that the kernel knows."""
    missing = native.reason(again=True)
    return f"PyTorch: {missing}" if missing else f"native ({native.instruction_set()})"


def _noise(name: str) -> str:
    """Generator of a run's noise on a device, and the reason."""
    device = torch.device(name)
    return f"{name}: {devices.resolve_noise('auto', device)} ({devices.reason(device)})"


def _triton() -> str:
    if not kernels.has_triton():
        return "missing"
    how = (
        "in its interpreter: TRITON_INTERPRET=1"
        if kernels.triton_interprets()
        else "not used: no CUDA device"
    )
    return f"{version_of('triton')} ({'compiled' if torch.cuda.is_available() else how})"
