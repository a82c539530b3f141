"""The sections of a recipe and the values of their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from fedlgm.extension.loader import is_object, is_reference
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import Scheme
from fedlgm.privacy.guarantee import Accountant, Relation, Trust, Unit
from fedlgm.training import LocalTraining
from fedlgm.training.devices import NoiseChoice
from fedlgm.wording import prefix_key
from simulations.config.public_seed import PublicSeed
from strategies import server_optimizer as server_optimizers

_NOISE = ("independent", "banded", "square-root", "blt", "given")
_LEAST_SHARE = 1e-12  # accountants fail on much smaller rates
_LARGEST = 1e9  # products with it stay finite in float32


def _accountable(share: float) -> float:
    if share < _LEAST_SHARE:
        raise ValueError(f"must be at least {_LEAST_SHARE:g}")
    return share


def _inside_a_folder(name: str) -> str:
    if not name.isprintable() or "/" in name or "\\" in name:
        raise ValueError("must be a name for folders, without slashes")
    return name


# Values of several keys.
Label = Annotated[str, Field(max_length=150), AfterValidator(_inside_a_folder)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**128)]
Share = Annotated[float, Field(gt=0, le=1), AfterValidator(_accountable)]
Positive = Annotated[float, Field(gt=0, le=_LARGEST)]


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


class Federation(Section):
    """[federation]: participation and the server's step. `fedlgm.planning.facts.Sampling` explains
    `sampling`.

    With sampling = "allocation" every client takes part in exactly `participations` rounds of each
    `block` of rounds (by default, of all rounds); these two keys replace `rate` and `cohort`.

    `users` is for privacy.unit = "user": the user of each client, numbered from 0, or the number of
    users, where client i belongs to user i mod users. `rate` and `cohort` then count users.

    `overlap` is the largest number of clients at which one person has data; clients are drawn and
    bounded one by one, and epsilon is the epsilon of one person at all of these clients.

    Example:
        >>> Federation(clients=100, rounds=20, cohort=10).share
        0.1
    """

    clients: Count
    users: Count | list[Annotated[int, Field(ge=0)]] | None = None
    overlap: Count | None = None
    rounds: Annotated[int, Field(ge=1, le=1_000_000)]  # each round has its plan and its cost
    sampling: Scheme = "poisson"
    participations: Count | None = None
    block: Count | None = None
    rate: Share | None = None
    cohort: Count | None = None
    server_optimizer: str = "sgd"
    server_lr: Positive = 1.0
    server_momentum: float = Field(default=0.9, ge=0, lt=1)
    server_schedule: str | None = None
    weighting: Literal["uniform"] = "uniform"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    stragglers: float = Field(default=0.0, ge=0, le=1)
    wait_for_nodes: Positive = 120.0
    round_timeout: Positive | None = None
    quorum: Share | None = None
    max_failures: int | None = Field(default=None, ge=0)

    @field_validator("weighting", mode="before")
    @classmethod
    def _weights_are_uniform(cls, value: object) -> object:
        if value == "num-examples":
            raise ValueError(
                "weights by example counts let a client's contribution exceed its bound and "
                "reveal its size: use equal weights, 'uniform'"
            )
        return value

    @field_validator("server_optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        known = server_optimizers.names()
        if value not in known and not (is_reference(value) or is_object(value)):
            raise ValueError(
                f"must be {', '.join(map(repr, known))}, or your own as 'package.module:name'"
            )
        return value

    @model_validator(mode="after")
    def _one_size(self) -> Federation:
        if isinstance(self.users, list):
            if len(self.users) != self.clients:
                raise ValueError(
                    f"users names the user of each client: {len(self.users)} for {self.clients} "
                    "clients"
                )
            if max(self.users) >= self.participants:
                raise ValueError("users are numbered from 0, and each of them has a client")
        if self.participants > self.clients:
            raise ValueError(f"users = {self.users} is more than the {self.clients} clients")
        if self._is_allocated():
            return self
        if self.clients == 1 and self.rate is None and self.cohort is None:
            return self
        if (self.rate is None) == (self.cohort is None):
            raise ValueError(
                "give exactly one of rate (share of clients) and cohort (number of clients)"
            )
        who = "clients" if self.users is None else "users"
        if self.cohort is not None and self.cohort > self.participants:
            raise ValueError(f"cohort = {self.cohort} is more than the {self.participants} {who}")
        return self

    def _is_allocated(self) -> bool:
        """Whether the rounds of each client are allocated, by checked settings."""
        if self.sampling != "allocation":
            if self.participations is not None or self.block is not None:
                raise ValueError("participations and block are for sampling = 'allocation'")
            return False
        if self.participations is None or (self.rate, self.cohort) != (None, None):
            raise ValueError(
                "sampling = 'allocation' needs participations, the number of rounds of a block in "
                "which each client takes part, in place of rate and cohort"
            )
        if self.rounds % self.block_rounds:
            raise ValueError(
                f"rounds = {self.rounds} must be a multiple of block = {self.block_rounds}, because "
                "every block costs as much as a complete one"
            )
        if self.participations > self.block_rounds:
            raise ValueError(
                f"participations = {self.participations} is more than the {self.block_rounds} "
                "rounds of a block"
            )
        return True

    @property
    def block_rounds(self) -> int:
        """Rounds of a block, for sampling = "allocation"."""
        return self.block or self.rounds

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The clients of each user; without `users` every client is one user."""
        members: list[list[int]] = [[] for _ in range(self.participants)]
        for client in range(self.clients):
            user = (
                self.users[client] if isinstance(self.users, list) else client % self.participants
            )
            members[user].append(client)
        return tuple(map(tuple, members))

    @property
    def participants(self) -> int:
        """The population of a round's draw, which is the number of users, or of clients if there
        are no users.
        """
        return len(set(self.users)) if isinstance(self.users, list) else self.users or self.clients

    @property
    def share(self) -> float:
        """Expected share of the clients in a round, from `rate` or `cohort`. If the sampling fixes
        the number of clients, this number is whole.
        """
        if self.participations is not None:
            return self.participations / self.block_rounds
        rate = self.rate if self.rate is not None else (self.cohort or 1) / self.participants
        if self.sampling in ("fixed", "min-separation"):
            rate = max(1, round(rate * self.participants)) / self.participants
        return rate


