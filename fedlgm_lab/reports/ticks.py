"""Limits and tick labels of axes, such that labels differ and do not overlap."""

from __future__ import annotations

import math

from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter


def limits(low: float, high: float, most: float = math.inf) -> tuple[float, float]:
    """Compute ends of an axis that do not enlarge differences below a thousandth of its values, and
    do not exceed `most`.

    Example:
        >>> limits(1000.0, 1000.0), limits(0.9, 1.1, most=1.0)
        ((999.5, 1000.5), (0.9, 1.0))
    """
    least = 1e-3 * max(abs(low), abs(high))
    further = max(0.0, least - (high - low)) / 2
    return low - further, min(high + further, most)


def logarithmic(axis: Axis, low: float, high: float) -> None:
    """Label a logarithmic axis over values from `low` to `high` at the powers of ten, or also at 2
    and 5 times these if there are fewer than two decades.
    """
    few = math.log10(high / low) < 2
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=7))
    axis.set_major_formatter("{x:.4g}")
    axis.set_minor_formatter(NullFormatter())
