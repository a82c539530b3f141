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


def is_evaluated(result: Mapping[str, Any]) -> bool:
    """Whether a summary or a round's row has test figures; a server of real nodes may have no test
    rows.
    """
    return bool(result.get("metrics", True))


def measured_figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of a summary's test figures without the loss, the headline first.

    Example:
        >>> measured_figures({"headline": "accuracy", "metrics": {"loss": 0.5, "accuracy": 0.9}})
        [('test accuracy', '90.00%')]
        >>> measured_figures({"headline": "accuracy", "metrics": {}})
        [('test figures', 'not evaluated: no test rows')]
    """
    if not is_evaluated(result):
        return [("test figures", "not evaluated: no test rows")]
    first, _ = headline(result)
    names = [first, *(name for name in result["metrics"] if name not in ("loss", first))]
    return [(f"test {name}", format_metric(name, float(result["metrics"][name]))) for name in names]


def is_share(name: str) -> bool:
    """Whether a metric lies in [0, 1] and is shown in percent: accuracies and F1.

    Example:
        >>> is_share("balanced accuracy"), is_share("perplexity")
        (True, False)
    """
    return name == "f1" or name.endswith("accuracy")


def format_metric(name: str, value: float) -> str:
    """A metric as text: shares in percent."""
    if is_share(name):
        return f"{value:.2%}"
    return "inf" if math.isinf(value) else f"{value:.4g}"
