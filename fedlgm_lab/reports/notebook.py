"""The summary of a finished run that a notebook shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlgm_lab.reports import page


def summary_html(
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    *,
    correlated: bool = False,
) -> str:
    """Format a run's summary as HTML for `_repr_html_`, with key figures, guarantee, layer table,
    and curves of metrics and epsilon.

    Args:
        result: the run's summary, as `simulations.launch.simulate` returns it.
        rows: its public rows (`RunFolder.rows()`); without rows there are no curves.
        layers: `simulations.summaries.planning.layer_rows` of its plan, or
            `fedlgm_lab.reports.page.layer_rows` of one of its rows; without layers there is no
            table.
        correlated: whether noise is correlated over the rounds.
    """
    return page.render(
        "notebook.html",
        title=f"{result['recipe']}: {result['mechanism']}, {result['variant']}",
        result=result,
        figures=page.key_figures(result),
        layers=page.layer_table(layers, correlated=correlated) if layers else None,
        pictures=page.curves(rows, str(result["guarantee_status"]), dark=False),
    )
