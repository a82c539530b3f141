"""What is attacked: a recipe or a run folder, and federations that differ from it in their data only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm import data
from fedlgm.data import DataSet, Partition
from fedlgm.errors import ConfigError, RunError
from fedlgm.keys import KeyRing
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly, settled
from simulations.config.recipe import Recipe
from simulations.engines.local import LocalGrid
from simulations.runs.folder import RunFolder
from simulations.runs.server import serve

OnRound = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Target:
    """A recipe, or a finished run with the recipe it was made of.

    Attributes:
        recipe: the recipe; every "auto" in it is settled.
        folder: the run, or None.
    """

    recipe: Recipe
    folder: RunFolder | None = None

    @classmethod
    def open(cls, name: str | None, overrides: Iterable[str] = ()) -> Target:
        """The run folder or recipe called `name`.

        Raises:
            ConfigError: no such recipe, or overrides for a run, which is finished as it is.
            RunError: a folder that is no run, or a run that has not finished.
        """
        overrides = list(overrides)
        if name is None or not Path(name).is_dir():
            return cls(_sequential(settled(recipes.load(name, overrides))))
        folder = RunFolder.open(Path(name))
        if overrides:
            raise ConfigError(
                f"--set changes a recipe, but {name} is a finished run: attack {folder.recipe_file} instead"
            )
        if folder.result() is None:
            raise RunError(f"{name} has not finished: continue it first with fedlgm simulate --resume {name}")
        return cls(_sequential(settled(folder.recipe())), folder)

    @property
    def name(self) -> str:
        """For titles."""
        return self.recipe.name if self.folder is None else str(self.folder.path)

    def assembly(self) -> Assembly:
        """The objects of its recipe."""
        return Assembly(self.recipe)

    def keys(self, *facts: str) -> KeyRing:
        """Keys of the attack's own simulations: never those of the attacked run, whose noise nobody knows."""
        return KeyRing.from_seed(self.recipe.run.seed).derive(b"attack", *(fact.encode() for fact in facts))

    def figures(self) -> dict[str, Any]:
        """What is known of a finished run: accuracy, epsilon proven and claimed, guarantee; empty for a recipe."""
        result = (self.folder.result() if self.folder is not None else None) or {}
        known = ("accuracy", "epsilon", "claimed_epsilon", "audited_epsilon", "delta", "guarantee", "guarantee_status")
        return {name: result[name] for name in known if name in result}


def _sequential(recipe: Recipe) -> Recipe:
    """The recipe with the sequential trainer where it leaves the choice open: attacks train few clients at a time."""
    if recipe.training.vectorize == "auto" or recipe.training.compile == "auto":
        training = recipe.training.model_copy(update={"vectorize": "off", "compile": False})
        return recipe.model_copy(update={"training": training})
    return recipe


@dataclass(frozen=True, eq=False)
class Trained:
    """A model, and what it was trained on.

    Attributes:
        module: the model with its final weights.
        result: the run's summary.
    """

    module: nn.Module
    result: dict[str, Any]


def train(
    assembly: Assembly,
    run_dir: Path,
    keys: KeyRing,
    *,
    grid: Callable[[Any], LocalGrid] = LocalGrid,
    progress: OnRound | None = None,
) -> Trained:
    """Run the assembly's federation in this process, in a new run folder.

    Args:
        assembly: the federation; `holding` gives it other data than its recipe's.
        run_dir: folder to create.
        keys: ring of cohorts, batches and noise. The recipe's seed then only fixes the initial model, which is public
            and the same for the attacker's own simulations.
        grid: what carries the messages.
        progress: called with each round's metrics row.
    """
    folder = RunFolder.create(run_dir, assembly.recipe)
    result = serve(grid(assembly.client(keys).as_app()), assembly, folder, keys, "local", progress)
    return Trained(module_of(assembly, folder), result)


def module_of(assembly: Assembly, folder: RunFolder) -> nn.Module:
    """The model with a run's final weights."""
    checkpoint = folder.latest(assembly.layers)
    if checkpoint is None:
        raise RunError(f"{folder.path} has no checkpoint: there is no model to attack")
    module = assembly.module()
    assembly.layers.load_(module, checkpoint.transcript.models[-1])
    return module.eval()


@dataclass(frozen=True, eq=False)
class Pool:
    """All examples of a data set, training and test, of which federations train on any part.

    Attributes:
        x: inputs [n, C, H, W].
        y: labels [n].
        trained: whether an example belongs to the recipe's own training set, bool [n].
    """

    x: np.ndarray
    y: np.ndarray
    trained: np.ndarray

    @classmethod
    def of(cls, dataset: DataSet, limit: int | None = None, seed: int = 0) -> Pool:
        """The set's examples; at most `limit`, chosen at random."""
        x, y = np.concatenate([dataset.train_x, dataset.test_x]), np.concatenate([dataset.train_y, dataset.test_y])
        trained = np.arange(len(y)) < len(dataset.train_y)
        if limit is not None and limit < len(y):
            rows = np.sort(np.random.default_rng(seed).permutation(len(y))[:limit])
            x, y, trained = x[rows], y[rows], trained[rows]
        return cls(x, y, trained)

    def tensors(self, rows: np.ndarray | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some examples."""
        return torch.from_numpy(self.x[rows]), torch.from_numpy(self.y[rows])

    def federation(self, recipe: Recipe, members: np.ndarray) -> Assembly:
        """The recipe's federation on the examples in `members` (bool [n]); the others are its test set.

        Raises:
            ConfigError: a partition that needs the data set's own users.
        """
        if recipe.data.partition == "natural":
            raise ConfigError(
                "data.partition = 'natural' divides by the set's own users, which shadow federations on other examples "
                "do not have: use another partition"
            )
        original = data.load(recipe.data.name, recipe.data.dir)
        own = DataSet(
            original.name, self.x[members], self.y[members], self.x[~members], self.y[~members], original.classes
        )
        return Assembly(recipe).holding(own, _divide(recipe, own))


def _divide(recipe: Recipe, dataset: DataSet) -> Partition:
    section = recipe.data
    return data.partition(
        dataset.train_y, recipe.federation.clients, section.partition, seed=section.partition_seed, **section.options
    )
