"""Flower client side of fedlgm.

Names load when they are first used: a process that only forwards messages to a node's release service needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clients.consent import Consent
    from clients.example_level import ExampleClient
    from clients.layerwise import LayerwiseClient, LocalWork
    from clients.mod import PrivateClientApp, PrivateUpdates
    from clients.serving import AnyClient, OneClient
    from clients.source import ClientData, ClientSource, PartitionedSource

__all__ = [
    "AnyClient",
    "ClientData",
    "ClientSource",
    "Consent",
    "ExampleClient",
    "LayerwiseClient",
    "LocalWork",
    "OneClient",
    "PartitionedSource",
    "PrivateClientApp",
    "PrivateUpdates",
]

_MODULES = {
    "consent": ("Consent",),
    "example_level": ("ExampleClient",),
    "layerwise": ("LayerwiseClient", "LocalWork"),
    "mod": ("PrivateClientApp", "PrivateUpdates"),
    "serving": ("AnyClient", "OneClient"),
    "source": ("ClientData", "ClientSource", "PartitionedSource"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"clients.{module}"), name)
    raise AttributeError(f"module 'clients' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
