"""A trial of users' own models and tasks on a few public examples, before anything of a run is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedlgm import inputs, models
from fedlgm.errors import ConfigError, prefix_key
from fedlgm.example_level import ExampleGradients, FlatClip
from fedlgm.extension import users_code
from fedlgm.inputs import Inputs
from fedlgm.layers import LayerTable
from fedlgm.tasks import Task
from fedlgm.tasks.base import require_separate_losses, require_sums


def try_clients(
    module: nn.Module,
    updates: Callable[[Inputs, Tensor], Sequence[Tensor]],
    task: Task,
    x: Inputs,
    y: Tensor,
    owner: Any,
) -> None:
    """Refuse what carries something from one client to the next, or fails in training.

    Args:
        module: the initial model.
        updates: gives the updates [D] of two clients that hold the same examples and draw the same random numbers.
        task: what it is trained for.
        x: inputs of a few public examples [n, ...].
        y: their targets [n, ...].
        owner: class of the user's own that is tried, whose line a message names.

    Raises:
        ConfigError: what is wrong.
    """
    with prefix_key("model"):
        models.require_repeatable(module, x)
    _require_alike(lambda: updates(x, y), len(y), owner)
    _check_task(module, task, x, y)


def try_examples(module: nn.Module, layers: LayerTable, task: Task, x: Inputs, y: Tensor, owner: Any) -> None:
    """Refuse what gives examples no gradient of their own, carries something from step to step, or fails in training.

    Args:
        module: the initial model.
        layers: its layers.
        task: what it is trained for.
        x: inputs of a few public examples [n, ...].
        y: their targets [n, ...].
        owner: class of the user's own that is tried, whose line a message names.

    Raises:
        ConfigError: what is wrong.
    """

    def sums() -> list[Tensor]:
        gradients = ExampleGradients(module, layers, task)
        return [gradients.sum(x, y, FlatClip(1.0)).total.clone() for _ in range(2)]

    with prefix_key("model"):
        models.require_repeatable(module, x)
        models.require_drawing_nothing(module, x)
        _require_alike(sums, len(y), owner)
        models.require_separate(module, x)
    _check_task(module, task, x, y)


@torch.no_grad()
def _check_task(module: nn.Module, task: Task, x: Inputs, y: Tensor) -> None:
    """The rule that `fedlgm.testing.check_task` has, too."""
    with prefix_key("task"):
        outputs = inputs.call(module, x)
        require_separate_losses(task, outputs, y)
        if len(y) > 1:
            require_sums(task, outputs, y)


def _require_alike(made: Callable[[], Sequence[Tensor]], count: int, owner: Any) -> None:
    with users_code(f"training on {count} test examples fails", owner), torch.random.fork_rng(devices=[]):
        first, again = made()
    if not torch.allclose(first, again, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ConfigError(
            "an update depends on what was trained before: model or task remember what they see, which would carry "
            "one's data into the next one's update, or draw at random by other means than PyTorch's"
        )
