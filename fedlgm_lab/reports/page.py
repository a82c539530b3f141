"""Renders pages from the templates of this folder, and makes the key figures, layer table and
curves that reports and notebook summaries share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from fedlgm.privacy.attackers import percent
from fedlgm_lab.reports.pictures import Picture, over_rounds
from fedlgm_lab.reports.svg import to_uri
from simulations.runs.headline import format_metric, headline, is_evaluated, measured_figures
from simulations.runs.rows import LayerRow
from simulations.summaries.terminal import OF_Z, epsilon_label, layer_cells, number

_FOLDER = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader([_FOLDER / "templates", _FOLDER]),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)
_TEMPLATES.filters |= {"uri": to_uri, "percent": percent}


class Table(NamedTuple):
    """A table of a page.

    Attributes:
        head: names of the columns.
        rows: cells of each row; the first cell names the row.
        caption: description of the table.
        words: whether the last column holds text instead of figures.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    words: bool = False


def render(template: str, **values: Any) -> str:
    """Render a template as HTML; every value is escaped."""
    return _TEMPLATES.get_template(template).render(values)


def key_figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the run's key figures by label; the label of epsilon names its guarantee's status."""
    readers = (
        [("epsilon of readers", number(result["readers_epsilon"]))]
        if "readers_epsilon" in result
        else []
    )
    found = (
        [("found at 1 % false alarms", f"≤ {percent(result['attack_rates']['tpr']['0.01'])}")]
        if "attack_rates" in result
        else []
    )
    return [
        *measured_figures(result),
        (epsilon_label(str(result["guarantee_status"])), number(result["epsilon"])),
        *found,
        *readers,
        ("epsilon claimed", number(result["claimed_epsilon"])),
        ("delta", f"{result['delta']:g}"),
        ("rounds", str(result["rounds"])),
        ("noise multiplier", f"{result['noise_multiplier']:.4g}"),
    ]


def layer_table(
    layers: Sequence[Mapping[str, Any]], caption: str = "Layers", *, correlated: bool = False
) -> Table:
    """Make the table of the layers that `simulations.summaries.planning.layer_rows` describes, with
    their totals.

    Args:
        layers: one row per layer.
        caption: description of the table.
        correlated: whether noise is correlated over the rounds; sigma_j is then not the scale of a
            round's own noise.
    """
    scale = f"noise sigma_j{OF_Z if correlated else ''}"
    head = ("layer", "d_j", "bound s_j", scale, "share p_j", "SNR_j", "noise norm on the mean")
    rows = [layer_cells(row) for row in layers]
    released = [row for row in layers if row["released"]]
    if len(layers) > 1 and released:
        total = math.sqrt(sum(float(row["noise_norm"]) ** 2 for row in released))
        count = sum(row["size"] for row in layers)
        share = sum(float(row["share"]) for row in released)
        rows.append(["all", f"{count:,}", "", "", f"{share:.4f}", "", number(total)])
    return Table(head, rows, caption)


def curves(
    rows: Sequence[Mapping[str, Any]], status: str, *, dark: bool = True
) -> list[Picture | None]:
    """Draw the task's metrics, the headline metric first, and then epsilon, over the evaluated
    rounds.

    Args:
        rows: a run's public rows.
        status: status of the guarantee.
        dark: see `fedlgm_lab.reports.svg.to_svg`.
    """
    seen = [row for row in rows if "epsilon" in row]
    if not seen:
        return []
    rounds = [row["round"] for row in seen]
    names = []
    if is_evaluated(seen[-1]):
        first = headline(seen[-1])[0]
        names = [first, *sorted(set(seen[-1]["metrics"]) - {first})]
    pictures = []
    for name in names:
        values = [row["metrics"].get(name, math.nan) for row in seen]
        shares = format_metric(name, 0.5).endswith("%")
        pictures.append(
            over_rounds(f"Test {name}", rounds, {name: values}, percent=shares, dark=dark)
        )
    spent = {
        epsilon_label(status).removeprefix("epsilon "): [row["epsilon"] for row in seen],
        "claimed": [row["claimed_epsilon"] for row in seen],
    }
    pictures.append(over_rounds("Epsilon spent", rounds, spent, dark=dark))
    return pictures


def layer_rows(row: Mapping[str, Any], layers: Mapping[str, int]) -> list[LayerRow]:
    """Describe a round's layers from its public row, in the form of
    `simulations.summaries.planning.layer_rows`.

    Args:
        row: see `simulations.runs.rows.RoundRow`.
        layers: sizes by name, in order.
    """
    each = np.asarray(row["layer_noise"], dtype=float)
    # Every layer's noise on the mean is the noise of one party times the same factor.
    factor = row["noise_norm"] / float(np.linalg.norm(each)) if each.any() else 0.0
    return [
        {
            "layer": name,
            "size": size,
            "clip": row["clip"][j],
            "sigma": row["sigma"][j],
            "share": row["share"][j],
            "snr": row["snr"][j],
            "noise_norm": factor * float(each[j]),
            "released": row["sigma"][j] is not None,
        }
        for j, (name, size) in enumerate(layers.items())
    ]
