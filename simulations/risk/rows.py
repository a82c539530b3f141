"""Rows that `fedlgm risk` writes."""

from __future__ import annotations

from typing import TypedDict


class LayerRiskRow(TypedDict):
    """One layer, see `fedlgm.example_level.risk.LayerRisk`."""

    layer: str
    training_error: float
    held_out_error: float
    strength: float
    gradient_error: float


class FindingsRow(TypedDict):
    """Layer risk as written: `Findings`, and the standard error of a held-out error near one half.

    Attributes:
        layers: one row each.
    """

    public: str
    examples: int
    standard_error: float
    layers: list[LayerRiskRow]
    bias_weights: list[float]


class Summary(FindingsRow, total=False):
    """The command's JSON output: findings, the weights of `lm-dp-sgd`, and the written files."""

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
