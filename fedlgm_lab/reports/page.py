"""Pieces of HTML that the report and the notebook summary share: figures, guarantee, layer table,
pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm.privacy.attackers import percent
from fedlgm_lab.reports.pictures import Picture, over_rounds
from fedlgm_lab.reports.svg import to_uri
from simulations.runs.headline import format_metric, further_metrics, headline
from simulations.runs.rows import LayerRow
from simulations.summaries.terminal import OF_Z, epsilon_label, layer_cells, number


def document(
    title: str, sections: Iterable[str], *, heading: str = "", footer: str = "", kind: str = ""
) -> str:
    """One self-contained HTML page.

    Args:
        title: heading of the page, as text.
        sections: HTML of its parts; empty ones are left out.
        heading: HTML below the title.
        footer: HTML after the parts.
        kind: text after the title in the browser's own title.
    """
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}{kind}</title><style>\n{style}</style></head>\n"
        f"<body><header><h1>{escape(title)}</h1>{heading}</header>\n<main>"
        + "\n".join(section for section in sections if section)
        + f"</main>{footer}</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A part of a page with its heading."""
    name = title.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{"".join(parts)}</section>'


def fact_list(facts: Iterable[tuple[str, str]]) -> str:
    """Labels and texts as a description list of two columns."""
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in facts)
    return f'<dl class="facts">{rows}</dl>'


def key_figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The run's key figures by label, with the kind of guarantee for every epsilon."""
    name, value = headline(result)
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
        (f"test {name}", format_metric(name, value)),
        *((f"test {other}", text) for other, text in further_metrics(result)),
        (epsilon_label(str(result["guarantee_status"])), number(result["epsilon"])),
        *found,
        *readers,
        ("epsilon claimed", number(result["claimed_epsilon"])),
        ("delta", f"{result['delta']:g}"),
        ("rounds", str(result["rounds"])),
        ("noise multiplier", f"{result['noise_multiplier']:.4g}"),
    ]


def figure_list(figures: Iterable[tuple[str, str]]) -> str:
    """Labels and values as a description list."""
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in figures
    )
    return f'<dl class="figures">{items}</dl>'


def guarantee(result: Mapping[str, Any]) -> str:
    """The guarantee sentence. Its first words state its kind, and its colour shows it."""
    return f'<p class="guarantee {escape(str(result["guarantee_status"]))}">{escape(str(result["guarantee"]))}</p>'


def image(picture: Picture) -> str:
    """A picture with its heading."""
    return (
        f'<figure><figcaption>{escape(picture.title)}</figcaption><img src="{to_uri(picture.svg)}" '
        f'alt="{escape(picture.alt)}"></figure>'
    )


def gallery(pictures: Iterable[Picture | None]) -> str:
    """Pictures side by side if there is room; empty without pictures."""
    images = [image(picture) for picture in pictures if picture is not None]
    return f'<div class="gallery">{"".join(images)}</div>' if images else ""


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], caption: str, *, words: bool = False
) -> str:
    """A table that scrolls if it is too wide, and whose first column names the row.

    Args:
        head: names of the columns.
        rows: cells.
        caption: description of the table.
        words: whether the last column holds text instead of figures.
    """
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    kind = ' class="words"' if words else ""
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" '
        f'tabindex="0"><table{kind}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def layer_table(
    layers: Sequence[Mapping[str, Any]], caption: str = "Layers", *, correlated: bool = False
) -> str:
    """Layers as `simulations.summaries.planning.layer_rows` describes them, then their totals.

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
    return table(head, rows, caption)


def curves(
    rows: Sequence[Mapping[str, Any]], status: str, *, dark: bool = True
) -> list[Picture | None]:
    """The task's metrics, with the headline metric first, then epsilon, over the evaluated rounds.

    Args:
        rows: a run's public rows.
        status: status of the guarantee.
        dark: see `fedlgm_lab.reports.svg.to_svg`.
    """
    seen = [row for row in rows if "epsilon" in row]
    if not seen:
        return []
    rounds = [row["round"] for row in seen]
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
    """A round's layers from its public row, in the form of
    `simulations.summaries.planning.layer_rows`.

    Args:
        row: see `simulations.runs.rows.RoundRow`.
        layers: sizes by name, in order.
    """
    each = np.asarray(row["layer_noise"], dtype=float)
    # Every layer's noise on the mean is that of one party times the same factor.
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
