"""Allocation rules, which spread one noise budget over the layers. All rules use one formula.

Every rule minimises sum_j w_j sigma_j^2 subject to sum_j s_j^2 / sigma_j^2 = 1 / sigma_*^2. In the
solution layer j has the budget share p_j proportional to s_j sqrt(w_j) and the noise sigma_j =
sigma_* s_j / sqrt(p_j). The rules differ only in the weights (SNR-consistent allocation paper,
Sections 4.2 and 4.3, Table 1, Appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedlgm.checks import check_non_negative, check_positive
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import users_code
from fedlgm.extension.registration import registers
from fedlgm.extension.registry import Registry

Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function from clip bounds s [K] and layer sizes d [K], both float64, to budget shares [K] >= 0
of any positive sum.
"""

# Unnormalised share s_j * sqrt(w_j), where w_j is the weight in the rule's objective.
_SHARES: Registry[Rule] = Registry(
    "allocation",
    {
        "uniform": lambda s, d: s**2,  # w = s^2: equal noise in every layer
        "sensitivity-proportional": lambda s, d: np.ones_like(s),  # w = 1 / s^2
        "dimension-adjusted": lambda s, d: d,  # w = d^2 / s^2: equal SNR in every layer
        "min-total-noise": lambda s, d: s * np.sqrt(d),  # w = d
        "snr-consistent": lambda s, d: np.sqrt(d),  # w = d / s^2: least sum of 1 / SNR
        # The objective is linear in the shares, so one layer gets the whole budget.
        "max-snr-sum": lambda s, d: np.eye(len(d))[int(np.argmin(d))],
    },
)

MECHANISMS: Registry[Any] = Registry("mechanism")
"""The mechanisms that are not rules, by name. `fedlgm.mechanisms` fills this registry. No rule may
have the same name as one of them.
"""


def names() -> tuple[str, ...]:
    """Names of the known allocation rules.

    Example:
        >>> names()[:3]
        ('uniform', 'sensitivity-proportional', 'dimension-adjusted')
    """
    return _SHARES.names()


@registers
def register(name: str, rule: Rule) -> None:
    """Add an allocation rule for `shares(name, ...)`, and a mechanism of the same name with the
    same options as the mechanisms of bundled rules.

    The workers of a study or of an engine get the rule from this process. In a recipe that other
    people run, name the rule as "package.module:function" instead.

    Args:
        name: a new name.
        rule: function that computes budget shares from public bounds and sizes; see `Rule`.

    Raises:
        ConfigError: the name is taken, or the rule is not a function.

    Example:
        >>> register("by-size", lambda s, d: d**0.75)
        >>> shares("by-size", [1.0, 1.0], [1, 16]).round(3).tolist()
        [0.111, 0.889]
        >>> from fedlgm import mechanisms
        >>> mechanisms.get("by-size", bound=0.5).bound
        0.5
    """
    if not callable(rule):
        raise ConfigError(
            f"allocation {name!r}: a rule must be a function (bounds, sizes) -> shares, got "
            f"{rule!r}"
        )
    MECHANISMS.check_free(name, rule)
    _SHARES.add(name, rule)


