"""The target of an attack: a recipe or a run folder, and federations that differ from it only in
their data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from clients import AnyClient, LayerwiseClient
from fedlgm import data
from fedlgm.data import DataSet, Partition
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm.privacy.guarantee import Unit
from fedlgm.training.tasks import Classification
from fedlgm_lab.attacks.lira import random_halves
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_hardware
from simulations.config.overrides import Overrides
from simulations.config.recipe import Recipe
from simulations.config.run_data import Division
from simulations.config.run_model import RunModel
from simulations.engines.local import LocalGrid
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.runs.rows import OnRound, RunSummary
from simulations.runs.server import serve

FIGURES = ("accuracy", "epsilon", "claimed_epsilon", "delta", "guarantee", "guarantee_status")
"""Keys of the attacked run's summary whose figures are printed with the attack's results."""


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, the data of the attacks.

    Attributes:
        train_x: images that clients train on, float32 [n, C, H, W].
        train_y: their labels, int64 [n].
        test_x: public images [m, C, H, W].
        test_y: their labels [m].
        classes: number of classes.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int

    @classmethod
    def of(cls, dataset: DataSet) -> Images:
        """Return the set's labelled images.

        Raises:
            ConfigError: the set has other data.
        """
        x, test_x, y = dataset.train_x, dataset.test_x, dataset.train_y
        if (
            isinstance(x, tuple)
            or isinstance(test_x, tuple)
            or x.ndim != 4
            or y.ndim != 1
            or dataset.classes is None
        ):
            raise ConfigError(
                f"the attacks need labelled images [n, C, H, W], and data set {dataset.name!r} "
                "holds other data"
            )
        return cls(x, y, test_x, dataset.test_y, dataset.classes)

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """The clients' images and labels."""
        return torch.from_numpy(self.train_x), torch.from_numpy(self.train_y)

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """The public images and labels."""
        return torch.from_numpy(self.test_x), torch.from_numpy(self.test_y)


@dataclass(frozen=True)
class Target:
    """A recipe, or a finished run with its recipe.

    Attributes:
        recipe: the recipe, with every "auto" resolved.
        folder: the run's folder, or None.
    """

    recipe: Recipe
    folder: RunFolder | None = None

    @classmethod
    def open(cls, name: str | None, overrides: Overrides = ()) -> Target:
        """Open the run folder or the recipe with the name `name`.

        Raises:
            ConfigError: there is no such recipe, or overrides are given for a finished run.
            RunError: the folder is not a run, or the run has not finished.
        """
        if name is None or not Path(name).is_dir():
            return cls(_sequential(resolve_hardware(recipes.load(name, overrides))))
        folder = RunFolder.open(name)
        if overrides:
            raise ConfigError(
                f"--set changes a recipe, but {name} is a finished run: attack "
                f"{folder.recipe_file} instead"
            )
        folder.verified_result()
        return cls(_sequential(resolve_hardware(folder.recipe())), folder)

    @property
    def name(self) -> str:
        """Name for titles."""
        return self.recipe.name if self.folder is None else str(self.folder.path)

    def assembly(self, *, reconstructs: bool = False) -> Assembly:
        """Build the objects of the target's recipe.

        Args:
            reconstructs: whether the attack makes images, which lie in [-1, 1] (see
                `in_usual_pixels`).

        Raises:
            ConfigError: the task is not classification, or the data are not labelled images.
        """
        assembly = in_usual_pixels(self.recipe) if reconstructs else Assembly(self.recipe)
        if not isinstance(assembly.data.task, Classification):
            raise ConfigError(
                f"task.name: the attacks work on 'classification', not {self.recipe.task.name!r}"
            )
        Images.of(assembly.data.dataset)
        return assembly

    def twin(self, *facts: str, **run: Any) -> Recipe:
        """Make the recipe of a simulation by the attacker, with the same public initial model and
        different randomness.

        Args:
            *facts: facts that distinguish this simulation from the attacker's other simulations.
            **run: values of [run] to change.
        """
        seed, model = self.recipe.run.seed, self.recipe.model
        new_seed = None if seed is None else self.keys(*facts).root
        initial = (seed or 0) if model.seed is None else model.seed
        return self.recipe.model_copy(
            update={
                "run": self.recipe.run.model_copy(update={"seed": new_seed, "audit": False, **run}),
                "model": model.model_copy(update={"seed": initial}),
            }
        )

    def keys(self, *facts: str) -> KeyRing:
        """Return the keys of the attacker's simulations. They are never the keys of the attacked
        run, whose noise the attacker does not know.
        """
        return KeyRing.from_seed(self.recipe.run.seed).derive(
            b"attack", *(fact.encode() for fact in facts)
        )


