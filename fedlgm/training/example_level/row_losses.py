"""A task's losses for a batch, where each loss is a function of one row alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_bundled, users_code
from fedlgm.training.tasks.task import ExampleLosses


class RowLosses:
    """A task's losses, called as `losses(outputs, y)`.

    A bundled task is called with the whole batch. A user's task is called with one row, under
    `torch.func.vmap` or, if its losses do not run there, in a loop. Each call uses a fresh copy of
    a user's task, so that the task carries nothing from one call to the next.

    Args:
        task: the task.
        parameters: the model's parameters, which a copy of the task shares. The engine refuses a
            loss that depends on these parameters.

    Raises:
        ConfigError: the task cannot be copied, or does not give one loss per example.

    Example:
        >>> class Trimmed:
        ...     __module__ = "mypkg.tasks"
        ...
        ...     def losses(self, outputs, y):
        ...         losses = (outputs[:, 0] - y).square()
        ...         return torch.where(losses > losses.mean(), 0.0, losses)
        >>> RowLosses(Trimmed())(torch.tensor([[1.0], [9.0]]), torch.zeros(2))
        tensor([ 1., 81.])
    """

    def __init__(self, task: ExampleLosses, parameters: Iterable[Tensor] = ()) -> None:
        self._bundled, self._mapped = is_bundled(task), True
        self._shared = {id(parameter): parameter for parameter in parameters}
        # a user's task is copied, so that later changes of the original have no effect
        self._task = task if self._bundled else self._copy(task)

    def __call__(self, outputs: Any, y: Tensor) -> Tensor:
        """Compute the losses [n] for targets [n, ...] and outputs [n, ...]. The outputs may be a
        tree of tensors.
        """
        if self._bundled:
            return _require_losses(self._task.losses(outputs, y), y)
        if self._mapped:
            task = self._copy(self._task)
            try:
                return torch.func.vmap(
                    lambda row, of_row: _of_row(task, row, of_row), randomness="different"
                )(outputs, y)
            except ConfigError:
                raise
            except Exception:
                # an operation without a rule for vmap, or code that depends on values
                self._mapped = False
        rows = (
            (pytree.tree_map(lambda value, i=i: value[i].clone(), outputs), y[i].clone())
            for i in range(len(y))
        )
        return torch.stack([_of_row(self._copy(self._task), row, of_row) for row, of_row in rows])

    def _copy(self, task: ExampleLosses) -> ExampleLosses:
        with users_code(f"the task {type(task).__name__} cannot be copied", task):
            return copy.deepcopy(task, dict(self._shared))


def _of_row(task: ExampleLosses, output: Any, y: Tensor) -> Tensor:
    losses = task.losses(pytree.tree_map(lambda value: value[None], output), y[None])
    return _require_losses(losses, y[None])[0]


def _require_losses(losses: Tensor, y: Tensor) -> Tensor:
    if losses.shape != y.shape[:1]:
        raise ConfigError(
            f"a task must give one loss per example, [{len(y)}], got {tuple(losses.shape)}"
        )
    return losses
