"""What `fedlgm risk` writes down."""

from __future__ import annotations

from typing import Any, TypedDict


class FindingsRow(TypedDict):
    """Layer risk as it is written down: `Findings`, and the standard error of a held-out error near one half.

    Attributes:
        layers: one `LayerRisk` each.
    """

    public: str
    examples: int
    standard_error: float
    layers: list[dict[str, Any]]
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
