"""Division of the level of an audit, 1 - confidence, among all statements that can make the audit fail.

An audit of canaries fails if one of several bounds exceeds the reported figure, or if a check of the noise fails. Each
of these statements has its own level. By the union bound the levels add up to at most the level of the audit, so a
release that is as reported fails with probability at most 1 - confidence. Checks without statistics (whitened
sensitivity, plan purity, noise on the ledger) take no share. Guesses (one-run) are a single statement with the whole
level. A distinguisher leaves a small share to the checks of drawn noise (see `drawn`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Level of each statement of an audit, in equal parts for the kinds of statements and within each kind.

    The kinds are the bound on the releases as a whole, bounds on single layers and five checks of the noise: its scale
    in each layer, its independence of earlier noise, similar sketches, repeated windows, and its law.

    Attributes:
        whole: level of the bound on the releases as a whole.
        layer: level of each layer's bound; 0 if single layers are not examined.
        scale: level of each layer's noise scale.
        correlation: level of each correlation of the noise, two-sided.
        alike: level of each pair of sketches, two-sided.
        found: level of each window in each place, two-sided.
        cell: level of each count in the test of the noise's law, two-sided.
    """

    whole: float
    layer: float
    scale: float
    correlation: float
    alike: float
    found: float
    cell: float

    @classmethod
    def of(
        cls,
        confidence: float,
        layers: int,
        correlations: int,
        *,
        pairs: int = 1,
        places: int = 1,
        cells: int = 1,
        per_layer: bool = True,
    ) -> Shares:
        """Shares of an audit.

        Args:
            confidence: confidence of the audit, in (0.5, 1).
            layers: number K of layers.
            correlations: number of correlations examined.
            pairs: number of pairs of sketches.
            places: number of comparisons, that is, of windows times the places in which each is searched for.
            cells: number of counts in the test of the noise's law.
            per_layer: whether single layers are bounded.

        Example:
            >>> shares = Shares.of(0.999, layers=4, correlations=100)
            >>> round(shares.whole, 9), round(shares.layer, 9), round(shares.correlation, 9)
            (0.000142857, 3.5714e-05, 1.429e-06)
        """
        part = (1 - confidence) / (7 if per_layer else 6)
        several = (part / max(1, number) for number in (correlations, pairs, places, cells))
        return cls(part, part / layers if per_layer else 0.0, part / layers, *several)
