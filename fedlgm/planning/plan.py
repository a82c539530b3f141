"""One round's release with its bounds, noise and cost, in one frozen object.

    plan  = mechanism.plan(layers, facts, transcript)  # from public configuration and past releases
    total = sum of bounded contributions               # `fedlgm.aggregation`, by plan.clip
    ledger.charge(plan.event, ...)                     # before anything noisy leaves the process
    noisy = release(total, plan, keys, round)          # `fedlgm.noise.release`

The plan determines both the noise that is added and the event that is charged, so the charge always
fits the noise.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from fedlgm import privacy
from fedlgm.aggregation.contributions import BoundedBy
from fedlgm.checks import check_known
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.libraries import Tensor, torch
from fedlgm.noise.draws import Family
from fedlgm.planning import charging, queries
from fedlgm.planning.allocation import effective_multiplier, floor_digits
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.queries import NoisyQuery
from fedlgm.planning.records import Part
from fedlgm.privacy.conditions import in_a_run
from fedlgm.privacy.guarantee import Claim, Guarantee, at_nodes

__all__ = ["NoisyQuery", "Part", "ReleasePlan", "RunFacts", "Sampling", "UnprotectedPlan"]


@dataclass(frozen=True, eq=False)
class ReleasePlan:
    """One round's release: its bounds, its noise and its cost.

    A mechanism makes the plan. Each unit's contribution is bounded by `clip` before it is added to
    the sum, `release` adds noise of scale `sigma`, and the ledger is charged with `event`, which is
    computed from the plan. The neighbouring relation is `facts.relation`: adding or removing a unit
    changes layer j of the sum by at most `clip[j]`, and replacing a unit changes it by at most
    twice as much. K is the number of layers.

    Attributes:
        layers: the model's layers.
        clip: bound s_j of one unit's contribution to each layer (l2, or l1 for Laplace noise), [K].
        sigma: noise scale sigma_j of each layer (std, or Laplace scale b), [K]; `inf` for layers
            that are not released. Under central trust it is the scale of the noise in the SUM, and
            under local trust the scale of the noise that each client adds.
        facts: sampling, relation, trust and the other public facts of the run.
        guarantee: the privacy guarantee, with its status and its reason.
        family: "gaussian" or "laplace".
        released: whether each layer is released, bool [K]; clients do not upload the other layers.
            Default: the layers with finite noise.
        queries: auxiliary queries that are released together with the layers.
        bounded_by: the party that bounds contributions. "aggregator": the sum bounds each client's
            update. "trainer": the trainer bounds each unit, such as an example, before it adds up
            the units. The sum refuses contributions that are bounded by the other party.
        claim: the charge that the method's authors would state for the round, if their charge
            differs from `event`.
        position: number of earlier rounds, if rounds are not charged one by one (see
            `Method.plan`); otherwise None.
        notes: public figures that explain the plan, by name, each [K]; they are logged, and clients
            do not get them.
        freezes: whether clients train only the released layers. The proof does not depend on it.
        fills: sizes of the layers whose norms `fedlgm.planning.filling` cuts to a common level
            before the update is bounded as one layer; empty if norms are not cut. The proof does
            not depend on them.

    Raises:
        ConfigError: a number is outside its range, or an array has the wrong shape.
        PrivacyError: the plan contradicts its guarantee, or cannot be charged in its run.

    Example:
        >>> layers, facts = LayerTable.from_sizes({"a": 4, "b": 1}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> plan = ReleasePlan(layers, [3.0, 4.0], [5.0, 5.0], facts, Guarantee("proven", "an example"))
        >>> plan.effective_multiplier, plan.shares.round(2).tolist(), plan.denominator
        (1.0, [0.36, 0.64], 10.0)
        >>> plan.event
        PoissonSampledDpEvent(sampling_probability=0.1, event=GaussianDpEvent(noise_multiplier=1.0))
    """

    layers: LayerTable
    clip: np.ndarray
    sigma: np.ndarray
    facts: RunFacts
    guarantee: Guarantee
    family: Family = "gaussian"
    released: np.ndarray = None  # type: ignore[assignment]
    queries: tuple[NoisyQuery, ...] = ()
    bounded_by: BoundedBy = "aggregator"
    claim: Claim | None = None
    position: int | None = None
    notes: dict[str, np.ndarray] = field(default_factory=dict)
    freezes: bool = False
    fills: tuple[int, ...] = ()

    protected: ClassVar[bool] = True
    """Whether the release has a privacy guarantee; False only for `UnprotectedPlan`."""

    def __post_init__(self) -> None:
        # These are copies. If they were views, a later change of an array or tensor would change
        # the bounds after the charge.
        clip, sigma = np.array(self.clip, dtype=np.float64), np.array(self.sigma, dtype=np.float64)
        released = (
            np.isfinite(sigma) if self.released is None else np.array(self.released, dtype=bool)
        )
        object.__setattr__(self, "queries", tuple(self.queries))
        for name, array in (("clip", clip), ("sigma", sigma), ("released", released)):
            if array.shape != (len(self.layers),):
                raise ConfigError(
                    f"{name} must have one entry for each of {len(self.layers)} layers, got "
                    f"{array.shape}"
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if not ((clip >= 0).all() and (sigma >= 0).all()):  # also refuses NaN
            raise ConfigError(
                f"bounds and noise must be non-negative numbers, got {clip.tolist()}, "
                f"{sigma.tolist()}"
            )
        check_known("noise family", self.family, Family)
        check_known("bounded_by", self.bounded_by, BoundedBy)
        if self.queries and self.family != "gaussian":
            raise ConfigError(
                "an auxiliary query bounds a unit's vector in l2 norm: only Gaussian releases have "
                "one"
            )
        for noisy in self.queries:
            queries.require_registered(noisy.query, self.layers.sizes)
        if self.position is not None and type(self.position) is not int:
            raise ConfigError(
                f"the position of a round must be a whole number, got {self.position!r}"
            )
        if self.fills:
            self._check_fills()
        if np.isinf(sigma[released]).any():
            raise PrivacyError("a released layer has infinite noise: mark it as not released")
        object.__setattr__(self, "guarantee", in_a_run(self.guarantee, self.facts, self.family))
        self._check_protection()
        self.facts.noised_by.check_plan(self)

    def _check_fills(self) -> None:
        if len(self.layers) != 1 or self.bounded_by != "aggregator" or self.family != "gaussian":
            raise ConfigError(
                "water-filling needs raw updates of clients and one l2 bound of the whole update"
            )
        if (
            any(type(size) is not int or size < 1 for size in self.fills)
            or sum(self.fills) != self.layers.size
        ):
            raise ConfigError(
                f"the layer sizes in fills must sum to {self.layers.size}, got {self.fills}"
            )

    def _check_protection(self) -> None:
        self.guarantee.require(protected=True)
        if self.effective_multiplier == 0:
            raise PrivacyError("a release without noise cannot carry a proven guarantee")
        facts = self.facts
        if facts.steps is not None and self.bounded_by != "trainer":
            raise PrivacyError(
                "local steps sample a client's examples, which amplifies nothing if whole updates "
                "are bounded: such a plan needs bounded_by = 'trainer'"
            )
        if facts.sampling.of is not None and self.bounded_by == "trainer":
            raise PrivacyError(
                f"the sampling draws {facts.sampling.of}s with all of their data, but a trainer "
                f"bounds single examples: bound whole updates, or leave of = {facts.sampling.of!r} "
                "out of the sampling to protect examples"
            )
        charging.of(facts).check(self)

    @cached_property
    def indices(self) -> np.ndarray:
        """Indices of the released layers, in order."""
        return np.flatnonzero(self.released)

    @cached_property
    def complete(self) -> bool:
        """Whether every layer is released."""
        return bool(self.released.all())

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Everything that is released: first the layers, then the auxiliary queries."""
        names, sizes = self.layers.names, self.layers.sizes
        rows = [
            Part(names[j], int(sizes[j]), float(self.clip[j]), float(self.sigma[j]))
            for j in self.indices
        ]
        return (*rows, *(Part(q.query.name, q.size, q.bound, q.sigma) for q in self.queries))

    @cached_property
    def streams(self) -> tuple[int, ...]:
        """Numbers of the parts' noise streams: one for each released layer, then one for each
        query.
        """
        return (
            *(int(j) for j in self.indices),
            *(len(self.layers) + i for i in range(len(self.queries))),
        )

    @cached_property
    def size(self) -> int:
        """Length of the uploaded vector, which holds the released layers and then the answers to
        the auxiliary queries.
        """
        return sum(part.size for part in self.parts)

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """`clip` as Python numbers, for comparison with a trainer's bounds."""
        return tuple(self.clip.tolist())

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """Slices of the released columns, in order, in a vector that holds a whole update [D] and
        then the answers to the queries.
        """
        ends, slices = [*self.layers.offsets.tolist(), None], []
        for released, run in itertools.groupby(
            range(len(ends) - 1), key=[*self.released, True].__getitem__
        ):
            parts = list(run)  # adjacent layers share a slice
            if released:
                slices.append(slice(ends[parts[0]], ends[parts[-1] + 1]))
        return tuple(slices)

    @cached_property
    def asked(self) -> tuple[tuple[str, int, float], ...]:
        """Name, size and bound of each auxiliary query."""
        return tuple((noisy.query.name, noisy.size, noisy.bound) for noisy in self.queries)

    @property
    def denominator(self) -> float:
        """Public divisor of the released sum: the expected number q N of participants."""
        return self.facts.sampling.expected

    @cached_property
    def effective_multiplier(self) -> float:
        """Noise multiplier sigma_eff of the whole release, including auxiliary queries, under
        add-or-remove-one; for Laplace noise, 1 / sum_j (s_j / b_j).

        It is rounded down to nine digits, so that rounds which differ only by rounding errors share
        one accounting event.
        """
        clip, sigma = (
            np.array([p.clip for p in self.parts]),
            np.array([p.sigma for p in self.parts]),
        )
        if self.family == "gaussian":
            return floor_digits(effective_multiplier(clip, sigma), 9)
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = float(np.sum(np.where(clip > 0, clip / sigma, 0.0)))
        return floor_digits(1.0 / loss, 9) if loss > 0 else math.inf

    @cached_property
    def event(self) -> privacy.DpEvent:
        """The accounting event of one round (central trust) or of one participation (local trust),
        including all local steps.

        A plan that releases nothing is charged at the run's noise multiplier. Whether it releases
        anything depends on earlier releases, but composition is proven only if the number of
        releases does not.

        If rounds are not charged one by one, the event is the amount that this round adds to the
        cost of the run so far (see `privacy.whole_run`).

        Raises:
            PrivacyError: rounds are not charged one by one, and the plan does not state its
                position.
        """
        return charging.of(self.facts).event(self)

    @property
    def repeated_event(self) -> privacy.DpEvent:
        """The accounting event of a repeated release of the same round, with new noise but the same
        participants.

        Participants are drawn once for a round. The first release reveals information about the
        draw, so the second release is not amplified by sampling.
        """
        return charging.of(self.facts).repeated_event(self)

    @property
    def place(self) -> int:
        """The checked `position`, on which the cost of a round depends if the run is charged as one
        mechanism.

        Raises:
            PrivacyError: the plan does not state its position, or the run has no such round.
        """
        if self.position is None:
            raise PrivacyError(
                "the cost of a round depends on its position in the run, but this plan states no "
                "position: make plans with Method.plan"
            )
        if not 0 <= self.position < self.facts.rounds:
            raise PrivacyError(
                f"the run was made for {self.facts.rounds} rounds: there is no round "
                f"{self.position + 1}"
            )
        return self.position

    @property
    def protects(self) -> str:
        """Text for the ledger: unit and neighbouring relation of the event and, if above 1, the
        number of nodes at which a person may have data.
        """
        return at_nodes(f"{self.guarantee.unit}, {self.facts.relation}", self.facts.overlap)

    @property
    def shares(self) -> np.ndarray:
        """Budget share p_j of each layer, [K]; 0 for layers that are not released. The shares of
        layers and queries sum to 1.

        All shares are 0 if no layer is released, or if the release has no noise.
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
        """SNR_j = s_j^2 / (d_j sigma_j^2) for the noise of this round, [K]; 0 for layers that are
        not released.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(
                self.released, self.clip**2 / (self.layers.sizes * self.round_sigma**2), 0.0
            )

    @property
    def round_sigma(self) -> np.ndarray:
        """Scale of the noise that is added in this round, [K]: sigma for independent noise, and
        sigma times std(w_t) for correlated noise.

        `sigma` is the scale of the independent z_t from which correlated noise w_t is computed. The
        scale of w_t is usually larger.
        """
        run = None if self.facts.noise is None else charging.of(self.facts).run
        return self.sigma if run is None else self.sigma * run.noise_std[self.place]

    @property
    def upload_sigma(self) -> np.ndarray:
        """Noise scale of one noising party's contribution to the sum, [K], over all local steps of
        the round if there are local steps.

        A step moves the client's model by lr / B times a noisy sum, so the noise of k steps has the
        scale sigma lr sqrt(k) / B.
        """
        steps = self.facts.steps
        if steps is None:
            return self.round_sigma
        return self.sigma * self.facts.training.lr * math.sqrt(steps.count) / steps.batch

    @cached_property
    def party_noise_norms(self) -> np.ndarray:
        """Root mean square l2 norm of the noise that one noising party adds to each layer, [K]; 0
        for layers that are not released.

        The party is the server under central trust and each client under local trust. With local
        steps, the noise of all steps of a round counts, as SGD without momentum adds it to the
        client's update.
        """
        per_coordinate = self.upload_sigma * (math.sqrt(2.0) if self.family == "laplace" else 1.0)
        with np.errstate(invalid="ignore"):
            norms = np.where(self.released, per_coordinate * np.sqrt(self.layers.sizes), 0.0)
        norms.setflags(write=False)
        return norms

    @property
    def noise_norms(self) -> np.ndarray:
        """Root mean square l2 norm of each layer's noise on the MEAN update, [K]; 0 for layers that
        are not released.

        Under local trust, the noise of the expected number of clients counts.
        """
        parties = self.facts.noised_by.noises_in_sum(self.denominator)
        return self.party_noise_norms * math.sqrt(parties) / self.denominator

    def expand(self, mean: Tensor) -> Tensor:
        """Flat updates [..., D] from released vectors [..., size]; 0 for layers that are not
        released.
        """
        if self.complete:
            return mean[..., : self.layers.size]
        update = torch.zeros(
            *mean.shape[:-1], self.layers.size, dtype=mean.dtype, device=mean.device
        )
        views = self.layers.split(update)
        for j, part in zip(
            self.indices, mean.split([part.size for part in self.parts], dim=-1), strict=False
        ):
            views[j].copy_(part)
        return update

    @property
    def scales(self) -> np.ndarray:
        """Noise scale of each number that is released, [size]."""
        return np.repeat([part.sigma for part in self.parts], [part.size for part in self.parts])

    @cached_property
    def trained(self) -> Tensor | None:
        """Mask with 1 for each coordinate that clients train and 0 for the others, float32 [D];
        None if clients train all coordinates.
        """
        if not self.freezes or self.complete:
            return None
        return torch.from_numpy(np.repeat(self.released, self.layers.sizes).astype(np.float32))

    def equals(self, other: ReleasePlan, **more: Any) -> bool:
        """Whether another plan has the type and the fields of this plan, with the values in `more`
        in place of this plan's values.
        """
        mine = {name: getattr(self, name) for name in _FIELDS} | more
        return type(self) is type(other) and all(
            _equal(mine[name], getattr(other, name)) for name in _FIELDS
        )

    def to_json(self) -> str:
        """The information that a client needs to bound its contribution and, under local trust, to
        add noise to it, as JSON.
        """
        return self._text

    @cached_property
    def _text(self) -> str:
        # Clients' noise is keyed by this text. The order of its keys is therefore fixed, and
        # optional fields that are not set must be omitted.
        return json.dumps(
            {
                "protected": self.protected,
                "clip": self.clip.tolist(),
                "sigma": [s if math.isfinite(s) else None for s in self.sigma.tolist()],
                "released": self.released.tolist(),
                "family": self.family,
                "queries": [[noisy.query.name, noisy.sigma] for noisy in self.queries],
                "bounded_by": self.bounded_by,
                "facts": self.facts.to_dict(),
                "guarantee": self.guarantee.to_dict(),
                "claim": self.claim,
                "downlink": 0.0,  # no plan has broadcast noise
            }
            | ({} if self.position is None else {"position": self.position})
            | ({"freezes": True} if self.freezes else {})
            | ({"fills": self.fills} if self.fills else {})
        )

    @staticmethod
    @lru_cache(maxsize=16)
    def from_json(layers: LayerTable, text: str) -> ReleasePlan:
        """Inverse of `to_json`. A plan for another number of layers is refused, because its arrays
        have other shapes.

        Most rounds of a run send the same text. Equal texts return the same plan object, which is
        safe because plans do not change.

        Raises:
            ConfigError, PrivacyError: the text is not a plan, or the plan is inconsistent.
        """
        try:
            raw = json.loads(text)
            kind = ReleasePlan if raw["protected"] else UnprotectedPlan
            return kind(
                layers,
                clip=np.array(raw["clip"], dtype=np.float64),
                sigma=np.array(
                    [math.inf if s is None else s for s in raw["sigma"]], dtype=np.float64
                ),
                facts=RunFacts.from_dict(raw["facts"]),
                guarantee=Guarantee(**raw["guarantee"]),
                family=raw["family"],
                released=np.array(raw["released"], dtype=bool),
                queries=tuple(
                    NoisyQuery(queries.get(name, layers.sizes), float(sigma))
                    for name, sigma in raw["queries"]
                ),
                bounded_by=raw["bounded_by"],
                claim=raw["claim"],
                position=raw.get("position"),
                freezes=raw.get("freezes", False) is True,
                fills=tuple(raw.get("fills", ())),
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"not a release plan: {error}") from error


_FIELDS = tuple(field.name for field in fields(ReleasePlan))


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            _equal(value, right[key]) for key, value in left.items()
        )
    return np.array_equal(left, right) if isinstance(left, np.ndarray) else bool(left == right)


@dataclass(frozen=True, eq=False)
class UnprotectedPlan(ReleasePlan):
    """A release that is not private, because it follows an unsound published rule or has no
    protection at all. Whatever its noise, its event is `NonPrivateDpEvent`. The status of its
    guarantee must be "none".

    Example:
        >>> layers, facts = LayerTable.from_sizes({"a": 4}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> plan = UnprotectedPlan(layers, [1.0], [1.0], facts, Guarantee("none", "its bound is a private norm"))
        >>> plan.protected, plan.event
        (False, NonPrivateDpEvent())
    """

    protected: ClassVar[bool] = False

    def _check_protection(self) -> None:
        self.guarantee.require(protected=False)

    @property
    def event(self) -> privacy.DpEvent:
        """The event of a release that is not private, whatever its noise."""
        return privacy.events.gaussian_event(0.0)

    repeated_event = event
