"""Faster self-composition of one release's privacy loss, for growing numbers of rounds.

`dp_accounting` spends half of the time of such a composition on 40 moments, which bound its tails
and do not depend on the number of rounds. This module computes only the few decisive moments
exactly, and only once. The result equals the result of `dp_accounting.pld.common.self_convolve`,
bit for bit.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft, special
from typing_extensions import override

# orders of the Chernoff bounds, multiplied by the grid's length
_ORDERS = np.concatenate((np.arange(-20, 0), np.arange(1, 21)))


def repeatable(single: PrivacyLossDistribution) -> PrivacyLossDistribution:
    """The same distribution, with faster repeated self-composition.

    Example:
        >>> from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
        >>> once = from_gaussian_mechanism(1.0, sampling_prob=0.1, value_discretization_interval=1e-3)
        >>> often = repeatable(once)
        >>> often.self_compose(9).get_epsilon_for_delta(1e-5) == once.self_compose(9).get_epsilon_for_delta(1e-5)
        True
    """
    pmfs = [single._pmf_remove] if single._symmetric else [single._pmf_remove, single._pmf_add]
    return PrivacyLossDistribution(
        *(_Repeatable.of(pmf) if type(pmf) is DensePLDPmf else pmf for pmf in pmfs)
    )


def compose_with(
    before: PrivacyLossDistribution, more: PrivacyLossDistribution
) -> PrivacyLossDistribution:
    """The result of `before.compose(more)`, computed faster if nothing was composed before.

    Example:
        >>> from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism, identity
        >>> nothing = identity(1e-3)
        >>> once = from_gaussian_mechanism(1.0, value_discretization_interval=1e-3)
        >>> both = (compose_with(nothing, once), nothing.compose(once))
        >>> len({one.get_epsilon_for_delta(1e-5) for one in both})
        1
    """
    pmfs = [more._pmf_remove] if more._symmetric else [more._pmf_remove, more._pmf_add]
    first = before._pmf_remove
    # Beside a small probability of an infinite loss, the other probability may be rounded to 1.
    nothing = getattr(first, "_loss_probs", None) == {0: 1.0} and first._infinity_mass == 0
    if not (nothing and before._symmetric) or any(type(pmf) is not DensePLDPmf for pmf in pmfs):
        return before.compose(more)
    return PrivacyLossDistribution(*map(_cut, pmfs))


def _cut(pmf: DensePLDPmf, truncation: float = 1e-15) -> DensePLDPmf:
    """The distribution without the tails that `DensePLDPmf.compose` cuts off: the lower tail
    becomes the least loss, and the upper tail becomes an infinite loss.
    """
    from_below, from_above = (
        np.append(np.add.accumulate(probs) > truncation / 2, True).argmax()
        for probs in (pmf._probs, pmf._probs[::-1])
    )
    end = max(pmf.size - from_above, from_below + 1)
    probs = pmf._probs[from_below:end].copy()
    probs[0] += pmf._probs[:from_below].sum()
    infinite = pmf._infinity_mass + pmf._probs[end:].sum()
    return DensePLDPmf(
        pmf._discretization, pmf._lower_loss + int(from_below), probs, infinite, True
    )


class _Repeatable(DensePLDPmf):  # type: ignore[misc]
    """Privacy losses on a grid, with a cache of moments for repeated composition."""

    @classmethod
    def of(cls, pmf: Any) -> _Repeatable:
        return cls(
            pmf._discretization,
            pmf._lower_loss,
            pmf._probs,
            pmf._infinity_mass,
            pmf._pessimistic_estimate,
        )

    @cached_property
    def _rough(self) -> np.ndarray:
        """Logarithms of the moment generating function at all orders, accurate to about 1e-13."""
        sums = []
        for step in (
            np.exp(-np.arange(self.size) / self.size),
            np.exp(np.arange(self.size) / self.size),
        ):
            weighted = self._probs
            for _ in range(20):
                weighted = weighted * step
                sums.append(weighted.sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log([*sums[19::-1], *sums[20:]])

    @cached_property
    def _exact(self) -> dict[int, float]:
        """Cache of logarithms of the moment generating function, as `dp_accounting` computes them,
        by the index of the order.
        """
        return {}

    def _log_moment(self, place: int) -> float:
        if place not in self._exact:
            exponents = np.arange(self.size) * (_ORDERS[place] / self.size)
            self._exact[place] = special.logsumexp(exponents, b=self._probs)
        return self._exact[place]

    def _bounds(self, count: int, truncation: float) -> tuple[int, int]:
        """Indices beyond which at most `truncation` of the composition's mass lies."""
        low, high = 0, (self.size - 1) * count
        if not truncation:
            return low, high
        orders = _ORDERS / self.size
        # Chernoff: P(S >= b) <= M(t)^n exp(-t b), solved for b at half of the truncated mass.
        rough = (count * self._rough + math.log(2 / truncation)) / orders
        reach = 1 + 1e-11 * count * self.size  # far more than the error of the rough bounds
        rising, finite = orders > 0, np.isfinite(rough)
        least = rough[rising & finite].min(initial=math.inf) + reach
        most = rough[~rising & finite].max(initial=-math.inf) - reach
        for place in np.flatnonzero(
            ~finite | np.where(rising, rough <= least, rough >= most)
        ).tolist():
            bound = (count * self._log_moment(place) + math.log(2 / truncation)) / orders[place]
            if math.isfinite(bound) and rising[place]:
                high = min(high, math.ceil(bound))
            elif math.isfinite(bound):
                low = max(low, math.floor(bound))
        return low, high

    @override
    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> DensePLDPmf:
        if num_times <= 0:
            raise ValueError(f"num_times must be at least 1, got {num_times}")
        low, high = self._bounds(num_times, tail_mass_truncation)
        length = fft.next_fast_len(max(high - low + 1, self.size))
        # A power of the transform is the n-fold convolution, wrapped around the length.
        around = np.real(fft.ifft(fft.fft(self._probs, length) ** num_times))
        probs = np.array(np.roll(around, -low)[: high - low + 1])
        # 1 - (1 - p)^n, and the truncated mass, which counts as an infinite loss.
        infinite = tail_mass_truncation - math.expm1(num_times * math.log1p(-self._infinity_mass))
        first = self._lower_loss * num_times + low
        return DensePLDPmf(self._discretization, first, probs, infinite, self._pessimistic_estimate)
