"""Trials of a user's task and model, before a run writes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from fedlgm.data import DataSet
from fedlgm.errors import prefix_key
from fedlgm.extension.loader import is_bundled, is_reference, load_object, package_of, passed, users_code
from fedlgm.extension.separation import fresh
from fedlgm.extension.trial import prepare_rows, require_same_losses, try_preparing
from fedlgm.training import models
from fedlgm.training.tasks import Task

if TYPE_CHECKING:
    from simulations.config.assembly import Assembly

_PROBED = 8  # public examples


def prepared(task: Task, found: DataSet) -> tuple[DataSet, list[Task]]:
    """The data as a task prepares them, and copies of a user's task that have prepared parts of them.

    Raises:
        ConfigError: a user's task fails, or prepares an example by means of others.
    """
    if is_bundled(task) or (type(task).prepare, type(task).targets) == (Task.prepare, Task.targets):
        return task.prepare(found), []
    if package_of(type(task).prepare) == "fedlgm":
        with users_code(f"task {task.name!r}", task):
            return prepare_rows(task, found), []
    before = fresh(task)
    with users_code(f"task {task.name!r}", task):
        made = task.prepare(found)
    return made, try_preparing(before, found, made)


def try_training(assembly: Assembly, task: Task) -> None:
    """Refuse a user's model or task that cannot be trained on a few public examples.

    Args:
        assembly: what the recipe defines.
        task: the task, before it has seen examples.

    Raises:
        ConfigError: the message names the problem.
    """
    module, count = assembly.module(), len(assembly.dataset.test_y)
    rows = np.linspace(0, count - 1, min(_PROBED, count)).astype(np.int64)  # of all of the set: it may be sorted
    x, y = assembly.public_examples(rows)
    require_same_losses(fresh(task), assembly.on_parts, assembly.module(), x, y)
    owner = type(module if assembly.own_model else task)
    assembly.recipe.protects.try_training(assembly, task, x, y, owner)
    given = passed(assembly.own.model, assembly.recipe.model.name, "model")
    original = load_object(given, "model") if is_reference(given) else given
    with prefix_key("model"), users_code("a copy of the model cannot be tried", module):
        if isinstance(original, nn.Module):
            models.require_faithful_copies(models.plain(original), x)
        elif assembly.trainer_kind.apart:
            models.require_faithful_copies(module, x)
