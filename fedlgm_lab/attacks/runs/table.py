"""The table of privacy, utility and attacks, which compares the leakage of mechanisms at equal
proven epsilon.

Every finished run of a comparison is attacked. The table shows the run's accuracy, its claimed,
proven and audited epsilon and the attacks' success. A second table, in the form of Table X of the
LaDP-FL paper, states the distances of reconstructed classes by budget, method and class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Group

from fedlgm_lab.attacks.runs.measured import TPR_AT
from fedlgm_lab.studies.comparison import budget
from fedlgm_lab.studies.study_rows import CELL, Row
from simulations.summaries.terminal import number
from simulations.tables import table

_MEASURES = ("membership_auc", "membership_tpr", "inversion_ssim")


def cells(summary: Row, attacked: Sequence[Row]) -> list[Row]:
    """Extend a comparison's cells by the mean and the standard deviation of the attacks' figures;
    `gan` holds the reconstructed classes.

    Args:
        summary: see `fedlgm_lab.studies.comparison.summarise`.
        attacked: see `fedlgm_lab.attacks.runs.measured.measure`.
    """
    by_folder = {row["folder"]: row for row in attacked}
    result = []
    for cell in summary["cells"]:
        runs = [run for run in summary["runs"] if all(run[key] == cell[key] for key in CELL)]
        attacks = [by_folder[run["folder"]] for run in runs]
        audited = [row["audited_epsilon"] for row in attacks if "audited_epsilon" in row]
        classes = {label: [row["gan"][label] for row in attacks] for label in attacks[0]["gan"]}
        result.append(
            cell
            | _mean_and_std(attacks, _MEASURES)
            | {"audited_epsilon": max(audited, default=None)}
            | {
                "gan": {
                    label: _mean_and_std(rows, rows[0]) | {"seeds": len(rows)}
                    for label, rows in classes.items()
                }
            }
        )
    return result


def _mean_and_std(rows: Sequence[Row], names: Iterable[str]) -> Row:
    """Average each figure over the rows that have it. The key "NAME_std" has the standard
    deviation, which is 0 for a single row.
    """
    summary: Row = {}
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            summary |= {name: float(np.mean(values)), f"{name}_std": deviation}
    return summary


def tables(made: Sequence[Row]) -> Group:
    """Lay out the table of privacy, utility and attacks, the table of reconstructions if there are
    any, and an explanation of the figures.
    """
    header, body = main_table(made)
    parts: list[Any] = [table("Privacy, utility, attacks", header, body, left=_WORDS)]
    if any(cell["gan"] for cell in made):
        parts.append(
            table(
                "Reconstruction of classes that one client lacks",
                *reconstruction_table(made),
                left=_WORDS,
            )
        )
    if any("inception_distance" in figures for cell in made for figures in cell["gan"].values()):
        parts.append(
            table(
                "Their Frechet Inception distance",
                *reconstruction_table(made, _inception),
                left=_WORDS,
            )
        )
    sentences = dict.fromkeys(f"{cell['method']}: {cell['guarantee']}" for cell in made)
    return Group(*parts, *sentences, NOTES)


NOTES = (
    f"AUC and TPR (at FPR {TPR_AT:g}): membership from the final model's outputs, training set "
    "against test set; SSIM: images recovered from single updates of the first round, 1 for the "
    "private image itself; distance: Frechet distance of reconstructions and private images in "
    "the features of a classifier trained on the public test set, comparable within one data set "
    "only. A low figure does not prove privacy: a model that learned nothing has low figures too, "
    "so read them beside its accuracy."
)

_WORDS = ("method", "budget")
_MARKS = {"conditional": " *"}


def main_table(made: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Make the header and rows with accuracy, claimed, proven and audited epsilon, and the success
    of the attacks.
    """
    header = ["method", "budget", "accuracy", "claimed", "proven", "audited", "AUC", "TPR", "SSIM"]
    body = []
    for cell in made:
        proven = number(cell["epsilon"]) + _MARKS.get(cell["guarantee_status"], "")
        if math.isinf(cell["epsilon"]):
            proven = "NOT PRIVATE"
        body.append(
            [
                cell["method"],
                budget(cell),
                _figure(cell, "accuracy", 100, 1, " %"),
                number(cell["claimed_epsilon"]),
                proven,
                "-" if cell["audited_epsilon"] is None else number(cell["audited_epsilon"]),
                _figure(cell, "membership_auc", 1, 3),
                _figure(cell, "membership_tpr", 100, 1, " %"),
                _figure(cell, "inversion_ssim", 1, 2),
            ]
        )
    return header, body


def reconstruction_table(
    made: Sequence[Row], show: Callable[[Row], str] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Make the header and rows in the layout of Table X of the LaDP-FL paper, with budget, method
    and one column per class.

    Args:
        made: cells of the comparison.
        show: function that makes the text of a class. By default the text has distance and
            agreement by the public classifier. Two further rows then state the distance of the
            nearest other class and the distance between halves of the private images.
    """
    labels = list(dict.fromkeys(label for cell in made for label in cell["gan"]))
    body = []
    for cell in sorted(
        made, key=lambda cell: (cell["epsilon_budget"] is not None, cell["epsilon_budget"] or 0.0)
    ):
        if classes := cell["gan"]:
            texts = [
                (show or _reconstruction)(classes[label]) if label in classes else "-"
                for label in labels
            ]
            body.append([budget(cell), cell["method"], *texts])
    header = ["budget", "method", *(f"class {label}" for label in labels)]
    if show is not None:
        return header, body
    first = next(cell["gan"] for cell in made if cell["gan"])
    for title, name in (("another class", "nearest_class"), ("private images", "floor")):
        body.append(
            [
                "-",
                f"({title})",
                *(f"{first[label][name]:.0f}" if label in first else "-" for label in labels),
            ]
        )
    return header, body


def _figure(cell: Row, name: str, scale: float, digits: int, unit: str = "") -> str:
    if name not in cell or not math.isfinite(cell[name]):
        return "-"
    spread = f" ± {scale * cell[f'{name}_std']:.{digits}f}" if cell["seeds"] > 1 else ""
    return f"{scale * cell[name]:.{digits}f}{spread}{unit}"


def _inception(figures: Row) -> str:
    """Format the Inception distance to the private images, and the distance between two halves of
    these images.
    """
    return f"{_figure(figures, 'inception_distance', 1, 1)} (private images: {figures['inception_floor']:.1f})"


def _reconstruction(figures: Row) -> str:
    return f"{_figure(figures, 'distance', 1, 0)} ({_figure(figures, 'agreement', 100, 0, ' %')})"
