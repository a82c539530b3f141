"""Canaries in a run: known contributions that are added to some of its sums and looked for in what is released.

A canary contributes as much as a client may, in a random direction: in layer j its update is a vector of random signs
whose norm is far above the bound s_j, so that the release's own clipping brings it there. The auditor is the adversary
of the definition: it knows every client's contribution and every direction, and not whether a canary was in. What it
sees of canary i in a round is the *canary-aligned sum* <u_i, (release - clients' sum) / sigma>, with u_i the canary's
unit direction in units of the noise: signal mu = 1 / sigma_eff if the canary was in, and exactly Gaussian noise of
standard deviation 1 if the release is as planned.

    canaries.insert(round, plan, total)    # before the noise; total [plan.size] is changed in place
    noisy = release(total, plan, keys, round)
    canaries.observe(round, plan, noisy)   # after it
    record = canaries.record()             # everything that the bounds of a run are computed from

Where the rounds of a run are one mechanism (correlated noise, restricted participation) a canary takes part as a client
may: in every b-th round from one of the first b on, each time with the same contribution, whose sign is a coin. What is
checked of the noise is then z = C w, which whitening makes of the noise of the rounds so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import scipy.special
import torch
from torch import Tensor

from fedlgm.aggregation import BoundedSum, DeviceSum
from fedlgm.audits.whitening import Whitening
from fedlgm.contributions import BoundedAnswer, BoundedUpdates
from fedlgm.errors import ConfigError
from fedlgm.keys import KeyRing, Purpose
from fedlgm.layers import LayerTable
from fedlgm.plan import ReleasePlan

Presence = Literal["release", "run"]
_SMALL = 1 << 13
_REPEATED = 1 << 22  # numbers of sums of canaries that take turns, up to which they are kept
_ABOVE = 8.0  # a canary's raw update over its bound: clipping must bring it down
_PARTICIPATION, _SIGNS, _BITS = 0, 1, 2  # paths of the auditor's streams


class ReleaseObserver(Protocol):
    """Someone who looks at a simulation's sums on their way to release. Never part of a deployment."""

    def insert(self, round: int, plan: ReleasePlan, total: Tensor) -> None:
        """Called with the bounded sum [plan.size] before noise is added; may add to it in place."""
        ...

    def observe(self, round: int, plan: ReleasePlan, noisy: Tensor) -> None:
        """Called with the noisy sum [plan.size] before anything else is done with it."""
        ...


@dataclass(frozen=True)
class CanaryRecord:
    """What canaries saw over T rounds with m canaries and K layers.

    Attributes:
        round: number of each round, from 1, [T].
        aligned: canary-aligned sums of each round, the other canaries' known contributions taken off, [T, m].
        raw: the same without taking them off: functions of the release alone, [T, m].
        signs: +1 or -1 where the canary was in (times its direction), 0 where not, [T, m].
        orientation: the direction's sign in that round, whether the canary was in or not, [T, m]; 0 where a canary of
            a run whose rounds are one mechanism could not take part.
        member: whether the canary's coin put it into the run, bool [m].
        signal: mu of each round by the plan, [T].
        layer_aligned: canary-aligned sums of each layer, [T, m, K]; NaN where not released.
        layer_signal: s_j / sigma_j of each layer, [T, K]; 0 where not released.
        energy: mean square of the noise (whitened, where it is correlated) in each layer, in units of the plan's,
            [T, K]; NaN where not released.
        correlation: largest significance |z| of a correlation of that noise with earlier rounds' and with other
            layers', and the correlation itself, [T, 2].
        multipliers: the plan's effective multiplier of each round, [T].
        overlap: mean square of the cosine of two canaries, [T].
        cosines: cosine of each canary with the sum of all releases, [m].
        rate: probability that a canary that is in takes part in a round.
        presence: "release" (a coin per round) or "run" (a coin per run).
    """

    round: np.ndarray
    aligned: np.ndarray
    raw: np.ndarray
    signs: np.ndarray
    orientation: np.ndarray
    member: np.ndarray
    signal: np.ndarray
    layer_aligned: np.ndarray
    layer_signal: np.ndarray
    energy: np.ndarray
    correlation: np.ndarray
    multipliers: np.ndarray
    overlap: np.ndarray
    cosines: np.ndarray
    rate: float
    presence: Presence

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[str, Any]], member: np.ndarray, rate: float = 1.0, presence: Presence = "release"
    ) -> CanaryRecord:
        """Record of rounds, as `Canaries.rows` holds them or as they were stored.

        Raises:
            ConfigError: no rows, or rows that are incomplete.
        """
        if not rows:
            raise ConfigError("nothing was released while the canaries watched: there is nothing to audit")
        try:
            values = {name: np.stack([np.asarray(row[name], dtype=np.float64) for row in rows]) for name in _ROW}
        except (KeyError, ValueError) as error:
            raise ConfigError(f"the canaries' record is damaged: {error}") from error
        whole = values.pop("whole")[-1]
        cosines = np.sum(values["raw"] * values["orientation"], axis=0) / float(whole)
        return cls(**values, member=member, cosines=cosines, rate=rate, presence=presence)  # type: ignore[arg-type]


