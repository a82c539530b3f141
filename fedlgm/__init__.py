"""fedlgm: layer-wise differential privacy for federated learning, every mechanism under one honest accountant.

Submodules load when they are first used, so that `import fedlgm` costs next to nothing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBMODULES = (
    "allocation",
    "applications",
    "clipping",
    "data",
    "device_sum",
    "devices",
    "errors",
    "keys",
    "layers",
    "mechanisms",
    "models",
    "noise",
    "plan",
    "privacy",
    "release",
    "training",
    "transcript",
)


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"fedlgm.{name}")
    raise AttributeError(f"module 'fedlgm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES])
