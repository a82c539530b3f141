"""What `fedlgm risk` writes down."""

from __future__ import annotations

from typing import TypedDict


class LayerRiskRow(TypedDict):
    """One layer, see `fedlgm.example_level.risk.LayerRisk`."""

    layer: str
    training_error: float
    held_out_error: float
    strength: float


class FindingsRow(TypedDict):
    """Layer risk as it is written down: `Findings`, and the standard error of a held-out error near one half.

    Attributes:
        layers: one row each.
    """

    public: str
    examples: int
    standard_error: float
    layers: list[LayerRiskRow]
    bias_weights: list[float]


class Summary(FindingsRow, total=False):
    """What the command prints as JSON: what was found, what `lm-dp-sgd` makes of it, and the files it wrote."""

    recipe_name: str
    model: str
    errors: str
    emphasis: float
    error_rates: list[float]
    strengths: list[float]
    weights: list[float]
    folder: str
    picture: str
    recipe: str
