"""Turns the scores into a sentence of advice.

On new networks some predicted gains were not confirmed by runs (docs/results/recommend.md). Advice
to use a rule other than the flat one therefore asks for a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping

FLAT = "gaussian"
"""The rule with which other rules are compared: one bound for the whole contribution."""
LEVELLED = "water-filling"
"""A rule with the flat bound that shortens the largest layers of an update first. It exists for
clients only.
"""
BETTER, WORSE = 1.2, 0.33
"""Ratios above and below which a rule is called better or worse than the flat one.
docs/results/recommend.md has the measurements behind them."""


def verdict(scores: Mapping[str, float], unit: str) -> str:
    """State the advice in a sentence.

    Args:
        scores: rule -> ratio to the flat Gaussian's score.
        unit: "client" or "example", which names the mechanisms.

    Example:
        >>> scores = {"gaussian": 1.0, "uniform": 1.9, "dimension-adjusted": 0.2}
        >>> for part in verdict(scores, "client").split(": "):
        ...     print(part)
        uniform is expected to be worth 1.90 times the signal to noise of gaussian
        compare both over a few seeds before you rely on it; avoid dimension-adjusted.
        >>> verdict({"gaussian": 1.0, "uniform": 1.1}, "client")
        'use gaussian: no other rule is expected to be better by a fifth.'
    """
    flat = {"client": FLAT, "example": "dp-sgd with style = 'flat'"}[unit]
    best = max(scores, key=lambda rule: scores[rule])
    if scores[best] >= BETTER:
        words = (
            f"{best} is expected to be worth {scores[best]:.2f} times the signal to noise of {flat}: "
            "compare both over a few seeds before you rely on it"
        )
    elif any(ratio > WORSE for rule, ratio in scores.items() if rule != FLAT):
        words = f"use {flat}: no other rule is expected to be better by a fifth"
    else:
        words = f"use {flat}: every other rule is expected to be worse"
    bad = [rule for rule, ratio in scores.items() if ratio <= WORSE]
    return words + (f"; avoid {', '.join(bad)}." if bad else ".")
