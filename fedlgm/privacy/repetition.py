"""One release's privacy loss, composed repeatedly with itself for growing numbers of rounds.

Half of the time of such a composition goes into moments that bound its tails and do not depend on the number of
rounds. This module caches them; everything else is `dp_accounting.pld.common.self_convolve`, bit for bit.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft, special

_ORDERS = np.concatenate((np.arange(-20, 0), np.arange(1, 21)))  # of the Chernoff bounds, times the grid's length


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
    return PrivacyLossDistribution(*(_Repeatable.of(pmf) if type(pmf) is DensePLDPmf else pmf for pmf in pmfs))


class _Repeatable(DensePLDPmf):  # type: ignore[misc]
    """Probabilities on a grid of losses."""

    @classmethod
    def of(cls, pmf: Any) -> _Repeatable:
        return cls(pmf._discretization, pmf._lower_loss, pmf._probs, pmf._infinity_mass, pmf._pessimistic_estimate)

    @cached_property
    def _log_moments(self) -> list[tuple[float, float]]:
        """(order, log of the moment generating function there) on the grid's indices."""
        places = np.arange(self.size)
        orders = _ORDERS / self.size
        return [(order, special.logsumexp(places * order, b=self._probs)) for order in orders]

    def _bounds(self, count: int, truncation: float) -> tuple[int, int]:
        """Indices beyond which at most `truncation` of the composition's mass lies."""
        low, high = 0, (self.size - 1) * count
        for order, log_moment in self._log_moments if truncation else ():
            bound = (count * log_moment + math.log(2 / truncation)) / order
            if math.isfinite(bound) and order > 0:
                high = min(high, math.ceil(bound))
            elif math.isfinite(bound):
                low = max(low, math.floor(bound))
        return low, high

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> DensePLDPmf:
        """See `DensePLDPmf.self_compose`."""
        if num_times <= 0:
            raise ValueError(f"num_times must be at least 1, got {num_times}")
        low, high = self._bounds(num_times, tail_mass_truncation)
        length = fft.next_fast_len(max(high - low + 1, self.size))
        around = np.real(fft.ifft(fft.fft(self._probs, length) ** num_times))
        probs = np.array(np.roll(around, -low)[: high - low + 1])
        infinite = tail_mass_truncation - math.expm1(num_times * math.log1p(-self._infinity_mass))
        first = self._lower_loss * num_times + low
        return DensePLDPmf(self._discretization, first, probs, infinite, self._pessimistic_estimate)
