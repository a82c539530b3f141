"""Draws scores as bars of text."""

from __future__ import annotations

import math
from collections.abc import Mapping

_HALF = 12  # characters of a factor of four


def bars(scores: Mapping[str, float]) -> list[str]:
    """Draw one line of text per rule: a bar to the left if the rule scores lower than the flat
    rule, otherwise to the right.

    Example:
        >>> for line in bars({"gaussian": 1.0, "uniform": 2.0, "dimension-adjusted": 0.5}):
        ...     print(line)
        gaussian                             |              1.00
        uniform                              |######        2.00
        dimension-adjusted             ######|              0.50
    """
    lines = []
    for rule, ratio in scores.items():
        length = round(_HALF / 2 * max(-2.0, min(2.0, math.log2(max(ratio, 1e-9)))))
        left, right = "#" * -min(length, 0), "#" * max(length, 0)
        lines.append(f"{rule:<25}{left:>{_HALF}}|{right:<{_HALF}} {ratio:>5.2f}")
    return lines
