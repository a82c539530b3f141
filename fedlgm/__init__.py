"""fedlgm: layer-wise differential privacy for federated learning, every mechanism under one honest accountant.

Names load when they are first used, so that `import fedlgm` costs next to nothing.

>>> import fedlgm
>>> fedlgm.mechanisms.get("snr-consistent", bound=0.5).bound
0.5
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedlgm import (
        aggregation,
        allocation,
        applications,
        attacks,
        audits,
        clipping,
        correlation,
        data,
        devices,
        errors,
        example_level,
        keys,
        layers,
        mechanisms,
        models,
        noise,
        plan,
        privacy,
        queries,
        release,
        tasks,
        testing,
        training,
        transcript,
    )
    from fedlgm.aggregation import BoundedSum
    from fedlgm.contributions import BoundedUpdates
    from fedlgm.data import DataSet, Partition
    from fedlgm.facts import LocalTraining, RunFacts, Sampling
    from fedlgm.keys import KeyRing
    from fedlgm.layers import LayerTable
    from fedlgm.mechanisms.base import Mechanism
    from fedlgm.mechanisms.method import Method
    from fedlgm.plan import ReleasePlan, UnprotectedPlan
    from fedlgm.privacy.guarantee import Guarantee
    from fedlgm.privacy.ledger import Ledger
    from fedlgm.queries import AuxiliaryQuery
    from fedlgm.tasks import Task
    from fedlgm.transcript import Transcript

_NOUNS = {
    "AuxiliaryQuery": "queries",
    "BoundedSum": "aggregation",
    "BoundedUpdates": "contributions",
    "DataSet": "data",
    "Guarantee": "privacy.guarantee",
    "KeyRing": "keys",
    "LayerTable": "layers",
    "Ledger": "privacy.ledger",
    "LocalTraining": "facts",
    "Mechanism": "mechanisms.base",
    "Method": "mechanisms.method",
    "Partition": "data",
    "ReleasePlan": "plan",
    "RunFacts": "facts",
    "Sampling": "facts",
    "Task": "tasks",
    "Transcript": "transcript",
    "UnprotectedPlan": "plan",
}
_MODULES = (
    "aggregation", "allocation", "applications", "attacks", "audits", "clipping", "correlation", "data", "devices",
    "errors", "example_level", "keys", "layers", "mechanisms", "models", "noise", "plan", "privacy", "queries",
    "release", "tasks", "testing", "training", "transcript",
)  # fmt: skip

__all__ = [
    "AuxiliaryQuery", "BoundedSum", "BoundedUpdates", "DataSet", "Guarantee", "KeyRing", "LayerTable", "Ledger",
    "LocalTraining", "Mechanism", "Method", "Partition", "ReleasePlan", "RunFacts", "Sampling", "Task", "Transcript",
    "UnprotectedPlan",
    "aggregation", "allocation", "applications", "attacks", "audits", "clipping", "correlation", "data", "devices",
    "errors", "example_level", "keys", "layers", "mechanisms", "models", "noise", "plan", "privacy", "queries",
    "release", "tasks", "testing", "training", "transcript",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _NOUNS:
        return getattr(importlib.import_module(f"fedlgm.{_NOUNS[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"fedlgm.{name}")
    raise AttributeError(f"module 'fedlgm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
