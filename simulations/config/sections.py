"""The sections of a recipe and the values of their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedlgm import data, mechanisms, tasks
from fedlgm.devices import NoiseChoice
from fedlgm.errors import prefix_key
from fedlgm.extension import is_object, is_reference, missing_object
from fedlgm.facts import Scheme
from fedlgm.mechanisms import Mechanism
from fedlgm.noised_in_shares import Shares
from fedlgm.privacy.guarantee import Relation, Trust, Unit
from fedlgm.tasks import Task
from fedlgm.training import LocalTraining, kinds
from fedlgm.training.kinds import TrainerKind
from strategies.server_optimizer import Name as OptimizerName

_NOISE = ("independent", "banded", "square-root", "blt", "given")
_LARGEST = 1e9  # float32 still multiplies with it


def absolute(path: str | None) -> str | None:
    """A path that does not depend on the working directory."""
    return None if path is None else str(Path(path).expanduser().resolve())


class Section(BaseModel):
    """A section that knows all of its keys.

    Example:
        >>> Privacy(epsilon=8.0, delta=1e-5, epsilom=4.0)
        Traceback (most recent call last):
            ...
        pydantic_core._pydantic_core.ValidationError: 1 validation error for Privacy
        epsilom
        ...
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _OpenSection(BaseModel):
    """A section whose further keys are options of the named object."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    taken: ClassVar[frozenset[str]] = frozenset()  # arguments that are not options

    @model_validator(mode="after")
    def _options_are_options(self) -> Self:
        wrong = sorted(self.options.keys() & self.taken)
        if wrong:
            raise ValueError(
                f"{wrong[0]!r} is not an option; known here: {', '.join(type(self).model_fields)}, and more"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


READING = (*dict.fromkeys(key for keys in data.OPTIONS.values() for key in keys), "pixels")
"""Keys of [data] about how a set is read."""


class Data(_OpenSection):
    """[data]: the data set and how it is divided; further keys are options of the partition scheme.

    `image_size`, `channels` and `attribute` are for name = "image-folder", whose folder is `dir`. `train_images` and
    `image_classes` are the folder's numbers of training images and of classes: with them a plan needs no folder, and a
    run refuses a folder with other numbers. `pixels` is the interval of a bundled image set's values; default: [-1, 1].
    `file`, `test_file` and the columns `target`, `inputs` and `users` are for name = "table", the columns, `subset` and
    `splits` for name = "hf:owner/name"; `labels` names the classes of both.

    Example:
        >>> Data(name="digits", partition="dirichlet", alpha=0.1).options
        {'alpha': 0.1}
    """

    taken: ClassVar[frozenset[str]] = frozenset({"labels", "clients", "ring", "scheme", "seed", "users", "self"})

    name: str
    dir: str | None = None
    partition: str = "dirichlet"
    partition_seed: int = Field(default=0, ge=0, lt=2**128)
    image_size: int | None = Field(default=None, ge=4, le=4096)
    channels: Literal[1, 3] | None = None
    attribute: str | None = None
    train_images: int | None = Field(default=None, ge=1)
    image_classes: int | None = Field(default=None, ge=2)
    pixels: tuple[float, float] | None = None
    file: str | None = None
    test_file: str | None = None
    target: str | None = None
    users: str | None = None
    inputs: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    subset: str | None = None
    splits: tuple[str, str] | None = None

    @field_validator("file", "test_file")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """Make the path absolute, because workers and resumed runs have other working directories."""
        return absolute(value)

    @property
    def reading(self) -> dict[str, Any]:
        """Options of `fedlgm.data.load` that are given."""
        return self.model_dump(include=set(READING), exclude_none=True)


class Model(_OpenSection):
    """[model]: name; further keys are options of the model. `seed` initialises it; default: the run's seed (or 0).

    `weights` is a safetensors file of initial weights instead, for example of a public base model below adapters.
    Provenance holds the file's SHA-256. `adapters` are options of `fedlgm.models.adapters.adapt`.

    Example:
        >>> Model(name="mlp", hidden=[64]).options
        {'hidden': [64]}
    """

    taken: ClassVar[frozenset[str]] = frozenset({"in_shape", "classes", "self"})

    name: str
    seed: int | None = Field(default=None, ge=0, lt=2**128)
    weights: str | None = None
    adapters: dict[str, Any] | None = None

    @field_validator("weights")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """See `Data`."""
        return absolute(value)


class TaskSection(_OpenSection):
    """[task]: the model's task; further keys are options of the task.

    Example:
        >>> TaskSection(name="regression", loss="huber").build().headline
        'rmse'
    """

    name: str = "classification"

    def build(self) -> Task:
        """The task itself."""
        if is_object(self.name):
            raise missing_object(self.name, "task")
        return tasks.get(self.name, **self.options)


class Federation(Section):
    """[federation]: participation and the server's step; `sampling`: see `fedlgm.facts.Sampling`.

    `users` is for privacy.unit = "user": the user of each client, numbered from 0, or the number of users, where client
    i belongs to user i mod users. `rate` and `cohort` then count users.

    Example:
        >>> Federation(clients=100, rounds=20, cohort=10).share
        0.1
    """

    clients: int = Field(ge=1)
    users: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] | None = None
    rounds: int = Field(ge=1)
    sampling: Scheme = "poisson"
    rate: float | None = Field(default=None, gt=0, le=1)
    cohort: int | None = Field(default=None, ge=1)
    server_optimizer: str = "sgd"
    server_lr: float = Field(default=1.0, gt=0, le=_LARGEST)
    server_momentum: float = Field(default=0.9, ge=0, lt=1)
    server_schedule: str | None = None
    weighting: Literal["uniform"] = "uniform"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    stragglers: float = Field(default=0.0, ge=0, le=1)
    wait_for_nodes: float = Field(default=120.0, gt=0, le=_LARGEST)
    round_timeout: float | None = Field(default=None, gt=0, le=_LARGEST)
    quorum: float | None = Field(default=None, gt=0, le=1)
    max_failures: int | None = Field(default=None, ge=0)

    @field_validator("weighting", mode="before")
    @classmethod
    def _weights_are_uniform(cls, value: object) -> object:
        if value == "num-examples":
            raise ValueError(
                "weights by example counts let one client's weight exceed its bound and reveal its size: use equal "
                "weights, 'uniform'"
            )
        return value

    @field_validator("server_optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        if value not in get_args(OptimizerName) and not (is_reference(value) or is_object(value)):
            known = ", ".join(map(repr, get_args(OptimizerName)))
            raise ValueError(f"must be {known}, or your own as 'package.module:name'")
        return value

    @model_validator(mode="after")
    def _one_size(self) -> Federation:
        if isinstance(self.users, list):
            if len(self.users) != self.clients:
                raise ValueError(f"users names the user of each client: {len(self.users)} for {self.clients} clients")
            if max(self.users) >= self.participants:
                raise ValueError("users are numbered from 0, and each of them has a client")
        if self.participants > self.clients:
            raise ValueError(f"users = {self.users} is more than the {self.clients} clients there are")
        if self.clients == 1 and self.rate is None and self.cohort is None:
            return self
        if (self.rate is None) == (self.cohort is None):
            raise ValueError("give exactly one of rate (share of clients) and cohort (number of clients)")
        who = "clients" if self.users is None else "users"
        if self.cohort is not None and self.cohort > self.participants:
            raise ValueError(f"cohort = {self.cohort} is more than the {self.participants} {who} there are")
        return self

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The clients of each user; without `users` every client is one."""
        found: list[list[int]] = [[] for _ in range(self.participants)]
        for client in range(self.clients):
            user = self.users[client] if isinstance(self.users, list) else client % self.participants
            found[user].append(client)
        return tuple(map(tuple, found))

    @property
    def participants(self) -> int:
        """Whom a round draws from: users where there are some, else clients."""
        return len(set(self.users)) if isinstance(self.users, list) else self.users or self.clients

    @property
    def share(self) -> float:
        """Expected share of the clients in a round: `rate`, or that of `cohort`; a whole number of clients if fixed."""
        rate = self.rate if self.rate is not None else (self.cohort or 1) / self.participants
        if self.sampling in ("fixed", "min-separation"):
            rate = max(1, round(rate * self.participants)) / self.participants
        return rate


