"""Audits a run by its canaries, with bounds from complete releases and from single layers, and with
checks of the noise.

The level of such an audit is divided among all statements that can make it fail (see `level`).
"""

from __future__ import annotations

import math

import numpy as np

from fedlgm import privacy
from fedlgm.checks import check_known
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR
from fedlgm_lab.audits import bounds
from fedlgm_lab.audits.gaussian_scores import NoiseSeen, noise_ratio
from fedlgm_lab.audits.noise_checks import noise_checks, shares_of
from fedlgm_lab.audits.record import CanaryRecord
from fedlgm_lab.audits.result import AuditResult, LayerRow, Method, Reported
from fedlgm_lab.audits.scores import CONFIDENCE, Scores
from fedlgm_lab.audits.whole_run import audit_whole_run, repeat_last

_MOST_LEVELS = 8  # largest number of different noise levels that are composed one by one


def audit_record(
    record: CanaryRecord,
    layers: LayerTable,
    reported: Reported,
    *,
    method: Method = "one-run-gaussian",
    confidence: float = CONFIDENCE,
    per_layer: bool = True,
) -> AuditResult:
    """Audit a run from its canaries' observations.

    Args:
        record: the canaries' observations (`Canaries.record`). Bounds on single releases
            ("one-run-gaussian") need records with presence = "release". Bounds on whole runs
            ("one-run") need records with presence = "run".
        layers: the layers that were released.
        reported: the run's reported figures.
        method: with "one-run-gaussian", canary-aligned sums bound the signal-to-noise ratio of
            single releases, and the accountant composes the releases at this ratio; with "one-run",
            guesses are made from each canary's score over the whole run.
        confidence: confidence of the whole audit. With at least this probability, releases that are
            as reported pass and `epsilon_lower` is at most the true epsilon. The level 1 -
            confidence is divided among the bounds and checks (see `level.Shares`).
        per_layer: whether single layers are examined. If not, a faster accountant is used, and the
            bound is a thousandth smaller.

    Raises:
        ConfigError: the record does not fit the method, or there are too few canaries.
    """
    if reported.run is not None:
        if method not in ("one-run-gaussian", "auto"):
            raise ConfigError(
                f"{method} is for runs whose rounds are charged one by one: use 'one-run-gaussian'"
            )
        return audit_whole_run(record, layers, reported, reported.run, confidence, per_layer)
    if method in ("one-run-gaussian", "auto"):
        return _audit_releases(record, layers, reported, confidence, per_layer)
    check_known("method for a run", method, Method)
    if record.presence != "run":
        raise ConfigError(
            f"{method} needs canaries that are in or out of the whole run; these canaries "
            "have a coin for each round"
        )
    return _audit_run(record, reported, confidence)


def epsilon_at_ratio(
    reported: Reported, signals: np.ndarray, ratio: float, *, quick: bool = False
) -> float:
    """Compute the epsilon of releases whose noise is the plan's noise divided by `ratio`.

    Args:
        reported: reported figures, of which the rate, the relation and the delta are used.
        signals: planned mu of each release, [T]; 0 where nothing was released.
        ratio: signal-to-noise ratio divided by the planned ratio.
        quick: whether to compute on a grid ten times as coarse, at a tenth of the cost, and to
            subtract a thousandth of the result. The epsilon on this grid is at most 1e-4 too large.
    """
    if ratio <= 0 or not (signals > 0).any():
        return 0.0
    if math.isinf(ratio):
        return math.inf
    levels, counts = np.unique(signals[signals > 0], return_counts=True)
    if len(levels) > _MOST_LEVELS:
        # releases that all have the lowest level have at most the epsilon of the actual releases
        levels, counts = np.array([float(levels.min())]), np.array([int(counts.sum())])
    factor = SENSITIVITY_FACTOR[reported.relation]
    events = [
        (
            privacy.events.gaussian_event(1.0 / (float(level) * ratio * factor), reported.rate),
            int(count),
        )
        for level, count in zip(levels, counts, strict=True)
    ]
    if not quick or reported.rate == 1:
        return privacy.accounting.composed_epsilon(events, reported.delta)
    return privacy.accounting.quick_epsilon(events, reported.delta)


