"""The canaries' observations in a run, from which the bounds of an audit are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fedlgm.errors import ConfigError
from fedlgm_lab.audits.scores import Array, Flags

Presence = Literal["release", "run"]


@dataclass(frozen=True)
class CanaryRecord:
    """Observations over T rounds with m canaries and K layers.

    A layer's *canary-aligned sum* is <u_ij, (release - clients' sum) / sigma_j>, with u_ij the
    canary's unit direction in this layer.

    Attributes:
        round: number of each round, from 1, [T].
        layer_aligned: canary-aligned sums of each layer, with the other canaries' known
            contributions subtracted, [T, m, K]; NaN where not released.
        layer_signal: s_j / sigma_j of each layer, [T, K]; 0 where not released.
        signs: sign of the direction that the canary added to the round's sum, +1 or -1; 0 if the
            canary was not included, [T, m].
        orientation: sign of the canary's direction in that round, whether or not the canary was
            included, [T, m]; 0 where a canary of a run whose rounds are one mechanism could not
            take part.
        length: squared length of the sum of the round's signed directions in each layer, [T, K].
        energy: mean square of the noise (whitened, where it is correlated) in each layer, in units
            of the plan's noise, [T, K]; NaN where not released.
        head: leading numbers of the same noise in each layer, [T, K, width]; NaN where there are
            none.
        cells: number of values of the same noise whose magnitude falls into each cell, [T, K,
            cells].
        multipliers: the plan's effective multiplier of each round, [T].
        raw: canary-aligned sums of all layers from which the other canaries are not subtracted, [T,
            m]; empty if canaries have a coin per round.
        member: whether the canary's coin put it into the run, bool [m].
        rate: probability that an included canary takes part in a round.
        presence: "release" (a coin per round) or "run" (a coin per run).
    """

    round: Array
    layer_aligned: Array
    layer_signal: Array
    signs: Array
    orientation: Array
    length: Array
    energy: Array
    head: Array
    cells: Array
    multipliers: Array
    raw: Array
    member: Flags
    rate: float
    presence: Presence

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, Any]],
        member: Flags,
        rate: float = 1.0,
        presence: Presence = "release",
    ) -> CanaryRecord:
        """Build a record from one row per round: `Canaries.rows`, or rows that were stored.

        Raises:
            ConfigError: there are no rows, or rows are incomplete.
        """
        if not rows:
            raise ConfigError(
                "nothing was released while the canaries watched: there is nothing to audit"
            )
        names = [
            field.name for field in fields(cls) if field.name not in ("member", "rate", "presence")
        ]
        try:
            values = {
                name: np.stack([np.asarray(row[name], dtype=np.float64) for row in rows])
                for name in names
            }
        except (KeyError, ValueError) as error:
            raise ConfigError(f"the canaries' record is damaged: {error}") from error
        return cls(**values, member=member, rate=rate, presence=presence)

    @cached_property
    def signal(self) -> Array:
        """Planned mu of each round, [T]."""
        return np.linalg.norm(self.layer_signal, axis=1)

    @cached_property
    def weights(self) -> Array:
        """Weight of each layer in the canary-aligned sum of all layers, [T, K]; the squares of a
        round's weights add up to 1.
        """
        return self.layer_signal / self.signal[:, None]

    @cached_property
    def aligned(self) -> Array:
        """Canary-aligned sums of all released layers together, [T, m]."""
        return np.nansum(self.layer_aligned * self.weights[:, None], axis=2)
