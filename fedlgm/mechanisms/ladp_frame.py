"""The setting in which the LaDP-FL paper compares mechanisms: its noise constant, sensitivity and
accounting.

The rest of the library does not rely on this setting. For a mechanism that uses it, the ledger
records two charges: the charge that the paper claims and the proven charge.
"""

from __future__ import annotations

import math
from typing import Literal

from fedlgm.checks import check_positive, check_share
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.planning.facts import LocalTraining, RunFacts
from fedlgm.privacy.gaussian import gaussian_delta

Constant = Literal["theorem3", "classical"]


def theorem3_constant(epsilon: float, delta: float) -> float:
    """Return the constant c/B of the noise sigma = c Delta_f / (epsilon P). For the largest score P
    = B, sigma / Delta_f = (c/B) / epsilon.

    The theorem claims that a release with this noise is (epsilon, delta)-DP. This claim is false
    for small delta, because the proof solves t >= sqrt(L) / 2 instead of t >= sqrt(L).
    `theorem3_delta` gives the delta that the noise achieves.

    Args:
        epsilon: budget of one release, > 0.
        delta: delta of this budget, in (0, 1).

    Raises:
        ConfigError: an argument is outside its range.

    Source: LaDP-FL paper, Theorem 3, equation 11.
    """
    _check(epsilon, delta)
    if delta <= math.sqrt(2 / (math.pi * math.e**4)):
        log = math.log(2 / (math.pi * delta**2))
        return (math.sqrt(log) + math.sqrt(log + 8 * epsilon)) / 4
    return (1 + math.sqrt(1 + 2 * epsilon)) / 2


def theorem3_delta(epsilon: float, delta: float) -> float:
    """Return the exact delta at `epsilon` of the noise that Theorem 3 prescribes for (epsilon,
    delta).
    """
    return gaussian_delta(epsilon / theorem3_constant(epsilon, delta), epsilon)


def noise_constant(kind: Constant, epsilon: float, delta: float) -> float:
    """Return the constant c of sigma = c Delta / epsilon: that of `theorem3_constant`, or for
    "classical" sqrt(2 ln(1.25 / delta)).

    Raises:
        PrivacyError: the constant does not give an (epsilon, delta)-DP release of sensitivity
            Delta.
    """
    _check(epsilon, delta)
    value = (
        theorem3_constant(epsilon, delta)
        if kind == "theorem3"
        else math.sqrt(2 * math.log(1.25 / delta))
    )
    reached = gaussian_delta(epsilon / value, epsilon)
    if reached > delta:
        raise PrivacyError(
            f"constant = {kind!r} is false at (epsilon, delta) = ({epsilon:g}, {delta:g}): its "
            f"noise reaches only delta = {reached:.3g}; use the other constant, a larger delta, or "
            "calibration = 'equal-total'"
        )
    return value


def bound_by_training(training: LocalTraining) -> float:
    """Return half of the paper's sensitivity Delta_f, a bound on the distance between a client's
    model and the global model.

    Every step moves the weights by at most eta G_c. The paper counts one step per epoch, so Delta_f
    = 2 eta E G_c (Theorem 2). If an epoch has several steps, this value is too small.

    Args:
        training: local training, which must be plain SGD with clipped gradients.

    Raises:
        ConfigError: gradients are not clipped, or the optimizer is not plain SGD, so eta G_c does
            not bound a step.
    """
    if training.gradient_clip is None:
        raise ConfigError(
            "training.gradient_clip (the paper's G_c) is needed: the paper's sensitivity depends "
            "on it; a Flower app states it, as in PrivateFedAvg(training=fedlgm.LocalTraining("
            "lr=..., epochs=..., gradient_clip=...))"
        )
    if training.optimizer != "sgd" or training.momentum or training.weight_decay is not None:
        raise ConfigError(
            "the paper's sensitivity holds for training.optimizer = 'sgd' without momentum and "
            "weight decay only"
        )
    return training.lr * training.epochs * training.gradient_clip


def require(facts: RunFacts, owner: str) -> RunFacts:
    """Check that the run's facts fit the mechanisms of the paper's setting, and return the facts.

    Raises:
        ConfigError: there is no budget, or the trust is not local.
    """
    facts.budget()
    if facts.trust != "local":
        raise ConfigError(
            f"{owner}: in the paper's frame the clients add the noise: set privacy.trust = 'local'"
        )
    return facts


def _check(epsilon: float, delta: float) -> None:
    check_positive(epsilon=epsilon)
    check_share(delta=delta)
