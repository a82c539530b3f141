"""Tasks: the loss, targets and metrics of a model. Other modules of the library do not depend on a
particular loss, target type or metric.

    task = tasks.get("regression", loss="huber")
    task = tasks.get("mypackage.tasks:Ranking", margin=0.2)

>>> get("next-token").headline
'perplexity'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.extension import loader as extension
from fedlgm.extension.registry import Registry
from fedlgm.training.tasks.binary import Binary
from fedlgm.training.tasks.causal_lm import CausalLM
from fedlgm.training.tasks.classification import Classification
from fedlgm.training.tasks.evaluation import evaluate
from fedlgm.training.tasks.hazards import Hazards
from fedlgm.training.tasks.next_token import PADDING, NextToken
from fedlgm.training.tasks.ranked import AUC, Ranked, auc
from fedlgm.training.tasks.regression import Regression
from fedlgm.training.tasks.set_metrics import Metric
from fedlgm.training.tasks.task import Task

__all__ = [
    "AUC",
    "PADDING",
    "Binary",
    "CausalLM",
    "Classification",
    "Hazards",
    "Metric",
    "NextToken",
    "Ranked",
    "Regression",
    "Task",
    "auc",
    "evaluate",
    "get",
    "names",
    "options",
]

_TASKS: Registry[type[Task]] = Registry(
    "task",
    {
        "classification": Classification,
        "regression": Regression,
        "binary": Binary,
        "ranked": Ranked,
        "multi-label": Binary,
        "hazards": Hazards,
        "next-token": NextToken,
        "causal-lm": CausalLM,
    },
)
_Losses = Callable[[Tensor, Tensor], Tensor]


class _OfFunction(Task):
    """A task that is given only as a function that computes the loss of each example."""

    def __init__(self, function: _Losses) -> None:
        self._function = function

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._function(outputs, targets)


def names() -> tuple[str, ...]:
    """Names of the bundled tasks.

    Example:
        >>> names()
        ('classification', 'regression', 'binary', 'ranked', 'multi-label', 'hazards', 'next-token', 'causal-lm')
    """
    return _TASKS.names()


def options(name: str) -> tuple[str, ...]:
    """Names of the options of a bundled task, or of a user's task ("package.module:name").

    Raises:
        ConfigError: the task is unknown, or cannot be imported.

    Example:
        >>> "loss" in options("regression")
        True
    """
    candidate = _TASKS.find(name)
    return extension.options_of(candidate) if isinstance(candidate, type) else ()


def get(task: str | Task | type[Task] | _Losses | None = None, **values: Any) -> Task:
    """Create a task, or return a `Task` object unchanged.

    Args:
        task: one of `names()`; "package.module:name" of a user's task; a `Task`, or a subclass of
            `Task`; or a function (outputs [n, ...], targets [n, ...]) -> loss of each example [n],
            such as `torch.nn.L1Loss(reduction="none")` for targets [n]. None means
            "classification".
        **values: options of the task.

    Raises:
        ConfigError: the task is unknown, cannot be imported, is not a task, or does not take an
            option.

    >>> import torch
    >>> get("regression", loss="huber").losses(torch.zeros(2, 1), torch.tensor([0.5, 3.0])).tolist()
    [0.125, 2.5]
    """
    if isinstance(task, str) and task.lower().startswith("cox"):
        raise ConfigError(
            f"task {task!r}: Cox's partial likelihood compares each patient with all others at "
            "risk, so the loss of a row has no bound that holds for the row alone: use the task "
            "'hazards' (discrete time), with breaks = the public ends of its intervals"
        )
    candidate = (
        _TASKS.find(task) if isinstance(task, str) else Classification if task is None else task
    )
    label = (
        repr(task)
        if isinstance(task, str)
        else getattr(candidate, "__name__", type(candidate).__name__)
    )
    if isinstance(candidate, type) and issubclass(candidate, Task):
        return extension.call_with_options(candidate, f"task {label}", values)  # type: ignore[no-any-return]
    if values:
        raise ConfigError(
            f"task {label} is an object already: it takes no options, got {', '.join(values)}"
        )
    if isinstance(candidate, Task):
        return candidate
    if callable(candidate) and not isinstance(candidate, type):
        return _OfFunction(candidate)
    raise ConfigError(
        f"task {label} is neither a fedlgm.tasks.Task nor a function of outputs and targets"
    )
