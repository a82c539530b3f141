"""The cost of many past releases and one further release, for ledgers with many kinds of
releases.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dp_accounting import dp_event

from fedlgm.privacy.accountants import new_accountant, quiet
from fedlgm.privacy.accounting import LOST, composed_epsilon, is_resolved
from fedlgm.privacy.events import decode, encode, is_private, unfold_event

FEW = 8
"""Largest number of different events at which all releases are composed anew for every epsilon."""
_GRIDS = 4
"""Number of grids that are stored. A further release with little noise needs a coarser grid."""
_MOST_LOST = 0.1
"""Largest share of delta that may be subtracted for the rounding of grids."""
_ADDED = (dp_event.GaussianDpEvent, dp_event.PoissonSampledDpEvent)


class Past:
    """Charged releases, composed once. Releases that were charged later are added to this
    composition.

    The epsilons are upper bounds, like those of `composed_epsilon`, and differ from them by the
    rounding of the grid's sums. With very many releases, a bound on the rounding error of grids is
    subtracted from delta. Epsilon may then be larger than the epsilon by RDP.

    Example:
        >>> from fedlgm.privacy.events import gaussian_event
        >>> charged = [(gaussian_event(1.0 + i / 100, 0.1), 10) for i in range(4)]
        >>> one, past = gaussian_event(2.0, 0.1), Past()
        >>> round(past.epsilon(charged, 1e-5, one) / composed_epsilon([*charged, (one, 1)], 1e-5), 6)
        1.0
    """

    def __init__(self) -> None:
        self._composed: dict[float, tuple[Counter[str], Any]] = {}  # by grid step

    def epsilon(
        self,
        charged: Iterable[tuple[dp_event.DpEvent, int]],
        delta: float,
        further: dp_event.DpEvent | None = None,
        accountant: str = "pld",
    ) -> float:
        """Epsilon at `delta` of all charged releases, and of one further release if given.

        Args:
            charged: pairs (event, number of releases). If no number has decreased since the last
                call, only the new releases are composed.
            delta: in [0, 1).
            further: event of the further release.
            accountant: "pld" or "rdp"; Renyi divergences are summed again in every call, which
                takes hardly any time.
        """
        charged = [unfold_event(event, count) for event, count in charged]
        extra = [] if further is None else [unfold_event(further, 1)]
        events = [*charged, *extra]
        many = len({json.dumps(encode(event)) for event, _ in events}) > FEW
        added = all(isinstance(event, _ADDED) and is_private(event) for event, _ in events)
        lost = 0.0 if is_resolved(events, delta) else LOST * sum(count for _, count in events)
        if not (many and added and accountant == "pld" and lost <= _MOST_LOST * delta):
            return composed_epsilon(events, delta, accountant)
        # all Gaussian releases without sampling together are one such release
        precision, counts = 0.0, Counter[str]()
        for event, count in charged:
            if isinstance(event, dp_event.GaussianDpEvent):
                precision += count / event.noise_multiplier**2
            else:
                counts[json.dumps(encode(event))] += count
        with quiet():
            total = self._grow_accountant(
                counts, new_accountant(accountant, [event for event, _ in events])
            ).branch()
            for event, count in extra:
                if isinstance(event, dp_event.GaussianDpEvent):
                    precision += count / event.noise_multiplier**2
                else:
                    total.compose(event, count)
            if precision:
                total.compose(dp_event.GaussianDpEvent(math.sqrt(1 / precision)))
            return float(total.get_epsilon(delta - lost))

    def _grow_accountant(self, counts: Counter[str], empty: Any) -> Any:
        """The accountant of these releases: the last accountant plus the releases added since, or a
        new accountant.
        """
        fineness = empty._value_discretization_interval
        before, accountant = self._composed.pop(fineness, (Counter[str](), empty))
        if not before <= counts:
            before, accountant = Counter[str](), empty
        for kind, count in (counts - before).items():
            accountant.compose(decode(json.loads(kind)), count)
        self._composed[fineness] = counts, accountant
        if len(self._composed) > _GRIDS:
            del self._composed[next(iter(self._composed))]  # least recently used
        return accountant