_ROW = ("round", "aligned", "raw", "signs", "orientation", "signal", "layer_aligned", "layer_signal", "energy",
        "correlation", "multipliers", "overlap", "whole")  # fmt: skip


class Canaries:
    """m canaries over the layers of a run; see the module.

    Args:
        layers: the layers that are released (as the mechanism sees them).
        count: number m of canaries.
        keys: the auditor's own ring; never that of the noise.
        presence: "release": each canary takes part in each round by a fair coin, for bounds on single releases;
            "run": a fair coin decides for the whole run, and a canary that is in takes part with probability `rate`,
            as a client does, for bounds on the run as a whole. Of a run whose rounds are one mechanism (see the module)
            either is the same.
        rate: the run's sampling rate q.

    Raises:
        ConfigError: fewer than two canaries.
    """

    def __init__(
        self, layers: LayerTable, count: int, keys: KeyRing, *, presence: Presence = "release", rate: float = 1.0
    ) -> None:
        if count < 2:
            raise ConfigError(f"an audit needs at least 2 canaries, got {count}")
        self._layers, self._keys, self._presence, self._rate = layers, keys, presence, rate
        # Signs of norm 1 in every layer: bounded by s_j in l2 norm, whatever the layer's size.
        random = keys.numpy_generator(Purpose.PROBE, _SIGNS).bytes((count * layers.size + 7) // 8)
        bits = np.unpackbits(np.frombuffer(random, dtype=np.uint8), count=count * layers.size)
        unit = (2.0 * bits.reshape(count, layers.size) - 1.0).astype(np.float32)
        self._unit = torch.from_numpy(unit / np.sqrt(layers.sizes).astype(np.float32).repeat(layers.sizes))
        self._member = keys.numpy_generator(Purpose.PROBE, _BITS).random(count) < 0.5
        self.rows: list[dict[str, Any]] = []
        self._before: Tensor | None = None  # the clients' sum of the round in progress
        self._added: Tensor | None = None
        self._signs = np.zeros(count)
        self._last: np.ndarray | None = None  # noise of the round before
        self._whitening: Whitening | None = None
        self._correlations = _Correlations()
        self._repeated: dict[tuple[bytes, ...], Tensor] = {}
        self._whole = np.zeros(layers.size)  # sum of all releases in units of their noise

    def __len__(self) -> int:
        return len(self._unit)

    def insert(self, round: int, plan: ReleasePlan, total: Tensor) -> None:
        """Add this round's canaries to a bounded sum [plan.size], in place, through the release's own bounding.

        Raises:
            ConfigError: a plan whose releases canaries cannot be looked for in: Laplace or no noise, local trust.
        """
        check_auditable(plan)
        self._orientation, self._signs = self._participation(round, plan)
        self._before, self._added = total.detach().clone(), self._contributed(plan).to(total)
        total += self._added

    def _contributed(self, plan: ReleasePlan) -> Tensor:
        """The bounded sum of the canaries that are in, [plan.size]; those that take turns bring the same every time."""
        key = (self._signs.tobytes(), plan.clip.tobytes(), plan.released.tobytes())
        if key in self._repeated:
            return self._repeated[key]
        scale = torch.from_numpy(np.where(plan.released, plan.clip, 0.0).astype(np.float32))
        widths = torch.from_numpy(self._layers.sizes)
        raw = _ABOVE * scale.repeat_interleave(widths)
        chosen = torch.from_numpy(np.flatnonzero(self._signs))
        updates = self._unit[chosen] * raw * torch.from_numpy(self._signs).float()[chosen, None]
        # Either is the release's own bounding; the kernels take a small model's canaries in one call.
        block = DeviceSum(plan, torch.device("cpu"), "torch") if raw.numel() <= _SMALL else BoundedSum.empty(plan)
        if len(updates):
            block.add(_bounded(updates / _ABOVE, plan) if plan.bounded_by == "trainer" else updates)
        if not plan.facts.separate_rounds and plan.size * plan.run.separation <= _REPEATED:
            if len(self._repeated) >= plan.run.separation:
                self._repeated.clear()  # of another plan
            self._repeated[key] = block.total
        return block.total

    def _participation(self, round: int, plan: ReleasePlan) -> tuple[np.ndarray, np.ndarray]:
        """Signs of the directions in a round, and the same with 0 for canaries that are not in."""
        if not plan.facts.separate_rounds:
            rng = self._keys.numpy_generator(Purpose.PROBE, _PARTICIPATION)
            turn = np.arange(len(self)) % plan.run.separation == (round - 1) % plan.run.separation
            orientation = (rng.integers(0, 2, len(self)) * 2.0 - 1.0) * turn
            return orientation, orientation
        rng = self._keys.numpy_generator(Purpose.PROBE, _PARTICIPATION, round)
        orientation = rng.integers(0, 2, len(self)) * 2.0 - 1.0 if self._presence == "release" else np.ones(len(self))
        if plan.facts.relation == "replace-one" and self._presence == "release":
            present: np.ndarray = np.ones(len(self))  # the other contribution is the opposite one
        elif self._presence == "release":
            present = (rng.random(len(self)) < 0.5).astype(np.float64)
        else:
            present = self._member * (rng.random(len(self)) < self._rate)
        return orientation, orientation * present

    def observe(self, round: int, plan: ReleasePlan, noisy: Tensor) -> None:
        """Record what the canaries see of a noisy sum [plan.size]."""
        if self._before is None or self._added is None:
            raise ValueError("observe was called without insert")
        scale = _scales(plan, self._layers)
        size = len(scale)
        released = (noisy - self._before)[:size].double().cpu().numpy() / scale  # queries come last
        added = self._added[:size].double().cpu().numpy() / scale
        noise = released - added
        columns = _columns(plan, self._layers)
        unit, chosen = self._unit.numpy(), np.flatnonzero(self._signs)
        signs = self._signs[chosen].astype(np.float32)
        share = plan.clip / np.where(plan.released, plan.sigma, 1.0) * plan.released
        mu = float(np.linalg.norm(share))
        layer_raw = np.full((len(self), len(self._layers)), np.nan)
        others = np.zeros_like(layer_raw)
        for j, (low, high, start) in columns.items():
            block = unit[:, start : start + high - low]
            planned = signs @ block[chosen] * share[j]
            layer_raw[:, j] = block @ released[low:high].astype(np.float32)
            others[:, j] = block @ planned.astype(np.float32) - self._signs * share[j]
        aligned = np.where(np.isnan(layer_raw), np.nan, layer_raw - others)
        weights = share / mu
        for low, high, start in columns.values():
            self._whole[start : start + high - low] += released[low:high]
        self.rows.append(
            {
                "round": round,
                "aligned": np.nansum(aligned * weights, axis=1),
                "raw": np.nansum(layer_raw * weights, axis=1),
                "signs": self._signs,
                "orientation": self._orientation,
                "signal": mu,
                "layer_aligned": aligned,
                "layer_signal": share,
                **self._noise(round, plan, noise, columns),
                "multipliers": plan.effective_multiplier,
                "overlap": float(np.sum(weights**4 / self._layers.sizes)),
                "whole": float(np.linalg.norm(self._whole)),
            }
        )
        self._before = self._added = None

    def record(self) -> CanaryRecord:
        """Everything seen so far.

        Raises:
            ConfigError: no round was observed.
        """
        return CanaryRecord.of(self.rows, self._member, self._rate, self._presence)

    def _noise(
        self, round: int, plan: ReleasePlan, noise: np.ndarray, columns: dict[int, tuple[int, int, int]]
    ) -> dict[str, np.ndarray]:
        """Energy and correlation of a round's independent noise, which is z = C w where the noise w is correlated."""
        spans = {j: (low, high) for j, (low, high, _) in columns.items()}
        if plan.facts.separate_rounds:
            past = [] if self._last is None or len(self._last) != len(noise) else [self._last]
            self._last = noise
        else:
            if self._whitening is None:
                self._whitening = Whitening(plan.run.noise, self._layers.size)
            w = np.full(self._layers.size, np.nan)
            for low, high, start in columns.values():
                w[start : start + high - low] = noise[low:high]
            noise, past = self._whitening.next(round, w)
            ends = self._layers.offsets
            spans = {j: (int(ends[j]), int(ends[j + 1])) for j in spans if not np.isnan(noise[ends[j]])}
        energy = np.full(len(self._layers), np.nan)
        for j, (low, high) in spans.items():
            energy[j] = float(np.mean(noise[low:high] ** 2))
        parts = [noise[low:high] for low, high in spans.values()]
        return {"energy": energy, "correlation": self._correlations.of(noise, past, parts)}


def correlations(layers: int, kept: int = 1) -> int:
    """Most correlations that are looked at in a round of so many layers, whose noise leaves `kept` vectors behind."""
    return 2 * kept + max(0, 2 * layers - 3)


class _Correlations:
    """The most conspicuous correlation of each round's noise.

    Looked at are a round's noise with each of the vectors that earlier rounds left behind, in this round and in all so
    far together, and the noise of its layers with that of their neighbours and of the first. Of independent Gaussian
    noise every cosine has exactly a t law, whose normal quantiles z are added up over the rounds.
    """

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}  # by place in the past: sum of z, rounds, coordinates

    def of(self, noise: np.ndarray, past: list[np.ndarray], parts: list[np.ndarray]) -> np.ndarray:
        """(|z|, correlation) of the most conspicuous one; (0, 0) where there is nothing to look at.

        Args:
            noise: of the round, NaN where not known.
            past: vectors of the same size that it should be independent of, the latest last.
            parts: its layers.
        """
        found = np.zeros(2)

        def consider(z: float, value: float) -> None:
            if abs(z) > found[0]:
                found[:] = abs(z), value

        for place, vector in enumerate(reversed(past)):
            z, value, size = _cosine(noise, vector)
            consider(z, value)
            if size:
                total = self._sums.setdefault(place, np.zeros(3))
                total += z, 1, size
                consider(total[0] / math.sqrt(total[1]), total[0] / math.sqrt(total[1] * total[2]))
        for other in range(1, len(parts)):
            for one in {0, other - 1}:
                shorter = min(len(parts[one]), len(parts[other]))
                z, value, _ = _cosine(parts[one][:shorter], parts[other][:shorter])
                consider(z, value)
        return found


