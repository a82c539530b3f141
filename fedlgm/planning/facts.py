"""The public facts of a run: everything on which a plan may depend, except past releases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import fedlgm  # `fedlgm.correlation` is loaded only when used, because it loads SciPy
from fedlgm.checks import (
    BelowOne,
    Count,
    NonNegative,
    Positive,
    Rate,
    check_below_one,
    check_count,
    check_fields,
    check_known,
    check_positive,
)
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import sealed
from fedlgm.planning import run_rules
from fedlgm.planning.allocation import floor_digits
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.records import Sampling, Scheme
from fedlgm.planning.run_rules import Settings
from fedlgm.planning.trust import NoisedBy
from fedlgm.planning.trust import get as noised_by
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Accountant, Relation, Trust

__all__ = ["LocalSteps", "LocalTraining", "RunFacts", "Sampling", "Scheme"]

_KEPT = 2e-8


@dataclass(frozen=True)
class LocalTraining:
    """Settings of one client's local training.

    Attributes:
        optimizer: "sgd" (with `momentum`) or "adam"; its state is reset in every round.
        lr: learning rate.
        momentum: momentum of "sgd".
        epochs: number of passes over the client's data.
        batch_size: number of examples per step; the last batch of an epoch may be smaller.
        gradient_clip: l2 norm to which every batch gradient is clipped before the step; None
            disables clipping.
        weight_decay: factor w of decoupled decay, which multiplies the weights by 1 - lr w before
            every step: with "adam" this is AdamW. None disables the decay.

    Raises:
        ConfigError: the optimizer is unknown, a number is outside its range, momentum is given for
            "adam", or lr times the decay is not in (0, 1).

    Example:
        >>> LocalTraining(epochs=2, batch_size=32).steps(100)
        8
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: NonNegative = 0.1
    momentum: BelowOne = 0.0
    epochs: Count = 1
    batch_size: Count = 32
    gradient_clip: Positive | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        check_fields("training", self)
        if self.optimizer == "adam" and self.momentum:
            raise ConfigError(
                "training.momentum is an option of optimizer 'sgd'; 'adam' has its own"
            )
        if self.weight_decay is not None and not 0 < self.lr * self.weight_decay < 1:
            raise ConfigError(
                "training.weight_decay: every step multiplies the weights by 1 - lr * "
                f"weight_decay, which must lie between 0 and 1, got lr {self.lr:g} and "
                f"weight_decay {self.weight_decay:g}"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON form. It omits a decay that is not set, as records of earlier versions do."""
        return {
            name: value
            for name, value in asdict(self).items()
            if (name, value) != ("weight_decay", None)
        }

    def __repr__(self) -> str:  # the owner of a Flower app's ledger is a hash of this form
        return f"LocalTraining({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def steps(self, examples: int) -> int:
        """Number of optimizer steps of a client with `examples` examples.

        Raises:
            ConfigError: `examples` is not a whole number of at least 0.
        """
        return self.epochs * -(-check_count("examples", examples, least=0) // self.batch_size)


@sealed
@dataclass(frozen=True)
class LocalSteps:
    """Example-level steps of a client in a round. The client adds noise to each step, and each step
    is a separate release.

    All three attributes are public constants of the run. They are the same for every client and
    independent of the client's number of examples.

    Example:
        >>> steps = LocalSteps(5, 0.1, 32.0)
        >>> facts = RunFacts(1.5, Sampling("poisson", 20, 0.5), trust="local", rounds=10, steps=steps)
        >>> facts.accounted_rate, facts.noisy_sums
        (0.1, 50)

    Attributes:
        count: number k of steps in a round.
        rate: probability q in (0, 1] that an example of the client enters a step's batch.
        batch: divisor B of a step's noisy sum, which is not the actual size of the batch.

    Raises:
        ConfigError: a number is outside its range.
    """

    count: Count
    rate: Rate
    batch: Positive

    def __post_init__(self) -> None:
        check_fields("local steps", self)


@sealed
@dataclass(frozen=True)
class RunFacts:
    """Public facts of a run, known before it starts. Plans, accounting and guarantees follow from
    them.

    Example:
        >>> facts = RunFacts(1.5, Sampling("poisson", 100, 0.1), rounds=20)
        >>> facts.sampling.expected, facts.releases
        (10.0, 20)

    Attributes:
        noise_multiplier: sigma_*, the standard deviation of one round's noise, divided by one
            unit's l2 bound. Adding or removing a unit moves the sum by one bound, and replacing a
            unit moves the sum by two bounds, so replace-one needs twice the sigma_* for the same
            cost. The multiplier is 0 before calibration and for runs without privacy.
        sampling: rule that chooses the participants of a round: clients, or examples if a round is
            one step on sampled examples (example level under central trust).
        relation: neighbouring relation: "add-remove", "replace-one" or "zero-out".
        trust: trust model, which says who adds the noise: "central", "local" or "distributed".
        rounds: number T of rounds.
        epsilon: budget of the whole run; None if plans are made without a budget.
        delta: delta of this budget.
        accountant: "pld" or "rdp".
        max_participations: largest number of releases that may contain one client's data; None sets
            no limit.
        training: settings of the client's local training.
        steps: noisy steps that each client makes in a round at example level under local trust;
            otherwise None.
        noise: correlation of the noise over the rounds; None means independent noise in every
            round.
        shares: under distributed trust, the nodes on whose noise the guarantee relies; otherwise
            None.
        assumes: assumptions of the guarantee about a user's model or code, which the library cannot
            prove. The text completes a sentence ("conditional on ..."), and is empty if there are
            no assumptions.
        overlap: largest number K of clients at which one person has data. If K is above 1, the
            run's epsilon holds for a person with data at K clients ("One person at up to K nodes,
            jointly" in docs/proofs/units.md); plans that protect whole clients then need relation
            "replace-one".

    Raises:
        ConfigError: a number is outside its range, or the facts contradict each other.
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
    # The owner of a Flower app's ledger is a hash of this object's `repr`, which therefore omits
    # fields that earlier versions did not have.
    steps: LocalSteps | None = field(default=None, repr=False)
    noise: fedlgm.correlation.Correlation | None = field(default=None, repr=False)
    shares: Shares | None = field(default=None, repr=False)
    assumes: str = field(default="", repr=False)
    overlap: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        if self.noise_multiplier != 0:
            check_positive(noise_multiplier=self.noise_multiplier)
        sampling = self.sampling
        if not isinstance(sampling, Sampling):
            raise ConfigError(f"sampling must be a fedlgm.Sampling, got {sampling!r}")
        check_count("the number of rounds", self.rounds)
        if self.max_participations is not None:
            check_count("max_participations", self.max_participations)
        if self.epsilon is not None:
            check_positive(epsilon=self.epsilon)
        if self.delta is not None:
            check_below_one(delta=self.delta)
        check_known("relation", self.relation, Relation)
        check_known("trust", self.trust, Trust)
        check_known("accountant", self.accountant, Accountant)
        run = Settings(
            sampling.scheme, sampling.rate, self.relation, self.noised_by,
            "" if self.noise is None else "correlated noise",
            bool(self.steps), self.max_participations is not None,
        )  # fmt: skip
        run_rules.check(run, {})
        self.noised_by.check_facts(self)
        check_count("overlap", self.overlap)
        if self.overlap > 1 and (sampling.scheduled or self.shares or sampling.of):
            raise ConfigError(
                "overlap above 1: the joint cost of a person at several clients is proven "
                "for sampling 'poisson' and 'fixed' of clients or examples, under central and "
                "local trust"
            )
        if self.noise is not None:
            self._check_noise(self.noise)

    def _check_noise(self, noise: fedlgm.correlation.Correlation) -> None:
        from fedlgm.noise.correlation import Correlation

        sampling = self.sampling
        if not isinstance(noise, Correlation):
            raise ConfigError(f"noise must be a fedlgm.correlation.Correlation, got {noise!r}")
        if noise.rounds != self.rounds:
            raise ConfigError(
                f"the noise is correlated over {noise.rounds} rounds, but the run has {self.rounds}"
            )
        noise.check_noise()
        if sampling.amplifies and (noise.bands is None or noise.bands > (sampling.separation or 1)):
            kind = "a buffered strategy" if noise.bands is None else f"{noise.bands} bands"
            raise ConfigError(
                f"amplification by grouped sampling needs no more bands than groups: {kind} with "
                f"{sampling.separation} groups is not proven"
            )

    @property
    def noised_by(self) -> NoisedBy:
        """The trust model, as an object that describes the party that adds the noise."""
        return noised_by(self.trust, self.shares)

    @property
    def releases(self) -> int:
        """Largest number of releases that can contain one client's data."""
        sampling = self.sampling
        if sampling.participations is not None and sampling.block is not None:
            return sampling.participations * -(-self.rounds // sampling.block)
        most = -(-self.rounds // (sampling.separation or 1))
        return min(self.max_participations or most, most)

    @property
    def accounted_rate(self) -> float:
        """Sampling rate that amplifies privacy: the rate of the local steps if there are any;
        otherwise q under central trust and 1 under local trust.

        The recipient of a client's noisy update knows that the client takes part, but does not know
        which of the client's examples take part. For schemes with a separation the rate is the
        probability of the draw within a group, or 1 without such a draw.
        """
        if self.overlap > self.copies:
            return self.sampling.rate_of_any(self.overlap)
        return (
            self.noised_by.accounted_rate(self.sampling) if self.steps is None else self.steps.rate
        )

    @property
    def copies(self) -> int:
        """Number of releases with separate noise that contain a person's data, if each client makes
        one release. This is the number of the person's clients if each client adds its own noise,
        and otherwise 1.
        """
        return self.overlap if self.noised_by.uploads_released else 1

    @property
    def moved(self) -> float:
        """How far a neighbouring data set can move a noisy sum, as a multiple of one client's
        bound.
        """
        return SENSITIVITY_FACTOR[self.relation] * self.overlap / self.copies

    @property
    def least_multiplier(self) -> float:
        """Smallest effective multiplier of a round. If a run is one mechanism, all of its rounds
        are charged at this multiplier.

        It equals `noise_multiplier` except for the last digits, because plans round multipliers
        down to nine digits.
        """
        return floor_digits(self.noise_multiplier * (1 - _KEPT), 9)

    @property
    def noisy_steps(self) -> int:
        """Number of noisy sums in one release: the number of local steps, or 1 without them."""
        return 1 if self.steps is None else self.steps.count

    @property
    def noisy_sums(self) -> int:
        """Largest number of noisy sums that can contain one unit's data: the product of the numbers
        of releases, of local steps, and of the person's clients with separate noise.
        """
        return self.releases * self.noisy_steps * self.copies

    def with_multiplier(self, noise_multiplier: float) -> RunFacts:
        """The same facts with the calibrated sigma_*."""
        return replace(self, noise_multiplier=noise_multiplier)

    def assuming(self, *conditions: str) -> RunFacts:
        """The same facts, with these conditions as further assumptions of the guarantee. Empty and
        repeated conditions are omitted.

        Example:
            >>> facts = RunFacts(1.0, Sampling("poisson", 100, 0.1))
            >>> facts.assuming("conditional on a", "", "conditional on b").assumes
            'conditional on a; conditional on b'
        """
        new = dict.fromkeys(
            condition for condition in conditions if condition and condition not in self.assumes
        )
        return replace(self, assumes="; ".join(filter(None, (self.assumes, *new))))

    def budget(self) -> tuple[float, float]:
        """The run's budget (epsilon, delta).

        Raises:
            ConfigError: these facts have no budget.
        """
        if self.epsilon is None or self.delta is None:
            raise ConfigError(
                "a noise multiplier is calibrated to a budget: these facts have no epsilon and "
                "delta"
            )
        return self.epsilon, self.delta

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        record = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("noise", "steps", "shares", "assumes", "overlap")
        }
        record |= {"sampling": self.sampling.to_dict(), "training": self.training.to_dict()}
        # Clients' noise is keyed by the plan's text. The text of runs that use none of these fields
        # must not change, so these fields are then left out.
        if self.steps is not None:
            record["steps"] = asdict(self.steps)
        if self.shares is not None:
            record["shares"] = self.shares.to_dict()
        if self.assumes:
            record["assumes"] = self.assumes
        if self.overlap > 1:
            record["overlap"] = self.overlap
        return record if self.noise is None else record | {"noise": self.noise.to_dict()}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> RunFacts:
        """Inverse of `to_dict`."""
        sampling, training = Sampling(**raw["sampling"]), LocalTraining(**raw["training"])
        noise, steps, shares = raw.get("noise"), raw.get("steps"), raw.get("shares")
        if noise is not None:
            from fedlgm.noise.correlation import Correlation

            noise = Correlation.from_dict(noise)
        if steps is not None:
            steps = LocalSteps(**steps)
        if shares is not None:
            shares = Shares(**shares)
        given = {
            "sampling": sampling,
            "training": training,
            "noise": noise,
            "steps": steps,
            "shares": shares,
        }
        return cls(**{**raw, **given})
