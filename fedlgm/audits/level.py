"""How the level of an audit, 1 - confidence, is shared among everything that can make the audit fail.

An audit of canaries fails if one of several bounds exceeds what is reported, or if a check of the noise fails. Each of
these statements has a level of its own; by the union bound the levels of all of them add up to at most the level of the
audit, so a release that is as reported fails with probability at most 1 - confidence. Checks without statistics
(whitened sensitivity, plan purity, noise on the ledger) take no share, and a method that makes one statement alone
(distinguisher, one-run, one-run-fdp) keeps the whole level.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Level of each statement of an audit: equal parts for the kinds of statements, equal parts within a kind.

    The kinds are the bound on the releases as a whole, bounds on single layers, the scale of the layers' noise, and its
    independence.

    Attributes:
        whole: of the bound on the releases as a whole.
        layer: of each layer's bound; 0 where layers are not looked at by themselves.
        scale: of each layer's noise scale.
        correlation: of each correlation of the noise, in both directions together.
    """

    whole: float
    layer: float
    scale: float
    correlation: float

    @classmethod
    def of(cls, confidence: float, layers: int, correlations: int, *, per_layer: bool = True) -> Shares:
        """Shares of an audit.

        Args:
            confidence: of the audit, in (0.5, 1).
            layers: number K of layers.
            correlations: number of correlations that are looked at.
            per_layer: whether layers are bounded by themselves.

        Example:
            >>> shares = Shares.of(0.999, layers=4, correlations=100)
            >>> round(shares.whole, 9), round(shares.layer, 9), round(shares.correlation, 9)
            (0.00025, 6.25e-05, 2.5e-06)
        """
        part = (1 - confidence) / (4 if per_layer else 3)
        return cls(part, part / layers if per_layer else 0.0, part / layers, part / max(1, correlations))
