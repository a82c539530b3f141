"""The cost of a long past and one further release, for ledgers with many kinds of releases."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dp_accounting import dp_event

from fedlgm.privacy.accountants import new_accountant, quiet
from fedlgm.privacy.accounting import composed_epsilon, is_resolved
from fedlgm.privacy.events import decode, encode, is_private

FEW = 8
"""Number of kinds of releases that are composed afresh for every figure."""
_ADDED = (dp_event.GaussianDpEvent, dp_event.PoissonSampledDpEvent)


class Past:
    """Releases that were charged, composed once; those charged since are added, and not composed again.

    Figures are upper bounds, as those of `composed_epsilon`, from which they differ by the rounding of the grid's sums.

    Example:
        >>> from fedlgm.privacy.events import gaussian_event
        >>> charged = [(gaussian_event(1.0 + i / 100, 0.1), 10) for i in range(20)]
        >>> one, past = gaussian_event(2.0, 0.1), Past()
        >>> round(past.epsilon(charged, 1e-5, one) / composed_epsilon([*charged, (one, 1)], 1e-5), 6)
        1.0
    """

    def __init__(self) -> None:
        self._composed: Counter[str] = Counter()
        self._accountant: Any = None
        self._fineness = 0.0

    def epsilon(
        self,
        charged: Iterable[tuple[dp_event.DpEvent, int]],
        delta: float,
        further: dp_event.DpEvent | None = None,
        accountant: str = "pld",
    ) -> float:
        """Epsilon at `delta` of all charged releases, and of one further release if given.

        Args:
            charged: pairs (event, number of releases), whose numbers only grow from call to call.
            delta: in [0, 1).
            further: cost of one more release.
            accountant: "pld" or "rdp"; Renyi orders are added up afresh, which takes no time.
        """
        charged = list(charged)
        events = charged if further is None else [*charged, (further, 1)]
        many = len({json.dumps(encode(event)) for event, _ in events}) > FEW
        added = all(isinstance(event, _ADDED) and is_private(event) for event, _ in events)
        if not (many and added and accountant == "pld" and is_resolved(events, delta)):
            return composed_epsilon(events, delta, accountant)
        precision, counts = 0.0, Counter[str]()  # Gaussian releases without sampling are together one such release
        for event, count in charged:
            if isinstance(event, dp_event.GaussianDpEvent):
                precision += count / event.noise_multiplier**2
            else:
                counts[json.dumps(encode(event))] += count
        with quiet():
            total = copy.copy(self._grown(counts, new_accountant(accountant, [event for event, _ in events])))
            if isinstance(further, dp_event.GaussianDpEvent):
                precision += 1 / further.noise_multiplier**2
            elif further is not None:
                total.compose(further)
            if precision:
                total.compose(dp_event.GaussianDpEvent(math.sqrt(1 / precision)))
            return float(total.get_epsilon(delta))

    def _grown(self, counts: Counter[str], empty: Any) -> Any:
        """The accountant of these releases: the last one with what has been added since, or a new one."""
        fineness = empty._value_discretization_interval
        if self._accountant is None or fineness != self._fineness or not self._composed <= counts:
            self._composed, self._accountant, self._fineness = Counter(), empty, fineness
        for kind, count in (counts - self._composed).items():
            self._accountant.compose(decode(json.loads(kind)), count)
        self._composed = counts
        return self._accountant