def _cosine(a: np.ndarray, b: np.ndarray) -> tuple[float, float, int]:
    """Normal quantile of the p-value of a cosine, the cosine, and of how many coordinates; zeros for too few."""
    product = float(a @ b)
    if math.isnan(product):  # layers that were not released
        both = np.isfinite(a) & np.isfinite(b)
        a, b = a[both], b[both]
        product = float(a @ b)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if len(a) < 8 or lengths == 0:
        return 0.0, 0.0, 0
    value = max(min(product / lengths, 1 - 1e-15), -1 + 1e-15)
    tail = float(scipy.special.stdtr(len(a) - 1, -abs(value) * math.sqrt((len(a) - 1) / (1 - value**2))))
    z = -float(scipy.special.ndtri(tail)) if tail > 1e-300 else abs(math.atanh(value)) * math.sqrt(len(a))
    return math.copysign(z, value), value, len(a)


def check_auditable(plan: ReleasePlan) -> None:
    """Refuse a plan whose releases canaries cannot be looked for in.

    Raises:
        ConfigError: the message says which and what to do instead.
    """
    if plan.size == 0:
        raise ConfigError("the plan releases nothing: there is no release to audit")
    if plan.family != "gaussian":
        raise ConfigError(f"canary-aligned sums need Gaussian noise, the plan has {plan.family}: use 'distinguisher'")
    if plan.effective_multiplier == 0:
        raise ConfigError("the plan adds no noise to a released layer: use 'distinguisher'")
    if plan.facts.trust == "local":
        raise ConfigError("under local trust every client's own upload is a release: use 'distinguisher'")


