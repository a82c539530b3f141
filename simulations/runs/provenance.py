"""What a run is made of, written beside it: who its clients are, which versions ran, whose code."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from simulations.config.assembly import Assembly
from strategies.nodes import Nodes

_PACKAGES = ("fedlgm", "flwr", "torch", "numpy", "dp-accounting", "ray")


def provenance_of(assembly: Assembly, nodes: Nodes) -> dict[str, Any]:
    """What a run is made of.

    Args:
        assembly: the run's objects.
        nodes: which nodes serve which clients.
    """
    return {
        "clients": "simulated clients" if nodes.simulated else "real nodes",
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
