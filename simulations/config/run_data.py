"""The data of a run: its task, examples and their division among the clients."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from fedlgm import data
from fedlgm.data import DataSet, Partition
from fedlgm.data.spent import Spent
from fedlgm.extension.loader import object_or_name
from fedlgm.extension.trial import Examples, prepare_data
from fedlgm.training import inputs, tasks
from fedlgm.training.tasks import Task
from fedlgm.wording import prefix_key
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.config.validation_messages import in_section

Division = tuple[DataSet, Partition]
"""A data set and its division among the clients."""


class RunData:
    """Task, data and division, each made on first use.

    Args:
        recipe: the recipe.
        own: a user's objects that replace names in it.
        divided: data and division that are used instead of the recipe's, such as a worker's.
    """

    def __init__(self, recipe: Recipe, own: Own, divided: Division | None = None) -> None:
        self.recipe, self.own, self._divided = recipe, own, divided
        self.on_parts: list[Task] = []
        """Copies of a user's task that have prepared parts of the data."""

    @cached_property
    def task(self) -> Task:
        """The model's task: loss, targets and metrics."""
        if self.own.task is None:
            return self.recipe.task.build()
        with prefix_key("task"):
            return tasks.get(self.own.task)

    @cached_property
    def dataset(self) -> DataSet:
        """The data, held once per process."""
        if self._divided is not None:
            return self._divided[0]
        task, section = self.task, self.recipe.data
        with in_section("data", section.partition):
            original = data.load(
                object_or_name(self.own.data, section.name, "data"), section.dir, **section.reading
            )
            data_set, parts = prepare_data(task, original)
            self.on_parts.extend(parts)
            return data_set

    @cached_property
    def partition(self) -> Partition:
        """The division of the data among clients, which depends only on the recipe."""
        if self._divided is not None:
            return self._divided[1]
        dataset, section = self.dataset, self.recipe.data
        clients, seed = self.recipe.federation.clients, section.partition_seed
        with in_section("data", section.partition, "data.partition"):
            scheme = object_or_name(self.own.partition, section.partition, "partition")
            return data.divide(dataset, clients, scheme, seed=seed, **section.options)

    @property
    def division(self) -> Division:
        """The data and their division, which other objects of the same run can use."""
        return self.dataset, self.partition

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client, [clients]."""
        return self.partition.sizes

    @property
    def efforts(self) -> np.ndarray:
        """Expected effort of each participant of the sampling, [population]."""
        return self.recipe.protects.efforts(self.recipe, self.sizes)

    def public_examples(self, rows: slice | np.ndarray = slice(None)) -> Examples:
        """Test examples, which are public: inputs and targets of these rows."""
        data_set = self.dataset
        return inputs.tensors(inputs.take(data_set.test_x, rows)), torch.from_numpy(
            data_set.test_y[rows]
        )

    @property
    def present(self) -> bool:
        """Whether the data are in memory already, so that no file has to be read for them."""
        given = self.own.data is not None or self._divided is not None
        return given or "dataset" in vars(self)  # where a `cached_property` keeps its value

    @property
    def outline(self) -> DataSet:
        """The shapes and classes that the model needs, without loading a bundled set."""
        if not self.present:
            section = self.recipe.data
            shapes = data.outline(section.name, **section.reading)
            if shapes is not None:
                return shapes
        return self.dataset

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.outline.shape)

    @property
    def spent(self) -> Spent | None:
        """Cost of the releases that were made from the data before the run."""
        return self.dataset.spent if self.present else None