def in_usual_pixels(recipe: Recipe, divided: Division | None = None) -> Assembly:
    """Build the recipe's federation for images in [-1, 1], which its model first maps to the
    interval `data.pixels`.

    The federation is the same up to rounding. Reconstructions are made, shown and compared in [-1,
    1].

    Args:
        recipe: the recipe.
        divided: data and division that are used instead of the recipe's.
    """
    pixels = recipe.data.pixels
    if pixels is None:
        return Assembly(recipe, divided=divided)
    usual = recipe.model_copy(update={"data": recipe.data.model_copy(update={"pixels": None})})
    low, high = pixels

    class Moved(RunModel):
        """The recipe's model with the same parameters, which first rescales its inputs."""

        @override
        def module(self) -> nn.Module:
            module = super().module()
            module.register_forward_pre_hook(
                lambda _, given: (low + (given[0] + 1) * ((high - low) / 2), *given[1:])
            )
            return module

    return Assembly(usual, divided=divided, model=Moved)


def _sequential(recipe: Recipe) -> Recipe:
    """Choose the sequential trainer if the recipe leaves the choice open, because attacks train few
    clients at a time.
    """
    if recipe.training.undecided:
        training = recipe.training.model_copy(
            update={"vectorize": "off", "compile": False, "kernel": None}
        )
        return recipe.model_copy(update={"training": training})
    return recipe


def train(
    assembly: Assembly,
    run_dir: Path,
    *,
    grid: Callable[[LayerwiseClient], LocalGrid] = LocalGrid.of,
    progress: OnRound | None = None,
) -> tuple[nn.Module, RunSummary]:
    """Run the assembly's federation in this process, in a new run folder, and return its final
    model and its summary.

    Args:
        assembly: the federation, whose data may differ from its recipe's data.
        run_dir: folder to create.
        grid: function that makes the grid of a client object.
        progress: called with each round's metrics row.
    """
    folder = new_folder.create(run_dir, assembly.recipe)
    keys, _ = folder.keys(assembly.recipe.run.seed)
    result = serve(grid(assembly.client(keys, AnyClient())), assembly, folder, "local", progress)
    return folder.checkpoints.into(assembly.model.module(), assembly.model.layers), result


