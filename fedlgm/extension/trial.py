"""Trials of a user's model, task and trainer on a few examples, which take place before a run
writes anything.

An update must depend only on the client's own examples, and a prepared example must depend only on
the example from which it is prepared. A trial finds mistakes early but proves nothing; what keeps
clients apart is `fedlgm.extension.restored`. `fedlgm.training.example_level.trial` has the stricter
trial for runs that bound examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.data import DataSet
from fedlgm.data.pixels import Undecoded
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_bundled, package_of, users_code
from fedlgm.extension.restored import fresh
from fedlgm.training import inputs, models
from fedlgm.training.devices import fork_rng, or_another_thread
from fedlgm.training.inputs import Inputs
from fedlgm.training.tasks.task import ExampleLosses, Task, require_separate_losses, require_sums
from fedlgm.wording import prefix_key

Examples = tuple[Inputs, Tensor]
"""A pair of the inputs and the targets of a few examples."""


def try_clients(
    module: nn.Module,
    updates: Callable[[Sequence[Examples]], Sequence[Tensor]],
    task: Task,
    x: Inputs,
    y: Tensor,
    owner: Any,
) -> None:
    """Refuse a model or task that carries state from one client to the next, or fails in training.

    Args:
        module: the initial model.
        updates: function that trains clients with the given examples one after another, with the
            same random numbers, and returns their updates [D]. It starts from a model and a task
            that have seen no examples.
        task: task of the model.
        x: inputs of a few public examples [n, ...].
        y: targets of these examples [n, ...].
        owner: the user's class on trial; a message names a line of its code.

    Raises:
        ConfigError: the model or task is refused; the message names the problem.
    """

    def make_updates() -> list[Tensor]:
        client, other = (x, y), (inputs.take(x, slice(1)), y[:1])
        return [
            *updates([client, client]),
            updates([other, client])[1],
            updates([client, other])[0],
        ]

    with prefix_key("model"):
        models.require_repeatable(module, x)
    require_alike(make_updates, len(y), owner)
    check_losses(module, task, x, y)
    with prefix_key("model"):
        models.require_seen_gradients(module, x)


def prepare_data(task: Task, found: DataSet) -> tuple[DataSet, list[Task]]:
    """Prepare the data with a task. Return the prepared data, and copies of a user's task that have
    each prepared a part of the data.

    Args:
        task: the task, before it has seen examples.
        found: the data before the task has prepared them.

    Raises:
        ConfigError: a user's task fails, or uses other examples to prepare an example.
    """
    if is_bundled(task) or (type(task).prepare, type(task).targets) == (Task.prepare, Task.targets):
        return task.prepare(found), []
    if package_of(type(task).prepare) == "fedlgm":
        with users_code(f"task {task.name!r}", task):
            return prepare_rows(task, found), []
    before = fresh(task)
    with users_code(f"task {task.name!r}", task):
        result = task.prepare(found)
    return result, try_preparing(before, found, result)


def prepare_rows(task: Task, data: DataSet) -> DataSet:
    """Prepare the data with the method `targets` of a user's task. Each training example is given
    to a fresh copy of the task.

    Args:
        task: the task, which inherits the library's `prepare`.
        data: the data before the task has prepared them.

    Raises:
        ConfigError: the task makes other targets if it gets all training examples together.
    """
    reference, y = fresh(task).prepare(data), data.train_y
    rows = [fresh(task).targets(y[i : i + 1], "training") for i in range(len(y))]
    train_y = np.concatenate(rows) if rows else reference.train_y
    if not _near(train_y, reference.train_y):
        raise _mixing(task)
    return replace(data, train_y=train_y, test_y=reference.test_y)


def try_preparing(task: Task, data: DataSet, prepared: DataSet) -> list[Task]:
    """Refuse a user's task that prepares an example with information from other training examples,
    such as their mean.

    Args:
        task: the task before it has prepared the data.
        data: the data before the task has prepared them.
        prepared: the prepared data.

    Returns:
        Copies of the task that have each prepared a part of the data, for `require_same_losses`.

    Raises:
        ConfigError: the task prepares the examples of a part differently without the other training
            examples.
    """
    # The examples may be sorted by class, so they are shuffled before they are split.
    copies, order = [], np.random.default_rng(0).permutation(len(data.train_y))
    for half in np.array_split(order, 2) if len(order) > 1 else ():
        rows, task_copy = np.sort(half), fresh(task)
        try:
            alike = _prepares_alike(task_copy, data, prepared, rows)
        except Exception:  # a part may lack a class
            continue
        if not alike:
            raise _mixing(task)
        copies.append(task_copy)
    return copies


def _mixing(task: Task) -> ConfigError:
    return ConfigError(
        f"task {task.name!r} prepares an example by means of other training examples, such as "
        "their mean, so that one training example changes all others and no bound covers this "
        "change: use public constants"
    )


@torch.no_grad()
def require_same_losses(
    task: Task, others: Sequence[Task], module: nn.Module, x: Inputs, y: Tensor
) -> None:
    """Refuse a task whose losses depend on the training examples that it has prepared.

    Args:
        task: the task, which has prepared all examples.
        others: copies of the task that have each prepared a part, from `try_preparing`.
        module: the initial model.
        x: inputs of a few public examples [n, ...].
        y: targets of these examples [n, ...].

    Raises:
        ConfigError: the losses of the task and its copies differ.
    """
    if not others:
        return
    with users_code(f"task {task.name!r}: its losses cannot be computed", task):
        outputs = inputs.call(module.eval(), x)
        losses = [each.losses(outputs, y) for each in (task, *others)]
    if not all(inputs.close(losses[0], other) for other in losses[1:]):
        raise ConfigError(
            f"task {task.name!r}: its losses depend on the training examples that it has prepared, "
            "such as their mean, so that one training example changes all updates and no bound "
            "covers this change: use public constants"
        )


def _prepares_alike(task: Task, data: DataSet, prepared: DataSet, rows: np.ndarray) -> bool:
    """Whether a task prepares these rows alone in the same way as among all training examples, up
    to rounding.
    """
    alone, expected = task.prepare(data.keep(rows)), prepared.keep(rows)
    pairs = [(alone.train_y, expected.train_y), (alone.test_y, expected.test_y)]
    for name in ("train_x", "test_x"):
        held = alone.held(name), expected.held(name)
        if not any(isinstance(part, Undecoded) for part in held):  # no arrays to change
            pairs += zip(*map(inputs.parts, held), strict=True)
    return all(_near(array, other) for array, other in pairs)


def _near(array: np.ndarray, other: np.ndarray) -> bool:
    if array.shape != other.shape or array.dtype != other.dtype or array.dtype.kind != "f":
        return np.array_equal(array, other)
    return bool(np.allclose(array, other, rtol=1e-5, atol=1e-8, equal_nan=True))


@torch.no_grad()
def check_losses(module: nn.Module, task: Task | ExampleLosses, x: Inputs, y: Tensor) -> None:
    """Check the rules of `fedlgm.extension.testing.check_task` that need a model's outputs."""
    with prefix_key("task"), fork_rng(0):  # seed of dropout
        outputs = inputs.call(module, x)
        require_separate_losses(task, outputs, y)
        if isinstance(task, Task) and len(y) > 1:
            require_sums(task, outputs, y)


def require_alike(made: Callable[[], Sequence[Tensor]], count: int, owner: Any) -> None:
    """Refuse code whose updates or sums differ although they come from the same examples.

    Args:
        made: function that makes all updates or sums.
        count: number of examples, for the message.
        owner: the user's class on trial; a message names a line of its code.

    Raises:
        ConfigError: the updates or sums differ, or training fails.
    """
    with users_code(f"training on {count} test examples fails", owner), fork_rng(None):
        first, *others = made()
    if not all(
        torch.allclose(first, again, rtol=1e-3, atol=1e-6, equal_nan=True) for again in others
    ):
        raise ConfigError(
            "an update depends on what was trained before or with it: the model, the task or the "
            "trainer remembers or mixes examples, so that one client's data would change another "
            "client's update, or it draws random numbers without PyTorch" + or_another_thread()
        )