def _layer_signals(record: CanaryRecord, reported: Reported, layer: int) -> np.ndarray:
    """Compute s_j / sigma_j of a layer in every release; for releases in which no canary took part,
    from the layer's share in the last release in which canaries took part.
    """
    share = record.layer_signal[:, layer] * record.multipliers
    return repeat_last(share, len(reported.multipliers)) / reported.multipliers


def release_ratio(
    record: CanaryRecord, layers: LayerTable, confidence: float = CONFIDENCE
) -> float:
    """Bound from below the releases' signal-to-noise ratio divided by the planned ratio.

    See `noise_ratio`.
    """
    squared = np.sum(record.weights**2 * record.length, axis=1)
    length = math.sqrt(float(np.sum(squared / record.multipliers**2)))
    noise = NoiseSeen.of_layers(record.energy, record.weights, layers.sizes, length)
    planned = record.signs / record.multipliers[:, None]
    return noise_ratio(record.aligned.ravel(), planned.ravel(), confidence, noise)


def layer_ratio(
    record: CanaryRecord, layer: int, size: int, confidence: float = CONFIDENCE
) -> float:
    """Bound from below the signal-to-noise ratio of one layer of `size` coordinates, divided by the
    planned ratio; 0 if the layer was never released.
    """
    seen = np.flatnonzero(record.layer_signal[:, layer] > 0)
    if len(seen) == 0:
        return 0.0
    share = record.layer_signal[seen, layer, None]
    noise = NoiseSeen.of_layers(
        record.energy[seen, layer, None],
        np.ones_like(share),
        np.array([size]),
        math.sqrt(float(np.sum(share**2 * record.length[seen, layer, None]))),
    )
    planned = record.signs[seen] * share
    return noise_ratio(
        record.layer_aligned[seen, :, layer].ravel(), planned.ravel(), confidence, noise
    )


def _audit_releases(
    record: CanaryRecord, layers: LayerTable, reported: Reported, confidence: float, per_layer: bool
) -> AuditResult:
    count = len(layers) if per_layer else 0
    shares = shares_of(record, confidence, per_layer=per_layer)
    signals = 1.0 / reported.multipliers
    ratio = release_ratio(record, layers, 1 - shares.whole)
    epsilon = epsilon_at_ratio(reported, signals, ratio, quick=not per_layer)
    rows = []
    for j in range(count):
        signals = _layer_signals(record, reported, j)
        size = int(layers.sizes[j])
        layer_epsilon = epsilon_at_ratio(
            reported, signals, layer_ratio(record, j, size, 1 - shares.layer), quick=True
        )
        planned = epsilon_at_ratio(reported, signals, 1.0, quick=True)
        rows.append(LayerRow(layers.names[j], size, layer_epsilon, planned))
    inside, outside = np.abs(record.signs) > 0, record.signs == 0
    turned = record.aligned * record.orientation
    checks, scores = (
        noise_checks(record, layers, shares),
        {"inside": turned[inside], "outside": turned[outside]},
    )
    return reported.audited(
        "one-run-gaussian",
        epsilon,
        confidence,
        scores,
        record.aligned.size,
        layers=rows,
        checks=checks,
    )


def run_scores(record: CanaryRecord) -> Scores:
    """Compute every canary's log-likelihood ratio of "in the run" against "not in the run".

    A canary's score depends only on the releases (and on public plans). It is the sum over the
    rounds of ln(1 - q + q exp(mu x - mu^2 / 2)), with x the round's canary-aligned sum.
    """
    mu = record.signal[:, None]
    exponent = mu * record.raw * record.orientation - mu**2 / 2
    with np.errstate(divide="ignore"):
        total = np.sum(np.logaddexp(math.log1p(-record.rate) if record.rate < 1 else -np.inf,
                                    math.log(record.rate) + exponent), axis=0)  # fmt: skip
    return Scores(total[record.member], total[~record.member])


def _audit_run(record: CanaryRecord, reported: Reported, confidence: float) -> AuditResult:
    count = record.signs.shape[1]
    needed = bounds.canaries_needed("one-run", 0.0, reported.delta, confidence)
    if count < needed:
        raise ConfigError(
            f"{count} canaries are too few for a confidence of {confidence:g}: one-run needs at "
            f"least {needed} to show anything; use more canaries or a lower confidence"
        )
    scores = run_scores(record)
    lower = bounds.epsilon_one_run(scores, reported.delta, confidence)
    return reported.audited("one-run", lower, confidence, vars(scores), count)
