"""Bounds from canaries in a run whose rounds are one mechanism: correlated noise, restricted
participation, or both.

If the releases are as planned, the whitened release of round t along canary i consists of the
canary's contribution (C s_i)_t times the bound, with s_i its signs over the rounds, and Gaussian
noise of standard deviation 1 that is independent over rounds, layers and orthogonal directions. The
audit uses one of two bounds:

* A bound from the observations of every canary in every round, as if each round were a separate
  release. This bound is tight. It is valid if whitening makes the noise white, which a check tests.
* If that check fails, a bound from one sum per canary, along the canary's effect on all rounds.
  This sum is the adversary's best test, and the bound is valid for any Gaussian noise. For a sound
  run the bound is used only if the check fails by chance, so the bound needs no separate level.

Both are lower bounds on the quotient of the actual and the planned signal-to-noise ratio. The audit
reports the epsilon of the run with its noise divided by the bound. The audit assumes that
participation and sampling are as planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR
from fedlgm.privacy.whole_run import WholeRun
from fedlgm_lab.audits.gaussian_scores import NoiseSeen, noise_ratio, seen_degrees
from fedlgm_lab.audits.noise_checks import noise_checks, shares_of
from fedlgm_lab.audits.record import CanaryRecord
from fedlgm_lab.audits.result import AuditResult, LayerRow, Reported
from fedlgm_lab.audits.scores import Array, Counts, Flags
from fedlgm_lab.audits.whitening import whiten, whitenable


def audit_whole_run(
    record: CanaryRecord,
    layers: LayerTable,
    reported: Reported,
    run: WholeRun,
    confidence: float,
    per_layer: bool,
) -> AuditResult:
    """Audit a run whose rounds are one mechanism.

    See `one_run.audit_record` for the arguments, and docs/how-to/audit.md for audits of whole runs.

    Raises:
        ConfigError: there are fewer consecutive releases than whitening needs, or too few canaries.
    """
    view = View.of(record, run)
    count, shares = len(layers), shares_of(record, confidence, per_layer=per_layer)
    checks = noise_checks(record, layers, shares)
    white = next(check.passed for check in checks if check.name == "noise independence")
    ratio = (view.ratio if white else view.sums_ratio)(layers, 1 - shares.whole)
    epsilon = run_epsilon(
        run, 1.0 / reported.multipliers, ratio, reported.delta, quick=not per_layer
    )
    rows = []
    for j in range(count if per_layer else 0):
        signals = view.shares[:, j]
        layer_ratio = view.layer_ratio(j, int(layers.sizes[j]), 1 - shares.layer) if white else 0.0
        rows.append(
            LayerRow(
                layers.names[j],
                int(layers.sizes[j]),
                run_epsilon(run, signals, layer_ratio, reported.delta, quick=True),
                run_epsilon(run, signals, 1.0, reported.delta, quick=True),
            )
        )
    sums, up = view.sums, view.signs > 0
    scores = {"inside": sums[up], "outside": -sums[~up]}
    return reported.audited(
        "one-run-gaussian",
        epsilon,
        confidence,
        scores,
        view.observations,
        layers=rows,
        checks=checks,
    )


def run_epsilon(
    run: WholeRun, signals: Array, ratio: float, delta: float, *, quick: bool = False
) -> float:
    """Compute the epsilon of a run whose noise is the plan's noise divided by `ratio`, for a client
    in the group with the largest cost.

    Args:
        run: the run.
        signals: a client's bound in units of the noise z in each round, [T] or fewer (the last
            value is then repeated).
        ratio: signal-to-noise ratio divided by the planned ratio.
        delta: delta of the epsilon.
        quick: whether to compose sampled releases at a tenth of the cost, and to subtract a
            thousandth of the result.

    Example:
        >>> from fedlgm import correlation
        >>> from fedlgm.planning.facts import Sampling
        >>> run = WholeRun(correlation.get("banded", 16, bands=4), Sampling("cyclic", 400, 0.25, 4), "add-remove")
        >>> shown = run_epsilon(run, np.full(16, 0.5), 1.0, 1e-5)
        >>> abs(shown - privacy.gaussian_epsilon(0.5 * run.sensitivity, 1e-5)) < 1e-9
        True
    """
    rounds, b = run.noise.rounds, run.separation
    signals = repeat_last(signals, rounds)
    if ratio <= 0 or not (signals > 0).any():
        return 0.0
    if np.isinf(ratio):
        return float("inf")
    scaled = signals * ratio * SENSITIVITY_FACTOR[run.relation]
    # no group takes part more often, or moves the release more, than the first group
    if run.sampling.amplifies:
        shifts = (scaled * run.noise.column_norms())[::b]
        events = [
            (
                privacy.events.gaussian_event(1.0 / float(shift), run.sampling.within_group),
                int(times),
            )
            for shift, times in zip(*np.unique(shifts[shifts > 0], return_counts=True), strict=True)
        ]
        if quick:
            return privacy.accounting.quick_epsilon(events, delta)
        return privacy.accounting.composed_epsilon(events, delta)
    groups = (np.arange(rounds)[:, None] % b == np.arange(min(b, rounds))).astype(np.float64)
    shift = float(np.linalg.norm(whiten(run.noise, scaled[:, None] * groups), axis=0).max())
    return privacy.gaussian_epsilon(shift, delta)


def repeat_last(values: Array, rounds: int) -> Array:
    """Extend figures of the first rounds [t] to all rounds [T] by repeating the last figure.

    Example:
        >>> repeat_last(np.array([1.0, 2.0]), 4), repeat_last(np.array([1.0, 2.0]), 1)
        (array([1., 2., 2., 2.]), array([1.]))
    """
    return np.pad(values[:rounds], (0, max(0, rounds - len(values))), mode="edge")


@dataclass(frozen=True)
class View:
    """The canaries' view of the whitened releases, from the first round on.

    Attributes:
        seen: canary-aligned sums of each layer, [T, m, K]; 0 where they cannot be whitened.
        planned: means of these sums under the plan, [T, m, K].
        orientation: sign of each canary's contributions, 0 for a canary that never takes part, [m].
        shares: bound of each layer divided by its noise scale, [T, K]; 0 where not released.
        known: where `seen` is known, bool [T, K].
        energy: mean square of the whitened noise divided by the planned mean square, [T, K]; NaN
            where the noise was not observed completely, as in the first rounds after a run was
            continued.

    Example:
        >>> from fedlgm import LayerTable, RunFacts, Sampling, correlation, mechanisms
        >>> from fedlgm_lab.audits.audit import reported_of, watch
        >>> from fedlgm_lab.audits.subject import Subject
        >>> from fedlgm.mechanisms.method import Method
        >>> from fedlgm.planning import charging
        >>> sampling, noise = Sampling("cyclic", 40, 0.5, 2), correlation.get("banded", 4, bands=2)
        >>> facts = RunFacts(0.0, sampling, rounds=4, epsilon=4.0, delta=1e-5, noise=noise)
        >>> layers = LayerTable.from_sizes({"all": 200})
        >>> subject = Subject("run", Method.calibrate(mechanisms.get("gaussian"), layers, facts))
        >>> run = charging.of(subject.facts).run
        >>> View.of(watch(subject, 50, "release", seed=1), run).observations  # rounds, times canaries
        200
    """

    seen: Array
    planned: Array
    orientation: Array
    shares: Array
    known: Flags
    energy: Array

    @classmethod
    def of(cls, record: CanaryRecord, run: WholeRun) -> View:
        """Whiten the observations of a record over its rounds.

        Raises:
            ConfigError: there are fewer consecutive releases than whitening needs.
        """
        at = record.round.astype(int) - 1
        rounds, (count, layers) = int(at.max()) + 1, record.layer_aligned.shape[1:]
        seen, shares = np.full((rounds, count, layers), np.nan), np.zeros((rounds, layers))
        signs, energy = np.zeros((rounds, count)), np.full((rounds, layers), np.nan)
        seen[at], shares[at], signs[at], energy[at] = (
            record.layer_aligned, record.layer_signal, record.signs, record.energy,
        )  # fmt: skip
        noise = run.noise
        released = ~np.isnan(seen[:, 0])
        flags = np.stack([whitenable(noise, released[:, j]) for j in range(layers)], axis=1)
        if not flags.any():
            raise ConfigError(
                "no round's noise can be whitened, because the rounds on which it depends released "
                "nothing"
            )
        mask = flags[:, None].astype(np.float64)
        return cls(
            whiten(noise, np.nan_to_num(seen)) * mask,
            whiten(noise, shares[:, None] * signs[:, :, None]) * mask,
            np.sign(signs.sum(axis=0)),
            shares,
            flags,
            energy,
        )

    @property
    def observations(self) -> int:
        """Number of known observations: rounds times canaries."""
        return int(np.any(self.known, axis=1).sum()) * self.seen.shape[1]

    def layer_ratio(self, layer: int, size: int, confidence: float) -> float:
        """Bound from below a layer's signal-to-noise ratio divided by the planned ratio; 0 if the
        layer was never observed.
        """
        at = self.known[:, layer]
        seen, planned = self.seen[at, :, layer], self.planned[at, :, layer]
        if not (planned != 0).any():
            return 0.0
        noise = _noise_seen(
            self.energy[at, layer, None], np.ones((at.sum(), 1)), np.array([size]), seen.shape[1]
        )
        return noise_ratio(seen.ravel(), planned.ravel(), confidence, noise)

    def ratio(self, layers: LayerTable, confidence: float) -> float:
        """Bound from below the signal-to-noise ratio of all layers together, divided by the planned
        ratio, from every canary in every round.
        """
        weights = self._weights()
        at = weights.any(axis=1)
        seen, planned = (
            np.einsum("tmk,tk->tm", values[at], weights[at]) for values in (self.seen, self.planned)
        )
        noise = _noise_seen(self.energy[at], weights[at], layers.sizes, seen.shape[1])
        return noise_ratio(seen.ravel(), planned.ravel(), confidence, noise)

    @property
    def sums(self) -> Array:
        """Sum of the observations along each canary's effect on the whole run, with noise N(0, 1),
        for the canaries that took part, [m] or fewer.
        """
        return np.sum(self.planned * self.seen, axis=(0, 2))[self._taking_part] / self.planned_sums

    @property
    def planned_sums(self) -> Array:
        """Means of `sums` under the plan."""
        return np.sqrt(np.sum(self.planned**2, axis=(0, 2)))[self._taking_part]

    @property
    def signs(self) -> Array:
        """Signs of the contributions of the canaries in `sums`; the sums have positive means."""
        return self.orientation[self._taking_part]

    @cached_property
    def _taking_part(self) -> Flags:
        return (self.planned != 0).any(axis=(0, 2))

    def sums_ratio(self, layers: LayerTable, confidence: float) -> float:
        """Bound from below the signal-to-noise ratio of `sums`, divided by the planned ratio; 0 for
        too few canaries.
        """
        sums, planned, weights = self.sums, self.planned_sums, self._weights()
        overlap = np.sum(weights**4 / layers.sizes, axis=1)[weights.any(axis=1)].mean(keepdims=True)
        degrees = seen_degrees(overlap, len(sums))
        return 0.0 if degrees < 1 else noise_ratio(sums, planned, confidence, NoiseSeen(degrees))

    def _weights(self) -> Array:
        """Compute the weight of each layer in a round, [T, K]; zeros where nothing is known."""
        weights = self.shares * self.known
        lengths = np.linalg.norm(weights, axis=1, keepdims=True)
        return np.divide(weights, lengths, out=np.zeros_like(weights), where=lengths > 0)


def _noise_seen(energy: Array, weights: Array, sizes: Counts, canaries: int) -> NoiseSeen:
    """Describe the noise of the rounds in which it was observed completely; if there are no such
    rounds, the noise in the canary-aligned sums.
    """
    complete = np.all((weights == 0) | ~np.isnan(energy), axis=1)
    if complete.any():
        return NoiseSeen.of_layers(energy[complete], weights[complete], sizes)
    return NoiseSeen(seen_degrees(np.sum(weights**4 / sizes, axis=1), canaries))