class Training(Section):
    """[training]: local training of a client.

    With example-level privacy and noise added by the server, a round is one step: `batch_size` is
    the expected Poisson batch, and `optimizer`, `lr`, `momentum` and `weight_decay` are those of
    the step. If clients add the noise, every round has `steps` steps (default: `epochs` times 1 /
    `sampling_rate`). Each step draws every example with the public probability `sampling_rate`, and
    the noisy sum is divided by `batch_size`. `exact_sums` sums the gradients of a batch in float64.

    Example:
        >>> Training(epochs=2, batch_size=32).local.steps(100)
        8
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.1
    momentum: float = Field(default=0.0, ge=0, lt=1)
    epochs: Count = 1
    batch_size: Count = 32
    sampling_rate: Share | None = None
    steps: Count | None = None
    exact_sums: bool | None = None
    gradient_clip: Positive | None = None
    weight_decay: Positive | None = None
    vectorize: Literal["off", "on", "auto"] = "off"
    width: Count | None = None
    compile: bool | Literal["auto"] = False
    kernel: Literal["torch", "native", "auto"] | None = None
    device: str = Field(default="cpu", pattern=r"^(auto|cpu|cuda(:\d+)?|mps|xpu)$")

    @field_validator("optimizer", mode="before")
    @classmethod
    def _name_adamw(cls, value: object) -> object:
        if isinstance(value, str) and value.lower() == "adamw":
            raise ValueError("AdamW is optimizer = 'adam' with a weight_decay")
        return value

    @field_validator("kernel")
    @classmethod
    def _usual(cls, kernel: str | None) -> str | None:
        # the text of recipes without a kernel stays as it was
        return None if kernel == "torch" else kernel

    @model_validator(mode="after")
    def _one_at_a_time(self) -> Self:
        if self.kernel == "native" and self.vectorize != "off":
            raise ValueError(
                "training.kernel = 'native' trains one client after another: use "
                "training.vectorize = 'off'"
            )
        return self

    @property
    def undecided(self) -> bool:
        """Whether some values are "auto". A run replaces them when it starts, because trainers
        differ in the last bits.
        """
        return "auto" in (self.vectorize, self.compile, self.kernel)

    @property
    def local(self) -> LocalTraining:
        """The settings as `LocalTraining`."""
        return LocalTraining(**self.model_dump(include=set(LocalTraining.__dataclass_fields__)))


class Privacy(Section):
    """[privacy]: the budget of the whole run, for each `unit` ("client", the default, "example" or
    "user").

    If clients add noise to their own example-level steps (unit = "example", trust = "local"), the
    budget is each client's. `noise_multiplier` in place of `epsilon` fixes the noise; `epsilon`
    then follows from the noise.

    `noise` is "independent" in every round, or correlated over the rounds: "banded" (least error of
    the models after each round), "square-root" (closed form) or "blt" (`buffers` vectors of state
    instead of `bands` - 1). Correlated noise needs a `sampling` that keeps rounds between a
    client's participations. `min_separation` is the number of these rounds (of groups, under cyclic
    and grouped-poisson sampling). Its default is the largest separation that the population
    permits. Under grouped-poisson sampling its default is `bands`, if `bands` is given. The default
    of `bands` is `min_separation`.

    Example:
        >>> budget = Privacy(epsilon=8.0, delta=1e-5)
        >>> budget.trust, budget.accountant, budget.noise
        ('central', 'pld', 'independent')
    """

    epsilon: float = Field(gt=0)
    noise_multiplier: Positive | None = None
    delta: float = Field(gt=0, lt=1)
    accountant: Accountant = "pld"
    unit: Unit | None = None
    trust: Trust = "central"
    relation: Relation | None = None
    max_participations: Count | None = None
    noise: str = "independent"
    correlation: dict[str, Any] | None = None
    bands: Count | None = None
    buffers: int | None = Field(default=None, ge=1, le=8)
    min_separation: Count | None = None
    noise_backend: NoiseChoice = "auto"

    @field_validator("noise")
    @classmethod
    def _known_noise(cls, value: str) -> str:
        if value not in _NOISE and not is_reference(value):
            from fedlgm.noise.correlation import names  # SciPy's optimisers

            choices = [*_NOISE, *(name for name in names() if name not in _NOISE)]
            if value not in choices:
                raise ValueError(
                    f"must be {', '.join(map(repr, choices))}, or your own as 'package.module:name'"
                )
        return value


class Run(Section):
    """[run]: seed and engine settings. `seed`, `block_size`, `threads` and `audit` determine the
    result's bits.

    A `seed` is public: it makes a simulation reproducible and its noise predictable. Real nodes
    refuse it unless `test_mode` states that nothing needs protection. With `audit`, canaries take
    part in rounds of a simulation, and the printed summary contains their audit. `patience` ends a
    run after this many evaluations of the public test set without a better headline metric; its
    epsilon remains the epsilon of all planned rounds (`simulations.runs.stopping`). `trackers`
    follow the run: tensorboard, mlflow, wandb, or your own as "package.module:name"; default:
    TensorBoard if it is installed. `keep_releases` keeps what a certificate needs
    (`fedlgm_lab.certificate`), and `beacon` is the file in which an auditor answers the commitment
    to the noise.

    Example:
        >>> Run().seed is None  # noise that nobody can draw again
        True
    """

    seed: Seed | None = None
    block_size: Count = 8
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    evaluate_every: Count = 1
    checkpoint_every: Count = 1
    workers: Count | None = None
    test_mode: bool = False
    audit: bool = False
    patience: Count | None = None
    trackers: list[str] | None = None
    keep_releases: bool | None = None
    beacon: str | None = None

    @field_validator("keep_releases")
    @classmethod
    def _off_is_none(cls, value: bool | None) -> bool | None:
        return value or None  # the text of recipes that keep nothing stays as it was

    @field_validator("seed", mode="wrap")
    @classmethod
    def _keep_mark(cls, value: Any, check: Callable[[Any], Any]) -> Any:
        checked = check(value)
        return value if isinstance(value, PublicSeed) else checked


class Risk(Section):
    """[risk]: data and settings with which `fedlgm risk` measures the layers' membership risk.

    A run does not use this section. `data` names a public set; default: the public half of a set
    whose private half is [data], or else its test examples. The other keys are those of
    `fedlgm_lab.risk.exposure.ShadowTraining`.

    Example:
        >>> from fedlgm_lab.risk.exposure import ShadowTraining
        >>> Risk().epochs == ShadowTraining().epochs
        True
    """

    data: str | None = None
    dir: str | None = None
    attribute: str | None = None
    examples: Count | None = None
    members: float = Field(default=0.5, gt=0, lt=1)
    epochs: Count = 30
    lr: Positive = 1e-3
    batch_size: Count = 64
    adversary_epochs: Count = 30


class Distributed(Section):
    """[distributed]: settings of privacy.trust = "distributed", where nodes add the noise in shares
    (see `Shares`).

    Example:
        >>> Distributed(threshold=20, colluders=3).shares.honest
        17
    """

    threshold: int
    colluders: int = 0
    noise: str = "discrete-gaussian"

    @property
    def shares(self) -> Shares:
        """The shares as a library object."""
        with prefix_key("distributed"):
            return Shares(self.threshold, self.colluders, self.noise)


class Deployment(Section):
    """[deployment]: waiting times of a round for absent nodes (see
    `fedlgm_nodes.server.round.Patience`).

    With `one_node_per_person` the epsilon also holds for a person. Nodes whose policies do not say
    which people count at other nodes then refuse the run (see `fedlgm_nodes.service.people`).

    Example:
        >>> Deployment(offline_seconds=10.0).give_up_seconds
        3600.0
    """

    offline_seconds: float = Field(default=30.0, gt=0)
    give_up_seconds: float = Field(default=3600.0, gt=0)
    one_node_per_person: bool | None = None
