"""Tick labels that differ and do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, LogLocator, NullFormatter

_MOST = 6  # further digits that are tried


class Distinct(Formatter):
    """Labels with as few further digits as distinguish the ticks.

    Args:
        label: (value, further digits) -> text.

    Example:
        >>> Distinct(percent).format_ticks([0.14, 0.145, 0.15])
        ['14.0%', '14.5%', '15.0%']
    """

    def __init__(self, label: Callable[[float, int], str]) -> None:
        self._label = label

    def __call__(self, value: float, pos: int | None = None) -> str:
        """A single label."""
        return self._label(value, 0)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """All labels of an axis."""
        labels: list[str] = []
        for further in range(_MOST + 1):
            labels = [self._label(float(value), further) for value in values]
            if len(set(labels)) == len(labels):
                break
        return labels


def percent(value: float, further: int) -> str:
    """A share in per cent."""
    return f"{value:.{further}%}"


def figure(value: float, further: int) -> str:
    """A number with four or more significant digits."""
    return f"{value:.{4 + further}g}"


def power_of_ten(value: float, further: int) -> str:
    """A number whose logarithm is the tick."""
    return figure(10**value, further) if further else f"{10**value:.2g}"


def limits(low: float, high: float, most: float = math.inf) -> tuple[float, float]:
    """Ends of an axis that do not enlarge differences below a thousandth of its values, and do not exceed `most`.

    Example:
        >>> limits(1000.0, 1000.0), limits(0.9, 1.1, most=1.0)
        ((999.5, 1000.5), (0.9, 1.0))
    """
    least = 1e-3 * max(abs(low), abs(high))
    further = max(0.0, least - (high - low)) / 2
    return low - further, min(high + further, most)


def plain(axis: Axis, label: Callable[[float, int], str] = figure) -> None:
    """Label a linear axis."""
    axis.set_major_formatter(Distinct(label))


def logarithmic(axis: Axis, low: float, high: float) -> None:
    """Label a logarithmic axis over values from `low` to `high`: powers of ten, or 1, 2 and 5 where these are few."""
    few = math.log10(high / low) < 2
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=7))
    axis.set_major_formatter(Distinct(figure))
    axis.set_minor_formatter(NullFormatter())
