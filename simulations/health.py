"""`fedlgm doctor`: what this machine offers."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

_PACKAGES = ("fedlgm", "flwr", "ray", "torch", "torchvision", "dp-accounting", "opacus", "flwr-datasets", "numpy")


def examine() -> dict[str, Any]:
    """Findings by name."""
    from fedlgm import data, mechanisms, models
    from fedlgm.errors import DataError
    from simulations import recipe as recipes

    available = []
    for name in data.names():
        try:
            data.load(name, download=False)
        except DataError:
            continue
        available.append(name)
    findings: dict[str, Any] = {package: _version(package) for package in _PACKAGES}
    return {
        "python": platform.python_version(),
        **findings,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "noise": "torch on the CPU",
        "data sets here": available,
        "recipes": list(recipes.names()),
        "mechanisms": list(mechanisms.names()),
        "models": list(models.names()),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
