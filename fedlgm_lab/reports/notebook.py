"""A finished run in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedlgm_lab.reports import page

# Notebooks have themes of their own, which an image cannot know: the summary brings its own light
# background.
_STYLE = """
.fedlgm{color-scheme:light;background:#fff;color:#1f2329;border:1px solid #d5dae1;border-radius:8px;padding:12px 16px;
max-width:64rem;font:14px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
.fedlgm p.title{font-size:16px;font-weight:600;margin:0 0 6px}
.fedlgm .guarantee{margin:6px 0;padding:6px 10px;border-left:4px solid #2b7a3d;background:#f2f8f3}
.fedlgm .guarantee.conditional{border-color:#8a6100;background:#fbf6ea}
.fedlgm .guarantee.none{border-color:#b3261e;background:#fdf1f0}
.fedlgm .figures{display:flex;flex-wrap:wrap;gap:6px 24px;margin:8px 0}
.fedlgm .figures dt{color:#5b6470;font-size:12px;font-weight:400}
.fedlgm .figures dd{margin:0;font-size:16px;font-weight:600;font-variant-numeric:tabular-nums}
.fedlgm .scroll{overflow-x:auto}
.fedlgm table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:4px 0}
.fedlgm caption{text-align:left;font-weight:600;padding:4px 0}
.fedlgm th,.fedlgm td{padding:2px 10px 2px 0;text-align:right;border-bottom:1px solid #d5dae1;background:none}
.fedlgm tr>:first-child{text-align:left}
.fedlgm .gallery{display:flex;flex-wrap:wrap;gap:8px}
.fedlgm figure{margin:0;flex:0 1 340px}
.fedlgm figcaption{font-weight:600;margin-top:6px}
.fedlgm img{max-width:100%}
"""


def summary_html(
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    *,
    correlated: bool = False,
) -> str:
    """A run's summary as HTML for `_repr_html_`: key figures, guarantee, layer table, curves of
    metrics and epsilon.

    Args:
        result: the run's summary, as `simulations.launch.simulate` returns it.
        rows: its public rows (`RunFolder.rows()`); without rows there are no curves.
        layers: `simulations.summaries.planning.layer_rows` of its plan, or
            `fedlgm_lab.reports.page.layer_rows` of one of its rows; without layers there is no
            table.
        correlated: whether noise is correlated over the rounds.
    """
    title = f"{result['recipe']}: {result['mechanism']}, {result['variant']}"
    parts = [
        f'<p class="title">{escape(title)}</p>',
        page.guarantee(result),
        page.figure_list(page.key_figures(result)),
        page.layer_table(layers, correlated=correlated) if layers else "",
        page.gallery(page.curves(rows, str(result["guarantee_status"]), dark=False)),
    ]
    return f'<div class="fedlgm"><style>{_STYLE}</style>{"".join(parts)}</div>'
