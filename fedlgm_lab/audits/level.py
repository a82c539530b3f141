"""Division of the level of an audit, 1 - confidence, among all statements that can make the audit
fail.

An audit of canaries fails if one of several bounds exceeds the reported figure, or if a check of
the noise fails. Each of these statements has its own level. By the union bound the levels add up to
at most the level of the audit, so a release that is as reported fails with probability at most 1 -
confidence. Checks without statistics (whitened sensitivity, plan purity, noise on the ledger) take
no share. Guesses (one-run) are a single statement with the whole level.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Level of each statement of an audit, in equal parts for the kinds of statements and within
    each kind.

    The kinds are the bound on the releases as a whole, bounds on single layers and four checks of
    the noise: its scale in each layer, its independence of earlier noise, its repetition, and its
    law.

    Attributes:
        whole: level of the bound on the releases as a whole.
        layer: level of each layer's bound; 0 if single layers are not examined.
        scale: level of each layer's noise scale.
        distance: level of the correlation of rounds at each distance, two-sided.
        pair: level of each pair of layers' noise, two-sided.
        cell: level of each count in the test of the noise's law, two-sided.
    """

    whole: float
    layer: float
    scale: float
    distance: float
    pair: float
    cell: float

    @classmethod
    def of(
        cls,
        confidence: float,
        layers: int,
        *,
        distances: int = 1,
        pairs: int = 1,
        cells: int = 1,
        per_layer: bool = True,
    ) -> Shares:
        """Shares of an audit.

        Args:
            confidence: confidence of the audit, in (0.5, 1).
            layers: number K of layers.
            distances: number of distances between rounds.
            pairs: number of pairs of layers, in one round or two, whose noise is compared.
            cells: number of counts in the test of the noise's law.
            per_layer: whether single layers are bounded.

        Example:
            >>> shares = Shares.of(0.999, layers=4, pairs=100)
            >>> round(shares.whole, 9), round(shares.layer, 9), round(shares.pair, 9)
            (0.000166667, 4.1667e-05, 1.667e-06)
        """
        part = (1 - confidence) / (6 if per_layer else 5)
        several = (part / max(1, number) for number in (distances, pairs, cells))
        return cls(part, part / layers if per_layer else 0.0, part / layers, *several)