def _bounded(updates: Tensor, plan: ReleasePlan) -> BoundedUpdates:
    """Canaries that are at the plan's bounds already, as a trainer hands them over; they answer its queries with 0."""
    zeros = [torch.zeros(len(updates), noisy.query.size) for noisy in plan.queries]
    answers = [BoundedAnswer(noisy.query.name, z, 0.0) for noisy, z in zip(plan.queries, zeros, strict=True)]
    return BoundedUpdates(updates, tuple(plan.clip.tolist()), tuple(answers))


def _columns(plan: ReleasePlan, layers: LayerTable) -> dict[int, tuple[int, int, int]]:
    """Layer -> (start and end in the released vector, start in the flat update)."""
    found, position = {}, 0
    for j in (int(j) for j in plan.indices):
        size = int(layers.sizes[j])
        found[j] = (position, position + size, int(layers.offsets[j]))
        position += size
    return found


def _scales(plan: ReleasePlan, layers: LayerTable) -> np.ndarray:
    """Noise scale of every released coordinate of a layer."""
    return np.repeat(plan.sigma[plan.indices], layers.sizes[plan.indices])


def canary_count(size: int, rounds: int, groups: int = 1) -> int:
    """How many canaries a run can carry at little cost in which each of them takes part in `rounds` rounds.

    Enough for 2,000 participations in all (3,000 where they take turns: there is more noise then), as long as they stay
    few beside the coordinates and do not take up much memory.

    Args:
        size: coordinates.
        rounds: that a canary takes part in.
        groups: of canaries that take turns; one of them is in a round.
    """
    wanted, apart, elements = (2000, 16, 1 << 19) if groups == 1 else (3000, 8, 1 << 23)
    return int(max(2, min(-(-wanted // rounds), 64 * groups, size // apart, elements // size)))
