"""The metric that summarises a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlgm.errors import RunError


def headline(row: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of the headline metric of a summary or of an evaluated round.

    Raises:
        RunError: the row is from an earlier version of fedlgm or was changed: it has no headline
            metric.
    """
    if row.get("headline") not in row.get("metrics", {}):
        raise RunError(
            "the run's figures have no headline metric: use the version that made this run"
        )
    return row["headline"], float(row["metrics"][row["headline"]])


def is_share(name: str) -> bool:
    """Whether a metric lies in [0, 1] and is shown in percent: accuracies and F1.

    Example:
        >>> is_share("balanced accuracy"), is_share("perplexity")
        (True, False)
    """
    return name == "f1" or name.endswith("accuracy")


def further_metrics(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and text of a summary's metrics beside the headline and the loss."""
    shown = ("loss", headline(result)[0])
    return [
        (name, format_metric(name, float(value)))
        for name, value in result["metrics"].items()
        if name not in shown
    ]


def format_metric(name: str, value: float) -> str:
    """A metric as text: shares in percent."""
    if is_share(name):
        return f"{value:.2%}"
    return "inf" if math.isinf(value) else f"{value:.4g}"
