"""Canaries in a run: known contributions that the auditor adds to some of the run's sums and looks
for in the releases.

A canary contributes as much as a client may, in a random direction. In layer j its update is a
vector of random signs whose norm is far above the bound s_j, so that the release's own clipping
reduces it to the bound. The auditor acts as the adversary in the definition of differential
privacy, who knows every client's contribution and every direction, but not which canaries are
included. For the checks of the noise, the auditor also subtracts the canaries' contributions. The
view of canary i in a round is the *canary-aligned sum* <u_i, (release - clients' sum) / sigma>,
where u_i is the canary's unit direction in units of the noise. If the canary was included, the
signal is mu = 1 / sigma_eff; if the release is as planned, the noise is exactly Gaussian with
standard deviation 1.

    canaries.insert(round, plan, total)    # before the noise; total [plan.size] is changed in place
    noisy = release(total, plan, keys, round)
    canaries.observe(round, plan, noisy)   # after the noise
    record = canaries.record()             # everything from which the bounds of a run are computed

If the rounds of a run are one mechanism (correlated noise, restricted participation), a canary
takes part as a client may: in every b-th round, beginning with one of the first b, and each time
with the same contribution, whose sign is random. The checks of the noise then use the independent
noise z = C w, which whitening computes from the correlated noise w of the rounds so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation import BoundedSum
from fedlgm.aggregation.contributions import BoundedAnswer, BoundedUpdates
from fedlgm.checks import check_count
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning import charging
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits.noise_checks import figures
from fedlgm_lab.audits.record import CanaryRecord, Presence
from fedlgm_lab.audits.scores import Array
from fedlgm_lab.audits.whitening import Whitening

# largest number of values that are stored for sums of canaries' directions, which are used again at
# the canaries' next turn
_REPEATED = 1 << 22
_ABOVE = 8.0  # norm of a canary's raw update divided by its bound, so that clipping reduces it
# probability with which a canary takes part in a round if a coin chooses its direction in each
# round
_IN = 0.9
_PARTICIPATION, _SIGNS, _BITS = 0, 1, 2  # paths of the auditor's streams


Columns = dict[int, tuple[int, int, int]]
"""Maps a layer's index to (start in the released vector, end there, start in the flat update)."""


