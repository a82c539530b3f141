"""What one round releases, how it is bounded and noised, and what that costs: all in one frozen object.

    plan  = mechanism.plan(layers, budget, transcript)   # pure: public configuration and past released outputs only
    total = sum of plan-bounded contributions            # fedlgm.clipping
    ledger.charge(plan.event, ...)                       # before anything noisy leaves the process
    noisy = release(total, plan, keys, round)            # fedlgm.release

The plan owns both the noise that is added and the event that is accounted for, so the two cannot differ.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from fedlgm import privacy
from fedlgm.allocation import effective_multiplier
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.layers import LayerTable
from fedlgm.noise import Family
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Guarantee, Relation, Trust

if TYPE_CHECKING:
    from dp_accounting import dp_event


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
class Budget:
    """What a mechanism may spend in each round.

    Attributes:
        noise_multiplier: sigma_* of one round relative to one unit's l2 bound under add-or-remove-one (twice the
            calibrated Gaussian multiplier under replace-one). 0 for runs without privacy.
        sampling: how participants are chosen.
        relation: neighbouring relation.
        trust: who adds the noise.
        rounds: number T of rounds that the budget was made for.
    """

    noise_multiplier: float
    sampling: Sampling
    relation: Relation = "add-remove"
    trust: Trust = "central"
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.relation == "add-remove" and self.sampling.scheme == "fixed" and self.sampling.rate < 1:
            raise ConfigError("fixed-size sampling changes another client too: use relation = 'replace-one'")
        if self.trust == "local" and self.relation == "add-remove":
            raise ConfigError("under local trust participation is visible: use relation = 'replace-one'")


@dataclass(frozen=True)
class Side:
    """A small vector released together with the layers (for example clip indicator bits).

    Attributes:
        name: what it is; also how the client knows what to compute.
        size: number of coordinates.
        clip: l2 bound of one unit's contribution.
        sigma: noise std of its sum.
    """

    name: str
    size: int
    clip: float
    sigma: float


_SAMPLED_REPLACE_ONE = (
    "conditional on the composition of sampled releases under replace-one costing no more than that of the sampled "
    "Gaussian mechanism at twice the sensitivity, which is proven for one release only (docs/guarantees.md, section "
    "Replace-one)"
)


@dataclass(frozen=True, eq=False)
class ReleasePlan:
    """One round's release.

    Attributes:
        layers: the model's layers.
        clip: bound s_j of one unit's contribution to each layer (l2, or l1 for Laplace noise), [K].
        sigma: noise that one noising party adds to each layer (std, or Laplace scale b), [K]; `inf` where not
            released. Under central trust it is the noise of the SUM, under local trust each client's.
        budget: sampling, relation and trust.
        guarantee: standing of the privacy claim.
        family: "gaussian" or "laplace".
        released: which layers leave the clients; a layer that is not released is not uploaded, [K]. Left out: those
            with finite noise.
        sides: extra vectors of the same release.
        claim: what the method's authors would charge for the round, if that differs from `event`.
        downlink: under local trust, std of noise that the server adds to every coordinate of the mean before it is
            broadcast. It costs nothing and proves nothing more: the uploads are released already.
        notes: public figures that explain the plan, by name, each [K]; they are logged and do not travel.
    """

    layers: LayerTable
    clip: np.ndarray
    sigma: np.ndarray
    budget: Budget
    guarantee: Guarantee
    family: Family = "gaussian"
    released: np.ndarray = None  # type: ignore[assignment]
    sides: tuple[Side, ...] = ()
    claim: dict[str, Any] | None = None
    downlink: float = 0.0
    notes: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        clip, sigma = np.asarray(self.clip, dtype=np.float64), np.asarray(self.sigma, dtype=np.float64)
        released = np.isfinite(sigma) if self.released is None else np.asarray(self.released, dtype=bool)
        for name, array in (("clip", clip), ("sigma", sigma), ("released", released)):
            if array.shape != (len(self.layers),):
                raise ConfigError(
                    f"{name} must have one entry for each of {len(self.layers)} layers, got {array.shape}"
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if np.isnan(clip).any() or np.isnan(sigma).any() or (clip < 0).any() or (sigma < 0).any():
            raise ConfigError(f"bounds and noise must be non-negative numbers, got {clip.tolist()}, {sigma.tolist()}")
        if self.family not in get_args(Family):
            raise ConfigError(f"unknown noise family {self.family!r}; known: {', '.join(get_args(Family))}")
        if self.sides and self.family != "gaussian":
            raise ConfigError("a side is bounded in l2 norm: only Gaussian releases can have one")
        if any(not (side.clip >= 0 and side.sigma >= 0) for side in self.sides):
            raise ConfigError(f"bounds and noise must be non-negative numbers, got {self.sides}")
        if np.isinf(sigma[released]).any():
            raise PrivacyError("a released layer has infinite noise: mark it as not released")
        object.__setattr__(self, "guarantee", self._qualified())
        if self.guarantee.status != "none" and self.effective_multiplier == 0:
            raise PrivacyError("a release without noise cannot carry a proven guarantee")

    def _qualified(self) -> Guarantee:
        """The guarantee, with the condition that sampled Gaussian releases carry under replace-one."""
        given, budget = self.guarantee, self.budget
        amplified = budget.trust == "central" and budget.sampling.rate < 1
        if self.family != "gaussian" or given.relation != "replace-one" or not amplified:
            return given
        return given.provided(_SAMPLED_REPLACE_ONE)

    @cached_property
    def indices(self) -> np.ndarray:
        """Indices of the released layers, in order."""
        return np.flatnonzero(self.released)

    @cached_property
    def parts(self) -> tuple[tuple[str, int, float, float], ...]:
        """(name, size, clip, sigma) of everything released: layers, then sides."""
        names, sizes = self.layers.names, self.layers.sizes
        rows = [(names[j], int(sizes[j]), float(self.clip[j]), float(self.sigma[j])) for j in self.indices]
        return (*rows, *((side.name, side.size, side.clip, side.sigma) for side in self.sides))

    @property
    def size(self) -> int:
        """Length of the uploaded vector: the released layers, then the sides."""
        return sum(size for _, size, _, _ in self.parts)

    @property
    def denominator(self) -> float:
        """Public divisor of the released sum, q N."""
        return self.budget.sampling.expected

    @cached_property
    def effective_multiplier(self) -> float:
        """sigma_eff under add-or-remove-one, sides included (Laplace: 1 / sum_j s_j / b_j).

        Rounded down to nine digits, so that rounds which differ by rounding errors alone share one accounting event.
        """
        clip, sigma = np.array([p[2] for p in self.parts]), np.array([p[3] for p in self.parts])
        if self.family == "gaussian":
            return _floor_digits(effective_multiplier(clip, sigma), 9)
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = float(np.sum(np.where(clip > 0, clip / sigma, 0.0)))
        return _floor_digits(1.0 / loss, 9) if loss > 0 else math.inf

    @property
    def event(self) -> dp_event.DpEvent:
        """The accounting event of one round (central trust) or of one participation (local trust).

        A plan that releases nothing has that of a whole release: where it follows from earlier releases that there is
        none, composition is proven only if the number of releases does not depend on them.
        """
        if self.guarantee.status == "none":
            return privacy.accounting.gaussian_event(0.0)
        own = self.effective_multiplier if self.size > 0 else self.budget.noise_multiplier
        multiplier = own / SENSITIVITY_FACTOR[self.budget.relation]
        rate = 1.0 if self.budget.trust == "local" else self.budget.sampling.rate
        if self.family == "laplace":
            loss = 1.0 / multiplier if multiplier > 0 else math.inf
            return privacy.accounting.laplace_event(loss, rate, self.budget.relation)
        return privacy.accounting.gaussian_event(multiplier, rate)

    @property
    def shares(self) -> np.ndarray:
        """Budget share p_j of each layer (0 where not released), [K]; they and the sides' shares sum to 1.

        All 0 for a release without noise, or of nothing.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.released, self.clip / self.sigma, 0.0)
        if not self.released.any() or self.effective_multiplier == 0:
            return np.zeros(len(self.layers))  # there is no budget to share
        if self.family == "gaussian":
            return ratio**2 * self.effective_multiplier**2
        return ratio * self.effective_multiplier

    @property
    def snr(self) -> np.ndarray:
        """SNR_j = s_j^2 / (d_j sigma_j^2), [K]; 0 where not released."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.released, self.clip**2 / (self.layers.sizes * self.sigma**2), 0.0)

    @property
    def party_noise_norms(self) -> np.ndarray:
        """Root mean square l2 norm of the noise that one noising party adds to each layer, [K]; 0 where not released.

        That party is the server under central trust, each client under local trust.
        """
        per_coordinate = self.sigma * (math.sqrt(2.0) if self.family == "laplace" else 1.0)
        with np.errstate(invalid="ignore"):
            return np.where(self.released, per_coordinate * np.sqrt(self.layers.sizes), 0.0)

    @property
    def noise_norms(self) -> np.ndarray:
        """Root mean square l2 norm of each layer's noise on the MEAN update, [K]; 0 where not released.

        Under local trust as many clients as are expected add theirs.
        """
        parties = self.denominator if self.budget.trust == "local" else 1.0
        return self.party_noise_norms * math.sqrt(parties) / self.denominator

    def to_json(self) -> str:
        """What a client needs to bound (and, under local trust, noise) its contribution."""
        return json.dumps(
            {
                "clip": self.clip.tolist(),
                "sigma": [s if math.isfinite(s) else None for s in self.sigma.tolist()],
                "released": self.released.tolist(),
                "family": self.family,
                "sides": [[side.name, side.size, side.clip, side.sigma] for side in self.sides],
                "sampling": [
                    self.budget.sampling.scheme,
                    self.budget.sampling.population,
                    self.budget.sampling.rate,
                ],
                "budget": [self.budget.noise_multiplier, self.budget.relation, self.budget.trust, self.budget.rounds],
                "guarantee": self.guarantee.to_dict(),
                "claim": self.claim,
                "downlink": self.downlink,
            }
        )

    @classmethod
    def from_json(cls, layers: LayerTable, text: str) -> ReleasePlan:
        """Inverse of `to_json`; a plan for other layers is refused by its shapes."""
        raw = json.loads(text)
        multiplier, relation, trust, rounds = raw["budget"]
        return cls(
            layers=layers,
            clip=np.array(raw["clip"]),
            sigma=np.array([math.inf if s is None else s for s in raw["sigma"]]),
            budget=Budget(multiplier, Sampling(*raw["sampling"]), relation, trust, rounds),
            guarantee=Guarantee(**raw["guarantee"]),
            family=raw["family"],
            released=np.array(raw["released"]),
            sides=tuple(Side(*side) for side in raw["sides"]),
            claim=raw["claim"],
            downlink=raw["downlink"],
        )


def _floor_digits(value: float, digits: int) -> float:
    if value == 0 or math.isinf(value):
        return value
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.floor(value * scale) / scale