def shares(
    strategy: str, clip: Sequence[float] | np.ndarray, dims: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Budget share p_j of each layer, float64 [K], summing to 1.

    Args:
        strategy: one of `names()`, or "package.module:function" of a `Rule`.
        clip: l2 bounds s_j > 0 of one unit's contribution to each layer.
        dims: layer sizes d_j >= 1.

    Raises:
        ConfigError: the strategy is unknown, bounds and sizes do not fit each other, or a rule does
            not return shares.

    >>> shares("dimension-adjusted", [1.0, 1.0], [1, 3]).tolist()
    [0.25, 0.75]
    """
    s, d = np.asarray(clip, dtype=np.float64), np.asarray(dims, dtype=np.float64)
    rule = _SHARES.find(strategy)
    _check_lengths(1, clip=s, dims=d)
    if not 0 < s.min() <= s.max() < np.inf:  # also refuses NaN
        raise ConfigError(f"clip bounds must be finite and positive, got {s.tolist()}")
    if not 1 <= d.min() <= d.max() < np.inf:
        raise ConfigError(f"layer sizes must be finite and at least 1, got {d.tolist()}")
    with users_code(f"allocation {strategy!r}", rule):
        raw = np.asarray(rule(s.copy(), d.copy()), dtype=np.float64)
    if (
        raw.shape != s.shape
        or not np.isfinite(raw).all()
        or (raw < 0).any()
        or not 0 < raw.sum() < np.inf
    ):
        raise ConfigError(
            f"allocation {strategy!r}: a rule must return one finite share of at least 0 per "
            f"layer, and not only zeros, got {raw.tolist()} for {len(s)} layers"
        )
    return raw / raw.sum()


def allocate(
    strategy: str, clip: Sequence[float], dims: Sequence[int], noise_multiplier: float
) -> np.ndarray:
    """Noise standard deviation sigma_j of each layer of the SUM of contributions.

    If `sum of contributions + N(0, sigma_j^2 I)` is released layer by layer, the release costs
    exactly as much as one Gaussian mechanism with noise multiplier `noise_multiplier` under
    add-or-remove-one: sum_j s_j^2 / sigma_j^2 = 1 / noise_multiplier^2.

    Args:
        strategy: one of `names()`.
        clip: l2 bounds s_j > 0 of one unit's contribution to each layer, in the units of the
            update.
        dims: layer sizes d_j >= 1.
        noise_multiplier: sigma_* > 0 of the whole release.

    Returns:
        float64 [K]; `inf` for layers that get no share and must not be released. ("max-snr-sum"
        releases only the smallest layer, or the first of several smallest layers.)

    Raises:
        ConfigError: the strategy is unknown, or an argument is out of range.

    Source: SNR-consistent allocation paper, equations 5 to 12.

    >>> allocate("snr-consistent", [0.6, 0.8], [100, 900], 1.0).round(4).tolist()
    [1.2, 0.9238]
    """
    check_positive(noise_multiplier=noise_multiplier)
    return spread(shares(strategy, clip, dims), clip, noise_multiplier)


def spread(
    share: np.ndarray, clip: Sequence[float] | np.ndarray, noise_multiplier: float
) -> np.ndarray:
    """Noise standard deviations sigma_j = sigma_* s_j / sqrt(p_j) for given budget shares p_j,
    float64 [K].

    Args:
        share: budget shares p_j >= 0, [K], which must sum to 1 for the release to have multiplier
            sigma_*.
        clip: l2 bounds s_j of one unit's contribution to each layer, [K].
        noise_multiplier: sigma_* of the whole release.

    Returns:
        sigma_j of the SUM of contributions; `inf` for layers with p_j = 0, which must not be
        released.

    Raises:
        ConfigError: the multiplier is negative or not finite, or the lists have different lengths.

    >>> spread(np.array([0.75, 0.25]), [1.0, 1.0], 1.0).round(4).tolist()
    [1.1547, 2.0]
    """
    check_non_negative(noise_multiplier=noise_multiplier)
    s, p = np.asarray(clip, dtype=np.float64), np.asarray(share, dtype=np.float64)
    _check_lengths(0, clip=s, share=p)
    with np.errstate(divide="ignore"):
        return np.asarray(noise_multiplier * s / np.sqrt(p))


def effective_multiplier(
    clip: Sequence[float] | np.ndarray, sigma: Sequence[float] | np.ndarray
) -> float:
    """Noise multiplier sigma_eff = (sum_j s_j^2 / sigma_j^2)^(-1/2) of the Gaussian mechanism that
    is equivalent to this release.

    Division of each layer by sigma_j (whitening) turns the release into a Gaussian mechanism of
    this multiplier. The equivalence also holds in RDP, PLD and GDP accounting and under Poisson
    sampling. If a layer has s_j > 0 and sigma_j = 0, the result is 0, which means no privacy.

    Args:
        clip: l2 bounds s_j >= 0 of one unit's contribution to each layer, [K].
        sigma: noise standard deviations sigma_j >= 0 of the sum, [K]; `inf` for layers that are not
            released.

    >>> effective_multiplier([3.0, 4.0], [5.0, 5.0])
    1.0
    """
    s, sigma_ = np.asarray(clip, dtype=np.float64), np.asarray(sigma, dtype=np.float64)
    _check_lengths(0, clip=s, sigma=sigma_)
    used = s > 0
    if not used.any():
        return float("inf")
    with np.errstate(divide="ignore"):
        precision = float(np.sum((s[used] / sigma_[used]) ** 2))
    return float("inf") if precision == 0 else precision**-0.5


def floor_digits(value: float, digits: int) -> float:
    """Round `value` >= 0 down to `digits` significant digits.

    >>> floor_digits(2 / 3, 4)
    0.6666
    """
    if value == 0 or math.isinf(value):
        return value
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.floor(value * scale) / scale


def _check_lengths(least: int, **vectors: np.ndarray) -> None:
    """Require that both arrays are vectors of the same length, which is at least `least`."""
    (first, left), (second, right) = vectors.items()
    if left.ndim != 1 or left.shape != right.shape or left.size < least:
        raise ConfigError(
            f"{first} and {second} must be two equally long lists, got shapes {left.shape} and "
            f"{right.shape}"
        )
