"""Divides the level of an audit, 1 - confidence, among all statements that can make the audit fail.

An audit of canaries fails if one of several bounds exceeds the reported figure, or if a check of
the noise fails. Each of these statements has a separate level, and these levels add up to at most
the level of the audit. By the union bound, a release that is as reported therefore fails with
probability at most 1 - confidence. Checks without statistics (whitened sensitivity, plan purity,
noise on the ledger) need no level. An audit by guesses ("one-run") makes a single statement, which
has the whole level.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Levels of the statements of an audit: every kind of statement has the same level, which is
    divided equally among the statements of the kind.

    The kinds are the bound on the releases as a whole, the bounds on single layers, and four checks
    of the noise: its scale in each layer, its independence of earlier noise, its repetition and its
    law.

    Attributes:
        whole: level of the bound on the releases as a whole.
        layer: level of each layer's bound; 0 if single layers are not examined.
        scale: level of the test of each layer's noise scale.
        distance: level of the two-sided test of correlation between rounds, for each distance.
        pair: level of the two-sided test of correlation between the noise of each pair of layers.
        cell: level of the two-sided test of each count, in the check of the noise's law.
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
        """Divide the level of an audit.

        Args:
            confidence: confidence of the audit, in (0.5, 1).
            layers: number K of layers.
            distances: number of distances between rounds.
            pairs: number of pairs of layers, in one round or two, whose noise is compared.
            cells: number of counts in the check of the noise's law.
            per_layer: whether bounds on single layers are computed.

        Example:
            >>> shares = Shares.of(0.999, layers=4, pairs=100)
            >>> round(shares.whole, 9), round(shares.layer, 9), round(shares.pair, 9)
            (0.000166667, 4.1667e-05, 1.667e-06)
        """
        part = (1 - confidence) / (6 if per_layer else 5)
        several = (part / max(1, number) for number in (distances, pairs, cells))
        return cls(part, part / layers if per_layer else 0.0, part / layers, *several)