class Canaries:
    """The m canaries of a run, each with a direction in every layer (see the module's docstring).

    Args:
        layers: the layers of the model, as the mechanism sees them.
        count: number m of canaries.
        keys: the auditor's key ring, which must differ from the key ring of the noise.
        presence: what a canary's coin decides. "release" is for bounds on single releases: each
            canary takes part in a round with probability 0.9 (under the replace-one relation, in
            every round), and in each of these rounds a fair coin chooses its direction or the
            opposite direction. "run" is for bounds on the run as a whole: a fair coin decides
            whether a canary is in the run, and an included canary takes part in a round with
            probability `rate`, as a client does. In a run whose rounds are one mechanism (see the
            module's docstring), the two values select the same canaries.
        rate: the run's sampling rate q.

    Raises:
        ConfigError: there are fewer than two canaries.
    """

    def __init__(
        self,
        layers: LayerTable,
        count: int,
        keys: KeyRing,
        *,
        presence: Presence = "release",
        rate: float = 1.0,
    ) -> None:
        check_count("the number of canaries", count, least=2)
        self._layers, self._keys, self._presence, self._rate = layers, keys, presence, rate
        # Random signs, scaled to norm 1 in every layer, whatever the layer's size.
        random = keys.numpy_generator(Purpose.PROBE, _SIGNS).bytes((count * layers.size + 7) // 8)
        bits = np.unpackbits(np.frombuffer(random, dtype=np.uint8), count=count * layers.size)
        unit = (2.0 * bits.reshape(count, layers.size) - 1.0).astype(np.float32)
        # Products with this array use torch, whose threads the caller has limited. NumPy would use
        # all cores.
        self._unit = torch.from_numpy(
            unit / np.sqrt(layers.sizes).astype(np.float32).repeat(layers.sizes)
        )
        self._member = keys.numpy_generator(Purpose.PROBE, _BITS).random(count) < 0.5
        self._turning = (
            2.0 * keys.numpy_generator(Purpose.PROBE, _PARTICIPATION).integers(0, 2, count) - 1.0
        )
        self.rows: list[dict[str, Any]] = []
        # clients' sum, canaries' sum, the canaries that take part
        self._inserted: tuple[Tensor, Tensor, _Part] | None = None
        self._turns: dict[int, _Part] = {}  # turn -> canaries that take part in it
        self._whitening: Whitening | None = None
        self._measured: _Measured | None = None

    def __len__(self) -> int:
        return len(self._unit)

    def insert(self, round: int, plan: ReleasePlan, total: Tensor) -> None:
        """Add this round's canaries, bounded as a client's update is, to a bounded sum [plan.size]
        in place.

        Raises:
            ConfigError: canaries cannot audit the plan's releases, because the plan has Laplace
                noise or no noise, because it releases nothing, or because trust is local.
        """
        measured, part = self._measure(plan), self._part(round, plan)
        released = [
            part.directions[start : start + high - low]
            for low, high, start in measured.columns.values()
        ]
        added = np.concatenate(
            [np.concatenate(released) * measured.lengths, measured.answers * part.count]
        )
        before, contributed = total.detach().clone(), torch.from_numpy(added).to(total)
        self._inserted = before, contributed, part
        total += contributed

    def _measure(self, plan: ReleasePlan) -> _Measured:
        """Measure a plan's effect on a canary; reuse the previous measurement if the plans have
        equal bounds, noise and released layers.
        """
        key = (plan.clip.tobytes(), plan.sigma.tobytes(), plan.released.tobytes())
        if self._measured is None or self._measured.key != key or plan.queries:
            check_auditable(plan)
            self._measured = _Measured.of(plan, self._layers, self._unit[:1], key)
        return self._measured

    def _part(self, round: int, plan: ReleasePlan) -> _Part:
        """Choose the canaries that take part in a round, with their signs."""
        run = charging.of(plan.facts).run
        if run is not None:
            turn = (round - 1) % run.separation
            if turn in self._turns:
                return self._turns[turn]
            orientation = np.where(
                np.arange(len(self)) % run.separation == turn, self._turning, 0.0
            )
            part = _Part.of(orientation, orientation, self._unit)
            if (len(self._turns) + 1) * self._layers.size <= _REPEATED:
                self._turns[turn] = part
            return part
        rng = self._keys.numpy_generator(Purpose.PROBE, _PARTICIPATION, round)
        coins = (
            rng.integers(0, 2, len(self))
            if self._presence == "release"
            else np.ones(len(self), dtype=int)
        )
        orientation = np.where(coins, 1.0, -1.0)
        if plan.facts.relation == "replace-one" and self._presence == "release":
            present: Array = np.ones(len(self))  # with the direction or its opposite
        elif self._presence == "release":
            present = (rng.random(len(self)) < _IN).astype(np.float64)
        else:
            present = (self._member & (rng.random(len(self)) < self._rate)).astype(np.float64)
        return _Part.of(orientation, orientation * present, self._unit)

    def observe(self, round: int, plan: ReleasePlan, noisy: Tensor) -> None:
        """Record the canaries' view of a noisy sum [plan.size].

        Raises:
            ValueError: `insert` was not called before.
        """
        if self._inserted is None:
            raise ValueError("observe was called without insert")
        (before, contributed, part), self._inserted = self._inserted, None
        measured = self._measure(plan)
        scale, share, columns = measured.scale, measured.share, measured.columns
        size = len(scale)
        released = (noisy - before)[:size].double().cpu().numpy() / scale  # queries come last
        noise = released - contributed[:size].double().cpu().numpy() / scale
        aligned, length = (
            np.full((len(self), len(self._layers)), np.nan),
            np.zeros(len(self._layers)),
        )
        for j, (low, high, start) in columns.items():
            others = part.directions[start : start + high - low]
            seen = torch.from_numpy(released[low:high] - share[j] * others).float()
            aligned[:, j] = (
                self._unit[:, start : start + high - low] @ seen
            ).numpy() + part.signs * share[j]
            length[j] = others @ others
        self.rows.append(
            {
                "round": round,
                "layer_aligned": aligned,
                "layer_signal": share,
                "signs": part.signs,
                "orientation": part.orientation,
                "length": length,
                **self._noise(round, plan, noise, columns),
                "multipliers": measured.multiplier,
                "raw": self._raw(released, share, columns),
            }
        )

    def _raw(self, released: Array, share: Array, columns: Columns) -> Array:
        """Compute canary-aligned sums from which only the clients' sum is subtracted, if each
        canary's coin decides for the whole run; otherwise return an empty array.
        """
        if self._presence == "release":
            return np.zeros(0)
        weights, seen = share / np.linalg.norm(share), np.zeros(self._layers.size)
        for j, (low, high, start) in columns.items():
            seen[start : start + high - low] = weights[j] * released[low:high]
        return (self._unit @ torch.from_numpy(seen).float()).numpy()

    def record(self) -> CanaryRecord:
        """Collect the observations of all rounds so far.

        Raises:
            ConfigError: no round was observed.
        """
        return CanaryRecord.of(self.rows, self._member, self._rate, self._presence)

    def _noise(
        self, round: int, plan: ReleasePlan, noise: Array, columns: Columns
    ) -> dict[str, Array]:
        """Compute the figures of a round's independent noise for the checks. If the noise w is
        correlated, the independent noise is z = C w.
        """
        spans = {j: (low, high) for j, (low, high, _) in columns.items()}
        run = charging.of(plan.facts).run
        if run is not None:
            if self._whitening is None:
                self._whitening = Whitening(run.noise, self._layers.size)
            w = np.full(self._layers.size, np.nan)
            for low, high, start in columns.values():
                w[start : start + high - low] = noise[low:high]
            noise = self._whitening.next(round, w)
            ends = self._layers.offsets
            spans = {
                j: (int(ends[j]), int(ends[j + 1])) for j in spans if not np.isnan(noise[ends[j]])
            }
        return figures(noise, spans, len(self._layers))


@dataclass(frozen=True)
class _Part:
    """The canaries that take part in a round.

    Attributes:
        orientation: sign of every canary's direction in that round, [m]; 0 for a canary that cannot
            take part.
        signs: the signs of `orientation`, but 0 for canaries that are not included, [m].
        directions: sum of the signed directions of the included canaries, [D].
        count: number of included canaries.
    """

    orientation: Array
    signs: Array
    directions: Array
    count: int

    @classmethod
    def of(cls, orientation: Array, signs: Array, unit: Tensor) -> _Part:
        """Sum the directions `unit` [m, D] of the canaries whose entry in `signs` is not 0, each
        with its sign.
        """
        chosen = torch.from_numpy(np.flatnonzero(signs))
        directions = torch.from_numpy(signs).float()[chosen] @ unit[chosen]
        return cls(orientation, signs, directions.double().numpy(), len(chosen))


@dataclass(frozen=True)
class _Measured:
    """A plan's effect on a canary.

    Attributes:
        key: the plan's bounds, noise scales and released layers, as bytes.
        columns: where each released layer lies; see `Columns`.
        scale: noise scale of every released coordinate of a layer.
        share: s_j / sigma_j of each layer, [K]; 0 for layers that are not released.
        multiplier: the plan's effective multiplier.
        lengths: for each released coordinate, a bounded canary's norm in the coordinate's layer.
        answers: a canary's answers to auxiliary queries.
    """

    key: tuple[bytes, ...]
    columns: Columns
    scale: Array
    share: Array
    multiplier: float
    lengths: Array
    answers: Array

    @classmethod
    def of(
        cls, plan: ReleasePlan, layers: LayerTable, unit: Tensor, key: tuple[bytes, ...]
    ) -> _Measured:
        """Measure the plan's effect on one canary, which is the same for every canary.

        Bounding depends only on the norms of the layers, which are the same for all canaries.

        Args:
            plan: the plan.
            layers: the layers.
            unit: a canary's directions, [1, D].
            key: see the attribute of `_Measured`.
        """
        bound = np.where(plan.released, plan.clip, 0.0).astype(np.float32).repeat(layers.sizes)
        update = unit * torch.from_numpy(bound)
        block = BoundedSum.empty(plan)
        # a plan that levels the layers would change the direction of an update above the bound
        above = 1.0 if plan.fills else _ABOVE
        block.add(
            _updates_at_bounds(update, plan) if plan.bounded_by == "trainer" else above * update
        )
        columns = _columns(plan, layers)
        total, size = block.total, int(np.sum(layers.sizes[plan.indices]))
        lengths = [
            float(unit[0, start : start + high - low].double() @ total[low:high])
            for low, high, start in columns.values()
        ]
        return cls(
            key,
            columns,
            np.repeat(plan.sigma[plan.indices], layers.sizes[plan.indices]),
            plan.clip / np.where(plan.released, plan.sigma, 1.0) * plan.released,
            plan.effective_multiplier,
            np.repeat(lengths, layers.sizes[plan.indices]),
            total[size:].numpy().copy(),
        )


_INSTEAD = "`fedlgm audit` with --method distinguisher instead of canaries"


def check_auditable(plan: ReleasePlan) -> None:
    """Refuse a plan whose releases canaries cannot audit.

    Raises:
        ConfigError: the message gives the reason and an alternative.
    """
    if plan.size == 0:
        raise ConfigError("the plan releases nothing: there is no release to audit")
    if plan.family != "gaussian":
        raise ConfigError(
            f"canary-aligned sums need Gaussian noise, but the plan has {plan.family}: use "
            f"{_INSTEAD}"
        )
    if plan.effective_multiplier == 0:
        raise ConfigError(f"the plan adds no noise to a released layer: use {_INSTEAD}")
    if plan.facts.noised_by.uploads_released:
        raise ConfigError(
            f"under {plan.facts.trust} trust clients' own uploads are noised: use {_INSTEAD}"
        )


def _updates_at_bounds(updates: Tensor, plan: ReleasePlan) -> BoundedUpdates:
    """Wrap canaries at the plan's bounds as the bounded updates that a trainer returns; their
    answers to the plan's queries are 0.
    """
    zeros = [torch.zeros(len(updates), noisy.size) for noisy in plan.queries]
    answers = [
        BoundedAnswer(noisy.query.name, z, 0.0)
        for noisy, z in zip(plan.queries, zeros, strict=True)
    ]
    return BoundedUpdates(updates, tuple(plan.clip.tolist()), tuple(answers))


def _columns(plan: ReleasePlan, layers: LayerTable) -> Columns:
    columns, position = {}, 0
    for j in (int(j) for j in plan.indices):
        size = int(layers.sizes[j])
        columns[j] = (position, position + size, int(layers.offsets[j]))
        position += size
    return columns


def canary_count(size: int, rounds: int, groups: int = 1) -> int:
    """Choose a number of canaries that adds little to a run's cost if each canary takes part in
    `rounds` rounds.

    The canaries then take part 3,000 times in all, or fewer times if the number of groups, the
    number of coordinates or the memory permits only fewer canaries.

    Args:
        size: number of coordinates of the model.
        rounds: number of rounds in which a canary takes part.
        groups: number of groups of canaries that take turns, one per round.
    """
    apart, elements = (16, 1 << 21) if groups == 1 else (10, 1 << 23)
    return int(max(2, min(-(-3000 // rounds), 128 * groups, size // apart, elements // size)))