@dataclass(frozen=True, eq=False)
class Pool:
    """All training and test examples of a data set. A federation can train on any of these
    examples. The members are units, which are single examples, or clients (`ClientPool`) with all
    of their examples.

    Attributes:
        x: inputs [n, C, H, W].
        y: labels [n].
        unit_of: unit of each example, int64 [n].
        trained: whether a unit belongs to the recipe's training set, bool [units].
        classes: number of classes.
    """

    unit: ClassVar[Unit] = "example"

    x: np.ndarray
    y: np.ndarray
    unit_of: np.ndarray
    trained: np.ndarray
    classes: int

    @classmethod
    def of(cls, dataset: Images, limit: int | None = None, seed: int = 0) -> Pool:
        """Make a pool of the set's examples, or of `limit` examples chosen at random."""
        x, y = (
            np.concatenate([dataset.train_x, dataset.test_x]),
            np.concatenate([dataset.train_y, dataset.test_y]),
        )
        trained = np.arange(len(y)) < len(dataset.train_y)
        if limit is not None and limit < len(y):
            rows = np.sort(np.random.default_rng(seed).permutation(len(y))[:limit])
            x, y, trained = x[rows], y[rows], trained[rows]
        return cls(x, y, np.arange(len(y)), trained, dataset.classes)

    def halves(self, models: int, seed: int) -> np.ndarray:
        """Draw the units on which each federation is trained, bool [models, units]."""
        return random_halves(len(self.trained), models, seed=seed, equal=self.unit == "client")

    def by_unit(self, values: np.ndarray) -> np.ndarray:
        """Average over the examples of each unit, [..., n] to [..., units]."""
        return values

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of all examples as tensors."""
        return torch.from_numpy(self.x), torch.from_numpy(self.y)

    def federation(self, recipe: Recipe, members: np.ndarray) -> Assembly:
        """Build the recipe's federation on the units in `members` (bool [units]); the other units
        are its test set.

        Raises:
            ConfigError: the partition needs the data set's own users.
        """
        dataset = self._split(recipe, members)
        division = _division(dataset, recipe, recipe.federation.clients)
        return Assembly(recipe, divided=(dataset, division))

    def _split(self, recipe: Recipe, members: np.ndarray) -> DataSet:
        """Divide the pool: the members' examples are the training set, the other examples the test
        set.
        """
        rows = members[self.unit_of]
        return DataSet(
            recipe.data.name, self.x[rows], self.y[rows], self.x[~rows], self.y[~rows], self.classes
        )


@dataclass(frozen=True, eq=False)
class ClientPool(Pool):
    """A pool of clients: a client is in a federation with all of its examples, or not at all."""

    unit: ClassVar[Unit] = "client"

    @override
    def by_unit(self, values: np.ndarray) -> np.ndarray:
        rows = np.atleast_2d(values)
        counts = np.bincount(self.unit_of, minlength=len(self.trained))
        means = np.stack(
            [np.bincount(self.unit_of, row, len(self.trained)) / counts for row in rows]
        )
        return means.reshape(*values.shape[:-1], -1)

    @classmethod
    def of_recipe(cls, dataset: Images, recipe: Recipe, limit: int | None = None) -> ClientPool:
        """Make a pool of twice as many clients as the recipe has, among which its partition divides
        all examples of the set.
        """
        pool = Pool.of(dataset, limit)
        owner = _owners(pool.x, pool.y, recipe, pool.classes, 2 * recipe.federation.clients)
        return cls._of(pool, owner, np.zeros(2 * recipe.federation.clients, dtype=bool))

    @classmethod
    def of_run(cls, dataset: Images, recipe: Recipe, partition: Partition) -> ClientPool:
        """Make a pool of a run's clients, and of further clients of the same size that hold the
        test examples.
        """
        pool, clients = Pool.of(dataset), recipe.federation.clients
        others = max(2, round(clients * len(dataset.test_y) / len(dataset.train_y)))
        owner = partition.owners(len(pool.y))
        tested = ~pool.trained
        owner[tested] = clients + _owners(
            pool.x[tested], pool.y[tested], recipe, pool.classes, others
        )
        return cls._of(pool, owner, np.arange(clients + others) < clients)

    @classmethod
    def _of(cls, pool: Pool, owner: np.ndarray, trained: np.ndarray) -> ClientPool:
        """Make a pool of the clients that have examples, because a model learns nothing about the
        others.
        """
        held = owner >= 0
        present, unit_of = np.unique(owner[held], return_inverse=True)
        return cls(pool.x[held], pool.y[held], unit_of, trained[present], pool.classes)

    def federation(self, recipe: Recipe, members: np.ndarray) -> Assembly:
        """Build the recipe's federation of the clients in `members` (bool [clients]). The other
        clients hold its test set.

        Raises:
            ConfigError: the recipe has a fixed cohort size, which is not a whole number for this
                many clients.
        """
        raw = recipe.plain_values()
        raw["federation"]["clients"] = int(members.sum())
        dataset, units = self._split(recipe, members), self.unit_of[members[self.unit_of]]
        numbers = np.cumsum(members) - 1
        divided = Partition.from_owner(numbers[units], int(members.sum()))
        return Assembly(recipes.Recipe.model_validate(raw), divided=(dataset, divided))


def _owners(x: np.ndarray, y: np.ndarray, recipe: Recipe, classes: int, clients: int) -> np.ndarray:
    """Find the client that holds each example under the recipe's partition, -1 for none, [n];
    errors are those of `_division`.
    """
    return _division(
        DataSet(recipe.data.name, x, y, x[:1], y[:1], classes), recipe, clients
    ).owners(len(y))


def _division(dataset: DataSet, recipe: Recipe, clients: int) -> Partition:
    """Divide another data set by the recipe's partition.

    Raises:
        ConfigError: the partition needs the data set's own users.
    """
    section = recipe.data
    if section.partition == "natural":
        raise ConfigError(
            "data.partition = 'natural' divides by the set's own users, which the attacker's "
            "federations on other examples do not have: use another partition"
        )
    return data.divide(
        dataset, clients, section.partition, seed=section.partition_seed, **section.options
    )
