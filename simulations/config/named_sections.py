"""Sections of a recipe that name an object. Their further keys are the object's options."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fedlgm import data, mechanisms
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import object_or_name
from fedlgm.files import path_of
from fedlgm.mechanisms import Mechanism
from fedlgm.training import kinds, tasks
from fedlgm.training.kinds import TrainerKind
from fedlgm.training.tasks import Task
from simulations.config.sections import Count, Seed


def _absolute(path: str) -> str:
    try:
        return str(path_of("file", path).resolve())
    except ConfigError as error:
        raise ValueError(str(error)) from error


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
"""A path that does not depend on the working directory, because workers and resumed runs have other
working directories."""


class _OpenSection(BaseModel):
    """A section whose further keys are options of the named object."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    taken: ClassVar[frozenset[str]] = frozenset()  # arguments that are not options

    @model_validator(mode="after")
    def _options_are_options(self) -> Self:
        wrong = sorted(self.options.keys() & self.taken)
        if wrong:
            raise ValueError(
                f"{wrong[0]!r} is not an option; known here: {', '.join(type(self).model_fields)}, "
                "and more"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


READING = (*dict.fromkeys(key for keys in data.OPTIONS.values() for key in keys), "pixels")
"""Keys of [data] for reading a set."""


class Data(_OpenSection):
    """[data]: the data set and its division; further keys are options of the partition scheme.

    `image_size`, `channels` and `attribute` are for name = "image-folder", whose folder is `dir`.
    `train_images` and `image_classes` are the folder's numbers of training images and of classes.
    With them a plan needs no folder, and a run refuses a folder with other numbers. `pixels` is the
    interval of a bundled image set's values; default: [-1, 1]. `file`, `test_file` and the columns
    `target`, `inputs` and `users` are for name = "table". The columns, `subset` and `splits` are
    for name = "hf:owner/name". `labels` names the classes of both kinds of data, and `classes` is
    the number of a table's classes if they have no names. `standardise` is "test", which takes the
    mean and standard deviation of the public test rows, or it gives public figures by column: {age
    = [50, 20]}. `categories` are the public categories of columns of text, and `fill` gives the
    public values that fill gaps. `file` may be a pattern for one file of each site.

    Example:
        >>> Data(name="digits", partition="dirichlet", alpha=0.1).options
        {'alpha': 0.1}
    """

    taken: ClassVar[frozenset[str]] = frozenset(
        {"labels", "clients", "ring", "scheme", "seed", "users", "self"}
    )

    name: str
    dir: str | None = None
    partition: str = "dirichlet"
    partition_seed: Seed = 0
    image_size: int | None = Field(default=None, ge=4, le=4096)
    channels: Literal[1, 3] | None = None
    attribute: str | None = None
    train_images: Count | None = None
    image_classes: int | None = Field(default=None, ge=2)
    pixels: tuple[float, float] | None = None
    file: AbsolutePath | None = None
    test_file: AbsolutePath | None = None
    target: str | tuple[str, ...] | None = None
    users: str | None = None
    inputs: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    classes: int | None = Field(default=None, ge=2)
    standardise: Literal["test"] | dict[str, tuple[float, float]] | None = None
    categories: dict[str, tuple[str, ...]] | None = None
    fill: dict[str, float | str] | None = None
    subset: str | None = None
    splits: tuple[str, str] | None = None

    @property
    def reading(self) -> dict[str, Any]:
        """The options of `fedlgm.data.load` that the section states."""
        return self.model_dump(include=set(READING), exclude_none=True)


class Model(_OpenSection):
    """[model]: the model's name; further keys are options of the model. `seed` determines the
    initial weights; default: the run's seed (or 0).

    `weights` is a safetensors file that replaces the initial weights, for example by the weights of
    a public base model below adapters. Provenance holds the file's SHA-256. `adapters` are options
    of `fedlgm.training.models.adapters.adapt`.

    Example:
        >>> Model(name="mlp", hidden=[64]).options
        {'hidden': [64]}
    """

    taken: ClassVar[frozenset[str]] = frozenset({"in_shape", "classes", "self"})

    name: str
    seed: Seed | None = None
    weights: AbsolutePath | None = None
    adapters: dict[str, Any] | None = None


class TaskSection(_OpenSection):
    """[task]: the model's task; further keys are options of the task.

    Example:
        >>> TaskSection(name="regression", loss="huber").build().headline
        'rmse'
    """

    name: str = "classification"

    def build(self) -> Task:
        """The task."""
        return tasks.get(object_or_name(None, self.name, "task"), **self.options)


class TrainerSection(_OpenSection):
    """[trainer]: the clients' trainer, if not plain minibatch training; further keys are options of
    the trainer.

    Example:
        >>> TrainerSection(name="fedprox", mu=0.1).options
        {'mu': 0.1}
    """

    taken: ClassVar[frozenset[str]] = frozenset(
        {"module", "layers", "settings", "device", "task", "width", "compile"}
    )

    name: str

    def build(self) -> TrainerKind:
        """The kind of trainer."""
        return kinds.get(object_or_name(None, self.name, "trainer"), **self.options)


class MechanismSection(_OpenSection):
    """[mechanism]: the mechanism's name and variant, and the grouping of layers; further keys are
    options of the mechanism.

    Example:
        >>> MechanismSection(name="gaussian", bound=0.5).build().bound
        0.5
    """

    name: str
    variant: Literal["sound", "published"] = "sound"
    group_by: Literal["module", "tensor", "adapter", "factor", "kind"] = "module"

    def build(self) -> Mechanism:
        """The mechanism."""
        return mechanisms.get(
            object_or_name(None, self.name, "mechanism"), variant=self.variant, **self.options
        )
