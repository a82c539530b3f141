"""How often a bound of a stated level may exceed the truth."""

from __future__ import annotations

import scipy.stats


def exceeded(level: float, audits: int) -> int:
    """Fewest exceedances that a bound of this level would show in so many audits less than once in
    a thousand."""
    return int(scipy.stats.binom.isf(1e-3, audits, level)) + 1