class Training(Section):
    """[training]: local training of a client.

    With example-level privacy whose noise the server adds, a round is one step: `batch_size` is the expected Poisson
    batch, and `optimizer`, `lr` and `momentum` are those of the step. If clients add the noise, every round has `steps`
    steps (default: `epochs` times 1 / `sampling_rate`), and each step draws every example with the public probability
    `sampling_rate`; the noisy sum is divided by `batch_size`. `exact_sums` sums the gradients of a batch in float64.

    Example:
        >>> Training(epochs=2, batch_size=32).local.steps(100)
        8
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(default=0.1, gt=0, le=_LARGEST)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=32, ge=1)
    sampling_rate: float | None = Field(default=None, gt=0, le=1)
    steps: int | None = Field(default=None, ge=1)
    exact_sums: bool | None = None
    gradient_clip: float | None = Field(default=None, gt=0, le=_LARGEST)
    vectorize: Literal["off", "on", "auto"] = "off"
    width: int | None = Field(default=None, ge=1)
    compile: bool | Literal["auto"] = False
    kernel: Literal["torch", "native", "auto"] | None = None
    device: str = Field(default="cpu", pattern=r"^(auto|cpu|cuda(:\d+)?|mps|xpu)$")

    @field_validator("kernel")
    @classmethod
    def _usual(cls, kernel: str | None) -> str | None:
        return None if kernel == "torch" else kernel  # the text of recipes without a kernel stays as it was

    @model_validator(mode="after")
    def _one_at_a_time(self) -> Self:
        if self.kernel == "native" and self.vectorize != "off":
            raise ValueError(
                "training.kernel = 'native' trains one client after another: use training.vectorize = 'off'"
            )
        return self

    @property
    def undecided(self) -> bool:
        """Whether a run settles something of it when it starts: trainers differ in the last bits."""
        return "auto" in (self.vectorize, self.compile, self.kernel)

    @property
    def local(self) -> LocalTraining:
        """As the library sees it."""
        return LocalTraining(**self.model_dump(include=set(LocalTraining.__dataclass_fields__)))


class TrainerSection(_OpenSection):
    """[trainer]: the clients' trainer, if not plain minibatch training; further keys are options of the trainer.

    Example:
        >>> TrainerSection(name="fedprox", mu=0.1).options
        {'mu': 0.1}
    """

    taken: ClassVar[frozenset[str]] = frozenset({"module", "layers", "settings", "device", "task", "width", "compile"})

    name: str

    def build(self) -> TrainerKind:
        """The kind of trainer."""
        if is_object(self.name):
            raise missing_object(self.name, "trainer")
        return kinds.get(self.name, **self.options)


class MechanismSection(_OpenSection):
    """[mechanism]: name, variant and the layer grouping; further keys are options of the mechanism.

    Example:
        >>> MechanismSection(name="gaussian", bound=0.5).build().bound
        0.5
    """

    name: str
    variant: Literal["sound", "published"] = "sound"
    group_by: Literal["module", "tensor", "adapter", "factor", "kind"] = "module"

    def build(self) -> Mechanism:
        """The mechanism itself."""
        if is_object(self.name):
            raise missing_object(self.name, "mechanism")
        return mechanisms.get(self.name, variant=self.variant, **self.options)


class Privacy(Section):
    """[privacy]: the budget of the whole run, of each `unit` ("client", the default, "example" or "user").

    If clients add noise to their own example-level steps (unit = "example", trust = "local"), it is each client's.

    `noise` is "independent" in every round, or correlated over the rounds: "banded" (least error of the models after
    each round), "square-root" (closed form) or "blt" (`buffers` vectors of state instead of `bands` - 1). It needs a
    `sampling` that keeps rounds between a client's participations; `min_separation` is their number (of groups, under
    cyclic and grouped-poisson sampling). Its default is the largest that the population allows, or `bands`; the default
    of `bands` is `min_separation`.

    Example:
        >>> budget = Privacy(epsilon=8.0, delta=1e-5)
        >>> budget.trust, budget.accountant, budget.noise
        ('central', 'pld', 'independent')
    """

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    accountant: Literal["pld", "rdp"] = "pld"
    unit: Unit | None = None
    trust: Trust = "central"
    relation: Relation | None = None
    max_participations: int | None = Field(default=None, ge=1)
    noise: str = "independent"
    correlation: dict[str, Any] | None = None
    bands: int | None = Field(default=None, ge=1)
    buffers: int | None = Field(default=None, ge=1, le=8)
    min_separation: int | None = Field(default=None, ge=1)
    noise_backend: NoiseChoice = "auto"

    @field_validator("noise")
    @classmethod
    def _known_noise(cls, value: str) -> str:
        if value not in _NOISE and not is_reference(value):
            from fedlgm.correlation import names  # SciPy's optimisers

            if value not in names():
                raise ValueError(f"must be {', '.join(map(repr, _NOISE))}, or your own as 'package.module:name'")
        return value


class Run(Section):
    """[run]: seed and engine settings. `seed`, `block_size`, `threads` and `audit` are part of the result's bits.

    A `seed` is public: it makes a simulation reproducible and its noise predictable. Real nodes refuse it unless
    `test_mode` states that nothing needs protection. With `audit`, canaries take part in every round of a simulation,
    and the summary has their audit. `patience` ends a run after that many evaluations of the public test set without a
    better headline; its epsilon stays that of all rounds (`simulations.runs.stopping`). `trackers` follow the run:
    tensorboard, mlflow, wandb, or your own as "package.module:name"; default: TensorBoard if it is installed.

    Example:
        >>> Run().seed is None  # noise that nobody can draw again
        True
    """

    seed: int | None = Field(default=None, ge=0, lt=2**128)
    block_size: int = Field(default=8, ge=1)
    threads: int = Field(default=1, ge=1)
    evaluate_every: int = Field(default=1, ge=1)
    checkpoint_every: int = Field(default=1, ge=1)
    workers: int | None = Field(default=None, ge=1)
    test_mode: bool = False
    audit: bool = False
    patience: int | None = Field(default=None, ge=1)
    trackers: list[str] | None = None


class Risk(Section):
    """[risk]: data and settings with which `fedlgm risk` measures the layers' membership risk.

    A run does not use it. `data` names a public set; default: the public half of a set whose private half is [data],
    else its test examples. The rest is as in `fedlgm.example_level.risk.ShadowTraining`.

    Example:
        >>> from fedlgm.example_level.risk import ShadowTraining
        >>> Risk().epochs == ShadowTraining().epochs
        True
    """

    data: str | None = None
    dir: str | None = None
    attribute: str | None = None
    examples: int | None = Field(default=None, ge=1)
    members: float = Field(default=0.5, gt=0, lt=1)
    epochs: int = Field(default=30, ge=1)
    lr: float = Field(default=1e-3, gt=0, le=_LARGEST)
    batch_size: int = Field(default=64, ge=1)
    adversary_epochs: int = Field(default=30, ge=1)


class Distributed(Section):
    """[distributed]: of privacy.trust = "distributed", where nodes add the noise in shares; see `Shares`.

    Example:
        >>> Distributed(threshold=20, colluders=3).shares.honest
        17
    """

    threshold: int
    colluders: int = 0
    noise: str = "discrete-gaussian"

    @property
    def shares(self) -> Shares:
        """As a library object."""
        with prefix_key("distributed"):
            return Shares(self.threshold, self.colluders, self.noise)


class Deployment(Section):
    """[deployment]: how long a round waits for absent nodes; see `strategies.node.round.Patience`.

    Example:
        >>> Deployment(offline_seconds=10.0).give_up_seconds
        3600.0
    """

    offline_seconds: float = Field(default=30.0, gt=0)
    give_up_seconds: float = Field(default=3600.0, gt=0)
