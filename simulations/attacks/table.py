"""The privacy-utility-attack table: leakage of mechanisms at equal proven epsilon.

Every finished run of a comparison is attacked; the table shows its accuracy, its claimed, proven and audited epsilon
and the attacks' success side by side, and the LaDP-FL paper's Table X: the distance of reconstructed classes, by
budget, method and class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group

from simulations.attacks.measured import TPR_AT
from simulations.reports.terminal import number
from simulations.studies.rows import Row, budget, cells_of, repeated
from simulations.tables import table

_MEASURES = ("accuracy", "membership_auc", "membership_tpr", "inversion_ssim")


def cells(rows: Sequence[Row]) -> list[Row]:
    """Cells of attacked runs, see `cells_of`, with `audited_epsilon` and, by class, the reconstructions as `gan`."""
    return [cell | _attacked(runs) for cell, runs in cells_of(rows, _MEASURES)]


def _attacked(runs: list[Row]) -> Row:
    audited = [run["audited_epsilon"] for run in runs if run.get("audited_epsilon") is not None]
    labels = dict.fromkeys(label for run in runs for label in run.get("gan", {}))
    by_class = {label: [run["gan"][label] for run in runs if label in run.get("gan", {})] for label in labels}
    return {
        "audited_epsilon": max(audited, default=None),
        "gan": {label: repeated(found, found[0]) | {"seeds": len(found)} for label, found in by_class.items()},
    }


def tables(made: Sequence[Row]) -> Group:
    """The privacy-utility-attack table, the reconstruction table if there is one, and an explanation of the figures."""
    header, body = main_table(made)
    parts: list[Any] = [table("Privacy, utility, attacks", header, body, left=_WORDS)]
    if any(cell["gan"] for cell in made):
        parts.append(table("Reconstruction of classes that one client lacks", *reconstruction_table(made), left=_WORDS))
    if any("inception_distance" in found for cell in made for found in cell["gan"].values()):
        parts.append(table("Their Frechet Inception distance", *reconstruction_table(made, _inception), left=_WORDS))
    sentences = dict.fromkeys(f"{cell['method']}: {cell['guarantee']}" for cell in made)
    return Group(*parts, *sentences, NOTES)


NOTES = (
    f"AUC and TPR (at FPR {TPR_AT:g}): membership from the final model's outputs, training set against test set; SSIM: "
    "images recovered from single updates of the first round, 1 for the private image itself; distance: Frechet "
    "distance of reconstructions and private images in the features of a classifier trained on the public test set, "
    "comparable within one data set only. A low figure does not prove privacy: a model that learned nothing has low "
    "figures too, so read them beside its accuracy."
)

_MARKS = {"conditional": " *"}
_WORDS = ("method", "budget")


def main_table(made: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: accuracy, claimed, proven and audited epsilon, success of the attacks."""
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
    """Header and rows in the layout of the LaDP-FL paper's Table X: budget, method, one column per class.

    Args:
        made: cells of the comparison.
        show: text of a class; default: distance and agreement by the public classifier, which has two more rows: its
            distances of another class and between private images.
    """
    labels = list(dict.fromkeys(label for cell in made for label in cell["gan"]))
    body = []
    for cell in sorted(made, key=lambda cell: (cell["epsilon_budget"] is not None, cell["epsilon_budget"] or 0.0)):
        if cell["gan"]:
            shown = [cell["gan"].get(label) for label in labels]
            body.append(
                [
                    budget(cell),
                    cell["method"],
                    *("-" if found is None else (show or _reconstruction)(found) for found in shown),
                ]
            )
    header = ["budget", "method", *(f"class {label}" for label in labels)]
    if show is not None:
        return header, body
    first = next(cell["gan"] for cell in made if cell["gan"])
    nearest = {label: found["nearest_class"] for label, found in first.items()}
    floor = {label: found["floor"] for label, found in first.items()}
    for title, known in (("another class", nearest), ("private images", floor)):
        body.append(["-", f"({title})", *(f"{known[label]:.0f}" if label in known else "-" for label in labels)])
    return header, body


def _figure(cell: Row, name: str, scale: float, digits: int, unit: str = "") -> str:
    if name not in cell or not math.isfinite(cell[name]):
        return "-"
    spread = f" ± {scale * cell[f'{name}_std']:.{digits}f}" if cell["seeds"] > 1 else ""
    return f"{scale * cell[name]:.{digits}f}{spread}{unit}"


def _inception(found: Row) -> str:
    """Distance to the private images, and between halves of these."""
    spread = f" ± {found['inception_distance_std']:.1f}" if found["seeds"] > 1 else ""
    return f"{found['inception_distance']:.1f}{spread} (private images: {found['inception_floor']:.1f})"


def _reconstruction(found: Row) -> str:
    if found["seeds"] == 1:
        return f"{found['distance']:.0f} ({found['agreement']:.0%})"
    agreement = f"{100 * found['agreement']:.0f} ± {100 * found['agreement_std']:.0f} %"
    return f"{found['distance']:.0f} ± {found['distance_std']:.0f} ({agreement})"
