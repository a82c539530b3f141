"""What a training run does and what its authors state, as one object of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from numbers import Real
from typing import Annotated, Any, Literal

from fedlgm.checks import (
    BelowOne,
    NonNegative,
    Positive,
    Rate,
    check_annotated,
    check_counts,
    check_fields,
    check_known,
    check_positive,
    check_share,
)
from fedlgm.errors import ConfigError
from fedlgm.privacy.guarantee import Relation, Unit
from fedlgm.privacy.plain import plain_number
from fedlgm.wording import alternatives

MOST_RELEASES, _LARGEST = 1_000_000, 10**15
LEAST_NOISE, MOST_NOISE = 1e-3, 1e6
"""Least and largest noise multiplier for which figures are computed. With less noise there are no
figures, and more noise is treated as the largest multiplier.
"""
PLAIN_MECHANISMS = (
    "gaussian",
    "laplace",
    "none",
    "svt",
    "percentile",
    "percentile-gaussian",
    "ledger",
)
WEIGHTED_PAPERS = ("gaussian-inid", "laplace-inid")
MEDCLIP_RULES = (
    *("dimension-adjusted", "dp-sgd", "max-snr-sum", "min-total-noise"),
    *("sensitivity-proportional", "snr-consistent", "uniform"),
)
MECHANISMS = (
    *PLAIN_MECHANISMS,
    *(f"{name}:published" for name in (*WEIGHTED_PAPERS, *MEDCLIP_RULES, "ladp", "lm-dp-sgd")),
)
"""Mechanisms that the rules know."""


Size = Annotated[int, partial(check_counts, most=_LARGEST)]
Sampler = Literal["poisson", "shuffle", "fixed", "all"]
Accounted = Literal["poisson", "fixed", "none"]
Clipping = Literal[
    "unit", "microbatch", "batch", "none", "mixed", "rescaled", "adaptive", "adaptive-late"
]
Quantity = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run does, and what its authors state. None means that a setting is not known.

    Attributes:
        mechanism: "gaussian", "laplace", "none", or a mechanism of `MECHANISMS`, such as
            "ladp:published".
        noise_multiplier: standard deviation (for Laplace noise, scale) of the noise on the sum,
            divided by `clip`.
        clip: bound of the norm of one unit's contribution.
        clipping: what is bounded: "unit" (each unit's contribution), "microbatch" (means of several
            examples), "batch" (the mean of a batch), "none", "mixed" (contributions that depend on
            other units, as with BatchNorm), "rescaled" (contributions that are first scaled with
            the realised batch size), "adaptive" (each unit's contribution, with a bound that
            follows a noisy count), "adaptive-late" (the same, but the noise is scaled with the next
            step's bound).
        count_std: standard deviation of the noise of the count of an adaptive bound.
        norm: norm that is bounded, "l1" or "l2".
        layers, layer_claim: number of layers with separate bounds and noise, and how their epsilons
            were combined: "sum", "parallel" (the largest of them) or "joint". For "sum" and
            "parallel", `noise_multiplier` is relative to the bound of a layer; for "joint", to the
            bound of all layers together.
        noise_on, noise_scale: the quantity to which the noise is added, and the quantity for which
            the noise is scaled, "sum" or "mean".
        noise_size: number of units for whose mean the noise is scaled, if it differs from the
            number of units in a step.
        noise_additions: how often independent noise of this scale is added.
        noise_seed: whether the seed of the noise is "secret" or "public".
        sampler: "poisson", "shuffle" (each unit once per epoch, in any order), "fixed" (batches of
            a fixed size, drawn anew for each step) or "all".
        sampling_rate: probability that a unit takes part in a step.
        batch_size: units per batch.
        population: units in the data.
        epochs: number of passes over the data.
        steps: number of releases (in a federation, rounds).
        participations: largest number of steps in which one unit takes part.
        drop_last: whether batches are left out because of their size.
        denominator: divisor of a sum, "expected" (a public number) or "realised".
        weights: weights of the units, "uniform" or "examples" (private numbers of examples).
        unit: unit of privacy.
        relation: stated neighbouring relation. With None, the report chooses the relation of its
            proof.
        trust: "central", or "local" (each client adds noise to its release).
        units_per_person: largest number of units of one person, if epsilon is stated for people.
        delta, epsilon: the stated delta and epsilon.
        stated_for: what the stated epsilon covers: "round", "epoch", "part" (what followed the last
            start of the accountant) or "run".
        accounted_as: sampling that the accounting assumed, "poisson", "fixed" or "none".
        accounted: values with which epsilon was computed, where they may differ from the values of
            the run: `noise_multiplier`, `sampling_rate`, `batch_size`, `population`, `epochs`,
            `steps`.
        accountant: "pld", "rdp", "prv", "gdp" or "classical" (the noise multiplier is sqrt(2
            ln(1.25 / delta)) / epsilon).
        orders: Renyi orders of the accounting, each above 1.
        runs: number of runs on the same data, this one included.
        search_charged: whether the stated epsilon covers all of these runs.

    Raises:
        ConfigError: a value is of the wrong type, out of range, or contradicts another one.

    Example:
        >>> Settings(noise_multiplier=1.1, batch_size=250, population=60_000).rate
        0.004166666666666667
    """

    mechanism: str = "gaussian"
    noise_multiplier: NonNegative | None = None
    clip: Positive | None = None
    clipping: Clipping | None = None
    count_std: Positive | None = None
    norm: Literal["l1", "l2"] | None = None
    layers: Size | None = None
    layer_claim: Literal["joint", "sum", "parallel"] = "joint"
    noise_on: Quantity = "sum"
    noise_scale: Quantity = "sum"
    noise_size: Size | None = None
    noise_additions: Size = 1
    noise_seed: Literal["secret", "public"] = "secret"
    sampler: Sampler | None = None
    sampling_rate: Rate | None = None
    batch_size: Size | None = None
    population: Size | None = None
    epochs: Positive | None = None
    steps: Size | None = None
    participations: Size | None = None
    drop_last: bool | None = None
    denominator: Literal["expected", "realised"] | None = None
    weights: Literal["uniform", "examples"] | None = None
    unit: Unit = "example"
    relation: Relation | None = None
    trust: Literal["central", "local"] = "central"
    units_per_person: Size = 1
    delta: BelowOne | None = None
    epsilon: NonNegative | None = None
    stated_for: Literal["round", "epoch", "part", "run"] | None = None
    accounted_as: Accounted | None = None
    accounted: Mapping[str, Any] | None = None
    accountant: Literal["pld", "rdp", "prv", "gdp", "classical"] | None = None
    orders: tuple[float, ...] | None = None
    runs: Size = 1
    search_charged: bool | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain_number(getattr(self, field.name)))
        check_fields("", self)
        check_known("mechanism", self.mechanism, MECHANISMS)
        self._check_lists()
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Real) and not isinstance(value, bool):
                kind: Callable[[Any], float] = int if field.name in _WHOLE else float
                object.__setattr__(self, field.name, kind(value))
        self._check_together()
        if self.rate == 1:  # every unit takes part in every step, whatever the sampler is called
            object.__setattr__(self, "sampler", "all")
            if self.accounted_as and self.as_accounted().rate == 1:
                object.__setattr__(self, "accounted_as", "none")

    def _check_lists(self) -> None:
        for order in self.orders or ():
            check_positive(orders=order)
            check_share(**{"1 / order, for each of orders,": 1 / order})
            if order > 10_000:
                raise ConfigError(f"orders must be at most 10,000, got {order!r}")
        if self.orders is not None:
            if not self.orders:
                raise ConfigError("orders must be a list of numbers above 1, got an empty one")
            object.__setattr__(self, "orders", tuple(map(float, self.orders)))
        if self.accounted is not None:
            if not isinstance(self.accounted, Mapping):
                raise ConfigError(f"accounted must be a mapping of {', '.join(ACCOUNTED)}")
            for key in self.accounted:
                check_known("accounted", key, ACCOUNTED)
            check_annotated("", Settings, self.accounted)
            object.__setattr__(self, "accounted", dict(self.accounted))

    def _check_together(self) -> None:
        size, people = self.batch_size, self.population
        if size and people and size > people:
            raise ConfigError(f"batch_size {size} is larger than population {people}")
        if size and people and self.sampling_rate:
            # frameworks round the number of steps per epoch, and take its inverse as the rate
            steps = people / size
            low, high = 1 / math.ceil(steps), 1 / math.floor(steps)
            if not low * 0.99 <= self.sampling_rate <= high * 1.01:
                raise ConfigError(
                    f"sampling_rate {self.sampling_rate:g} contradicts batch_size / population = "
                    f"{size / people:g}: state the rate that was used"
                )
        epochs, rate = self.epochs, self.rate
        # frameworks round the number of steps in each epoch
        if self.steps and epochs and rate and abs(self.steps - epochs / rate) > epochs + 1:
            raise ConfigError(
                f"steps {self.steps} contradict epochs and rate, which imply {epochs / rate:.6g} "
                "steps: give only one of them"
            )
        for name in ("releases", "participation_count"):
            if (getattr(self, name) or 0) > MOST_RELEASES:
                raise ConfigError(f"more than {MOST_RELEASES:,} steps cannot be accounted for")

    @property
    def rate(self) -> float | None:
        """Probability that a unit takes part in a step."""
        if self.sampling_rate is not None:
            return self.sampling_rate
        return self.batch_size / self.population if self.batch_size and self.population else None

    @property
    def releases(self) -> int | None:
        """Number of releases: the number of steps if it is given, or else the number that the
        epochs and the rate imply, rounded up.
        """
        if self.steps is not None:
            return self.steps
        if self.epochs is None or self.rate is None:
            return None
        return _ceil(self.epochs / self.rate)

    def as_accounted(self) -> Settings:
        """Return settings with the values for which epsilon was computed."""
        values = dict(self.accounted or {})
        if not {"epochs", "steps"} & set(values):
            values |= {"epochs": self.epochs, "steps": self.steps}
        if "sampling_rate" not in values:
            if not {"batch_size", "population"} & set(values):
                values["sampling_rate"] = self.sampling_rate
            values = {"batch_size": self.batch_size, "population": self.population, **values}
        values.setdefault("noise_multiplier", self.noise_multiplier)
        known = {name: value for name, value in values.items() if value is not None}
        return Settings(**known, sampler=self.sampler, participations=self.participations)

    @property
    def participation_count(self) -> int | None:
        """Largest number of steps in which one unit can take part, whatever batches are drawn."""
        count = self.releases
        if self.sampler == "shuffle":
            epochs = [_ceil(self.epochs)] if self.epochs is not None else []
            if self.steps is not None and self.batch_size and self.population:
                dropped = self.population % self.batch_size if self.drop_last is not False else 0
                per_epoch = math.ceil((self.population - dropped) / self.batch_size)
                epochs.append(_ceil(self.steps / per_epoch))
            count = max(epochs, default=count)
            if self.steps is not None and count is not None:
                count = min(count, self.steps)
        caps = [number for number in (count, self.participations) if number is not None]
        return min(caps, default=None)


