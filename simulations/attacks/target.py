"""What is attacked: a recipe or a run folder, and federations that differ from it in their data only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients import AnyClient
from fedlgm import data
from fedlgm.data import DataSet
from fedlgm.errors import ConfigError, RunError
from fedlgm.keys import KeyRing
from fedlgm.tasks import Classification
from simulations.attacks.rows import Attacked
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly, settled
from simulations.config.recipe import Recipe
from simulations.engines.local import LocalGrid
from simulations.runs.folder import RunFolder
from simulations.runs.rows import OnRound, RunSummary, excerpt
from simulations.runs.server import serve


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, which is what the attacks work on.

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
        """The set's images.

        Raises:
            ConfigError: a set of other data.
        """
        x, test_x, y = dataset.train_x, dataset.test_x, dataset.train_y
        if isinstance(x, tuple) or isinstance(test_x, tuple) or x.ndim != 4 or y.ndim != 1 or dataset.classes is None:
            raise ConfigError(
                f"the attacks need labelled images [n, C, H, W], and data set {dataset.name!r} holds other data"
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
        folder.finished()
        return cls(_sequential(settled(folder.recipe())), folder)

    @property
    def name(self) -> str:
        """For titles."""
        return self.recipe.name if self.folder is None else str(self.folder.path)

    def assembly(self, *, reconstructs: bool = False) -> Assembly:
        """The objects of its recipe.

        Args:
            reconstructs: whether the attack makes images, which it looks for in [-1, 1]: see `in_usual_pixels`.

        Raises:
            ConfigError: another task than classification, or data that are not labelled images.
        """
        assembly = in_usual_pixels(self.recipe) if reconstructs else Assembly(self.recipe)
        if not isinstance(assembly.task, Classification):
            raise ConfigError(f"task.name: the attacks work on 'classification', not {self.recipe.task.name!r}")
        Images.of(assembly.dataset)
        return assembly

    def twin(self, *facts: str, **run: Any) -> Recipe:
        """The recipe of a simulation of the attacker's own: the same public initial model, other randomness.

        Args:
            *facts: what tells it from the attacker's other simulations.
            **run: values of [run] that it changes.
        """
        seed, model = self.recipe.run.seed, self.recipe.model
        own = None if seed is None else self.keys(*facts).root
        initial = (seed or 0) if model.seed is None else model.seed
        return self.recipe.model_copy(
            update={
                "run": self.recipe.run.model_copy(update={"seed": own, "audit": False, **run}),
                "model": model.model_copy(update={"seed": initial}),
            }
        )

    def keys(self, *facts: str) -> KeyRing:
        """Keys of the attack's own simulations: never those of the attacked run, whose noise nobody knows."""
        return KeyRing.from_seed(self.recipe.run.seed).derive(b"attack", *(fact.encode() for fact in facts))

    def figures(self) -> Attacked:
        """What is known of a finished run: accuracy, epsilon proven and claimed, guarantee; empty for a recipe."""
        return excerpt(Attacked, (self.folder.result() if self.folder is not None else None) or {})


def in_usual_pixels(recipe: Recipe) -> Assembly:
    """The recipe's federation with images in [-1, 1], which its model takes to the interval `data.pixels` first.

    It is the same federation up to rounding; reconstructions are looked for, shown and compared in [-1, 1].
    """
    pixels = recipe.data.pixels
    if pixels is None:
        return Assembly(recipe)
    usual = recipe.model_copy(update={"data": recipe.data.model_copy(update={"pixels": None})})
    return _Moved(usual, pixels=pixels)


@dataclass(frozen=True)
class _Moved(Assembly):
    """A federation whose model moves images in [-1, 1] to [low, high].

    Attributes:
        pixels: low and high.
    """

    pixels: tuple[float, float] = (-1.0, 1.0)

    def module(self) -> nn.Module:
        """The recipe's model behind the move, with the same parameters."""
        made, (low, high) = super().module(), self.pixels
        made.register_forward_pre_hook(lambda _, given: (low + (given[0] + 1) * ((high - low) / 2), *given[1:]))
        return made


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
    result: RunSummary


def train(
    assembly: Assembly,
    run_dir: Path,
    *,
    grid: Callable[[Any], LocalGrid] = LocalGrid,
    progress: OnRound | None = None,
) -> Trained:
    """Run the assembly's federation in this process, in a new run folder.

    Args:
        assembly: the federation; `with_data` gives it other data than its recipe's.
        run_dir: folder to create.
        grid: what carries the messages.
        progress: called with each round's metrics row.
    """
    folder = RunFolder.create(run_dir, assembly.recipe)
    keys, _ = folder.keys(assembly.recipe.run.seed)
    result = serve(grid(assembly.client(keys, AnyClient()).as_app()), assembly, folder, "local", progress)
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
        classes: number of classes.
    """

    x: np.ndarray
    y: np.ndarray
    trained: np.ndarray
    classes: int

    @classmethod
    def of(cls, dataset: Images, limit: int | None = None, seed: int = 0) -> Pool:
        """The set's examples; at most `limit`, chosen at random."""
        x, y = np.concatenate([dataset.train_x, dataset.test_x]), np.concatenate([dataset.train_y, dataset.test_y])
        trained = np.arange(len(y)) < len(dataset.train_y)
        if limit is not None and limit < len(y):
            rows = np.sort(np.random.default_rng(seed).permutation(len(y))[:limit])
            x, y, trained = x[rows], y[rows], trained[rows]
        return cls(x, y, trained, dataset.classes)

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
        own = DataSet(
            recipe.data.name, self.x[members], self.y[members], self.x[~members], self.y[~members], self.classes
        )
        section = recipe.data
        divided = data.divide(
            own, recipe.federation.clients, section.partition, seed=section.partition_seed, **section.options
        )
        return Assembly(recipe).with_data(own, divided)
