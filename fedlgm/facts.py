"""The public facts of a run: everything that a plan may depend on besides past releases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fedlgm.errors import ConfigError
from fedlgm.privacy.guarantee import Relation, Trust


@dataclass(frozen=True)
class Sampling:
    """How a round's participants are chosen.

    Attributes:
        scheme: "poisson" (each client independently with probability `rate`) or "fixed" (`rate * population` clients
            without replacement).
        population: number N of registered clients; public.
        rate: q in (0, 1].
    """

    scheme: Literal["poisson", "fixed"]
    population: int
    rate: float

    def __post_init__(self) -> None:
        if self.scheme not in ("poisson", "fixed"):
            raise ConfigError(f"unknown sampling scheme {self.scheme!r}; known: poisson, fixed")
        if self.population < 1:
            raise ConfigError(f"the population must be at least 1, got {self.population}")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"the sampling rate must lie in (0, 1], got {self.rate}")
        if self.scheme == "fixed" and abs(self.expected - round(self.expected)) > 1e-6:
            # A rounded cohort would be sampled at another rate than the one that is accounted for.
            raise ConfigError(f"a fixed cohort must be a whole number of clients, got {self.expected:g}")

    @property
    def expected(self) -> float:
        """Public cohort size q N, the denominator of every mean; never the realised count."""
        return self.rate * self.population


@dataclass(frozen=True)
class LocalTraining:
    """Settings of one client's local training.

    Attributes:
        optimizer: "sgd" (with `momentum`) or "adam"; its state starts afresh in every round.
        lr: learning rate.
        momentum: for "sgd".
        epochs: passes over the client's own data.
        batch_size: examples per step; the last batch of an epoch may be smaller.
        gradient_clip: l2 norm to which every batch gradient is clipped before the step; None leaves it.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    epochs: int = 1
    batch_size: int = 32
    gradient_clip: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adam"):
            raise ConfigError(f"training.optimizer: unknown {self.optimizer!r}; known: sgd, adam")
        if self.optimizer == "adam" and self.momentum:
            raise ConfigError("training.momentum is an option of optimizer 'sgd'; 'adam' has its own")

    def steps(self, examples: int) -> int:
        """Optimizer steps of a client with that many examples."""
        return self.epochs * -(-examples // self.batch_size)


@dataclass(frozen=True)
class LocalSteps:
    """Example-level steps that a client makes in a round and noises itself, each of them a release of its own.

    All three are public constants of the run, the same for every client, whatever its number of examples.

    Attributes:
        count: steps k of a round.
        rate: probability q in (0, 1] with which each of the client's examples enters a step's batch.
        batch: divisor B of a step's noisy sum; never the realised size of the batch.
    """

    count: int
    rate: float
    batch: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"a round has at least 1 local step, got {self.count}")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"the rate of local steps must lie in (0, 1], got {self.rate}")
        if not self.batch > 0:
            raise ConfigError(f"the batch of local steps must be positive, got {self.batch}")


@dataclass(frozen=True)
class RunFacts:
    """Public facts of a run, known before it starts.

    Example:
        >>> facts = RunFacts(1.5, Sampling("poisson", 100, 0.1), rounds=20)
        >>> facts.sampling.expected, facts.releases
        (10.0, 20)

    Attributes:
        noise_multiplier: sigma_* of one round relative to one unit's l2 bound under add-or-remove-one (twice the
            calibrated Gaussian multiplier under replace-one). 0 until it is calibrated, and for runs without privacy.
        sampling: how participants are chosen: clients, or the examples of a step where the server noises steps.
        relation: neighbouring relation.
        trust: who adds the noise.
        rounds: number T of rounds.
        epsilon: the whole run's budget, as the recipe states it; None where a plan is made without one.
        delta: its delta.
        accountant: "pld" or "rdp".
        max_participations: releases that one client's data may be in; None: every round.
        training: what a client does locally.
        steps: example-level steps that clients noise themselves, each round; None everywhere else.
    """

    noise_multiplier: float
    sampling: Sampling
    relation: Relation = "add-remove"
    trust: Trust = "central"
    rounds: int = 1
    epsilon: float | None = None
    delta: float | None = None
    accountant: str = "pld"
    max_participations: int | None = None
    training: LocalTraining = LocalTraining()
    steps: LocalSteps | None = field(default=None, repr=False)  # ledgers are named by the text of their facts

    def __post_init__(self) -> None:
        if self.steps is not None:
            # Which examples are in a batch stays within the client, and which clients take part depends on no example.
            if self.trust != "local":
                raise ConfigError("local steps are noised by the clients: use trust = 'local'")
            return
        if self.relation == "add-remove" and self.sampling.scheme == "fixed" and self.sampling.rate < 1:
            raise ConfigError("fixed-size sampling changes another client too: use relation = 'replace-one'")
        if self.trust == "local" and self.relation == "add-remove":
            raise ConfigError("under local trust participation is visible: use relation = 'replace-one'")

    @property
    def releases(self) -> int:
        """Most releases that one client's data can be in."""
        return min(self.max_participations or self.rounds, self.rounds)

    @property
    def accounted_rate(self) -> float:
        """Sampling rate that amplifies privacy: q under central trust, 1 under local trust, the steps' for local steps.

        Whoever receives a client's own noisy update knows that the client takes part, but not which of its examples.
        """
        if self.steps is not None:
            return self.steps.rate
        return 1.0 if self.trust == "local" else self.sampling.rate

    @property
    def noisy_sums(self) -> int:
        """Most noisy sums that one unit's data can be in: releases, times the local steps of each."""
        return self.releases * (1 if self.steps is None else self.steps.count)

    def with_multiplier(self, noise_multiplier: float) -> RunFacts:
        """The same facts with sigma_* as calibrated."""
        return replace(self, noise_multiplier=noise_multiplier)

    def budget(self) -> tuple[float, float]:
        """(epsilon, delta).

        Raises:
            ConfigError: these facts state none.
        """
        if self.epsilon is None or self.delta is None:
            raise ConfigError("a noise multiplier is calibrated to a budget: these facts have no epsilon and delta")
        return self.epsilon, self.delta

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        raw = asdict(self)
        if self.steps is None:
            del raw["steps"]  # clients' noise is keyed by the plan's text: that of other runs stays as it was
        return raw

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> RunFacts:
        """Inverse of `to_dict`."""
        sampling, training = Sampling(**raw["sampling"]), LocalTraining(**raw["training"])
        steps = LocalSteps(**raw["steps"]) if raw.get("steps") is not None else None
        return cls(**{**raw, "sampling": sampling, "training": training, "steps": steps})