def _ceil(value: float) -> int:
    """Round `value` up, to at least 1. The rounding error of a quotient such as 60 / (1 / 7) does
    not add a step.
    """
    nearest = max(1, round(value)) if math.isfinite(value) else 2 * MOST_RELEASES
    return nearest if abs(value - nearest) <= 1e-9 * max(1, value) else math.ceil(value)


def build_settings(values: Mapping[str, Any]) -> Settings:
    """Make settings from values by name; "rounds" is another name of "steps".

    Raises:
        ConfigError: a name is unknown, or `Settings` refuses a value.

    Example:
        >>> build_settings({"rounds": 3}).steps
        3
        >>> build_settings({"noise_multiplyer": 1.0})
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: unknown setting 'noise_multiplyer'; did you mean 'noise_multiplier'?
    """
    values = dict(values)
    if "rounds" in values:
        if "steps" in values:
            raise ConfigError("rounds and steps are two names of one setting: give one of them")
        values["steps"] = values.pop("rounds")
    names = [field.name for field in fields(Settings)]
    for name in values:
        if name not in names:
            raise ConfigError(f"unknown setting {name!r}; {alternatives(name, names)}")
    return Settings(**values)


_WHOLE = (
    *("layers", "noise_size", "batch_size", "population", "steps", "participations"),
    *("noise_additions", "units_per_person", "runs"),
)
ACCOUNTED = ("noise_multiplier", "sampling_rate", "batch_size", "population", "epochs", "steps")
