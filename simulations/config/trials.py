"""Trials of a user's task and model, before a run writes anything."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import nn

from fedlgm.data import DataSet
from fedlgm.extension.loader import is_reference, load_object, object_or_name, users_code
from fedlgm.extension.restored import fresh
from fedlgm.extension.trial import require_same_losses
from fedlgm.training import models
from fedlgm.training.tasks import Task
from fedlgm.wording import prefix_key
from simulations.config.own import Own
from simulations.config.unit import Parts

_PROBED = 8  # public examples


class Tried(Parts, Protocol):
    """The objects of a run, with a user's."""

    @property
    def own(self) -> Own:
        """A user's objects that replace names in the recipe."""
        ...

    @property
    def dataset(self) -> DataSet:
        """The data."""
        ...

    @property
    def on_parts(self) -> list[Task]:
        """Copies of a user's task that have prepared parts of the data."""
        ...

    @property
    def own_model(self) -> bool:
        """Whether the model is a user's."""
        ...


def try_training(assembly: Tried, task: Task) -> None:
    """Refuse a user's model or task that cannot be trained on a few public examples.

    Args:
        assembly: what the recipe defines.
        task: the task, before it has seen examples.

    Raises:
        ConfigError: the message names the problem.
    """
    module, count = assembly.module(), len(assembly.dataset.test_y)
    rows = np.linspace(0, count - 1, min(_PROBED, count)).astype(
        np.int64
    )  # of all of the set: it may be sorted
    x, y = assembly.public_examples(rows)
    require_same_losses(fresh(task), assembly.on_parts, assembly.module(), x, y)
    owner = type(module if assembly.own_model else task)
    assembly.recipe.protects.try_training(assembly, task, x, y, owner)
    given = object_or_name(assembly.own.model, assembly.recipe.model.name, "model")
    original = load_object(given, "model") if is_reference(given) else given
    with prefix_key("model"), users_code("a copy of the model cannot be tried", module):
        if isinstance(original, nn.Module):
            models.require_faithful_copies(models.plain(original), x)
        elif assembly.trainer_kind.apart:
            models.require_faithful_copies(module, x)
