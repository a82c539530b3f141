"""Comparison of water-filling with flat and per-layer clipping.

The three rules add the same noise to the sum, and differ only in how they shorten a large update.
All clients of a cohort are trained at once, as in `adaptive`. For every rule, the server learning
rate is searched in the same way over three seeds, and the best rate is then run with five other
seeds. `real_models` makes the same comparison for models of text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedlgm import mechanisms
from fedlgm_lab.studies.tables.adaptive import Federation, train_and_test
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import Cell, cells, measure_cells, settings
from fedlgm_lab.studies.tables.store import CHANGE, Kept, Row, change

NAME = "water-filling"
FLAT, PER_LAYER, FILLING = "gaussian", "uniform", "water-filling"


class AdamFederation(Federation):
    """The federation of `adaptive`, whose clients train by Adam at the learning rate 0.01."""

    def optimizer(self, rows: Tensor) -> Callable[[Sequence[Tensor]], None]:
        """Return a function that moves models [b, D] by one step of Adam, given the gradients of
        `tensors`.
        """
        first, second, count = torch.zeros_like(rows), torch.zeros_like(rows), itertools.count(1)

        def step(slopes: Sequence[Tensor]) -> None:
            number, slope = next(count), torch.cat([part.flatten(1) for part in slopes], 1)
            first.lerp_(slope, 0.1)
            second.mul_(0.999).addcmul_(slope, slope, value=0.001)
            divisor = second.sqrt().div_(math.sqrt(1 - 0.999**number)).add_(1e-8)
            rows.addcdiv_(first, divisor, value=-0.01 / (1 - 0.9**number))

        return step


def run(_: str, changes: Mapping[str, Any], seed: int) -> Row:
    """Make one run, and return its test accuracy in per cent."""
    kind = AdamFederation if changes["adam"] else Federation
    federation, mechanism = kind(changes["hidden"], seed), mechanisms.get(changes["mechanism"])
    accuracy = train_and_test(
        federation, mechanism, changes["rate"], seed, changes["rounds"], changes["epsilon"]
    )
    return {"final": accuracy}


def runs_of(store: Kept, task: str) -> dict[str, Cell]:
    """Return a task's cells by rule."""
    return {str(cell.name["rule"]): cell for cell in cells(store, NAME, run, task=task)}


def comparison(store: Kept) -> str:
    """Make the table with one row per task and rule: the accuracy, and its paired changes from flat
    and from per-layer clipping.
    """
    lines = []
    for group in settings(NAME)["groups"]:
        runs = runs_of(store, group["name"]["task"])
        for rule, cell in runs.items():
            figures, line = cell.figures(), [group["title"], rule, f"{cell.rate():g}"]
            line += [spread(figures), str(len(figures))]
            for other in (FLAT, PER_LAYER):
                line += change(figures, runs[other].figures()) if rule != other else [""] * 3
            lines.append(line)
    header = ["task", "rule", "server lr", "accuracy (%)", "seeds", "against flat", *CHANGE[1:]]
    return table([*header, "against per-layer", *CHANGE[1:]], lines)


def texts(store: Kept) -> Pages:
    """Make the page's table."""
    return {"data/adaptive.md": {"water-filling": comparison(store)}}


MAKER = Maker("water-filling.json", texts, lambda store: measure_cells(cells(store, NAME, run)))
