"""How a round's noise was spread: per layer and, for published variants, per client."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from strategies import RoundRecord


def details(record: RoundRecord) -> dict[str, Any]:
    """Compact figures for a metrics row.

    noise_scale: expected l2 norm of the noise in the mean that the round releases; its sum over the rounds is the
        "noise scale" of `fedlgm compare`.
    layer_noise: expected l2 norm of the noise that one noising party adds to each layer, [K] (0 where not released).
    score: the scores that the plan was made of, [K], where the mechanism has any.
    clients: of published variants, the clients' own "score", "sigma", "selected" and "noise_norm", each [clients, K].
    skipped: present and true where nothing was released.
    """
    plan = record.plan
    row: dict[str, Any] = {"noise_scale": noise_scale(record), "layer_noise": _compact(plan.party_noise_norms)}
    if "score" in plan.notes:
        row["score"] = _compact(plan.notes["score"])
    if record.notes:
        row["clients"] = {name: _compact(values) for name, values in record.notes.items()}
    if plan.size == 0:
        row["skipped"] = True
    return row


def noise_scale(record: RoundRecord) -> float:
    """Expected l2 norm of the noise in the released mean, all layers and all noising parties together."""
    plan = record.plan
    if "noise_norm" in record.notes:
        return math.sqrt(float(np.square(record.notes["noise_norm"]).sum())) / plan.denominator
    parties = record.present if plan.budget.trust == "local" else 1
    return math.sqrt(parties * float(np.square(plan.party_noise_norms).sum())) / plan.denominator


def _compact(values: np.ndarray) -> Any:
    """Nested list of numbers with five significant digits."""
    if values.ndim > 1:
        return [_compact(row) for row in values]
    return [float(f"{value:.5g}") for value in values.tolist()]
