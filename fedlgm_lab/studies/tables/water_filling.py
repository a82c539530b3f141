"""Water-filling beside flat and per-layer clipping.

The three rules add the same noise to the sum and differ only in what they keep of a large update.
Clients are trained at once as in `adaptive`, and every rule gets the same search of the server
learning rate over three seeds before it is run with five others. `real_models` has models for text.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedlgm import mechanisms
from fedlgm_lab.studies.tables.adaptive import Federation, train_and_test
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change

FLAT, PER_LAYER, FILLING = RULES = ("gaussian", "uniform", "water-filling")
SEARCHED, SEEDS = (100, 101, 102), (1, 2, 3, 4, 5)
ROUNDS, EPSILON = 30, 3.0


class Digits(NamedTuple):
    """A network on digits, its clients' optimizer and the searched server learning rates."""

    title: str
    hidden: tuple[int, ...]
    adam: bool
    rates: tuple[float, ...] = (0.1, 0.2, 0.4)


DIGITS = {
    "wide": Digits(
        "digits, 64-8-1024-8-10, Adam", (8, 1024, 8), adam=True, rates=(0.05, 0.1, 0.2, 0.4)
    ),
    "small": Digits("digits, 64-32-10, SGD", (32,), adam=False),
    "wide-sgd": Digits("digits, 64-8-1024-8-10, SGD", (8, 1024, 8), adam=False),
    "falling": Digits("digits, 64-256-16-10, Adam", (256, 16), adam=True),
    "deep": Digits("digits, 64-64-32-32-10, Adam", (64, 32, 32), adam=True),
}


class AdamFederation(Federation):
    """The federation of `adaptive` with Adam on the clients, at the learning rate
    0.01.
    """

    def optimizer(self, rows: Tensor) -> Callable[[Sequence[Tensor]], None]:
        """A function that moves models [b, D] by one step of Adam, given the gradients of
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


def run(task: str, rule: str, rate: float, seed: int) -> dict[str, float]:
    """Test accuracy, in per cent, of one run."""
    setting = DIGITS[task]
    federation = (AdamFederation if setting.adam else Federation)(setting.hidden, seed)
    return {
        "accuracy": train_and_test(federation, mechanisms.get(rule), rate, seed, ROUNDS, EPSILON)
    }


def best_rate(store: Kept, task: str, rule: str) -> float:
    """The rate of the final runs, which the search chose."""

    def accuracy_at(rate: float) -> float:
        rows = store.find(task=task, rule=rule, rate=rate)
        return statistics.fmean(row["accuracy"] for row in rows if row["seed"] in SEARCHED)

    return max(DIGITS[task].rates, key=accuracy_at)


def missing(store: Kept, task: str) -> Iterator[tuple[str, float, int]]:
    """(rule, rate, seed) of a task's runs in order: its search, then all rules seed by seed."""
    for seed, rule, rate in itertools.product(SEARCHED, RULES, DIGITS[task].rates):
        yield rule, rate, seed
    for seed, rule in itertools.product(SEEDS, RULES):
        yield rule, best_rate(store, task, rule), seed


def comparison(store: Kept) -> str:
    """One row per task and rule: accuracy, and the paired changes against both other rules."""
    lines = []
    for task, setting in DIGITS.items():
        best = {rule: best_rate(store, task, rule) for rule in RULES}
        found = {rule: store.find(task=task, rule=rule, rate=rate) for rule, rate in best.items()}
        cells = {
            rule: {row["seed"]: row["accuracy"] for row in rows} for rule, rows in found.items()
        }
        for rule, rows in cells.items():
            own = {seed: figure for seed, figure in rows.items() if seed in SEEDS}
            against = [
                cell
                for one in (FLAT, PER_LAYER)
                for cell in (change(own, cells[one]) if rule != one else [""] * 3)
            ]
            lines.append(
                [
                    setting.title,
                    rule,
                    f"{best[rule]:g}",
                    spread(list(own.values())),
                    str(len(own)),
                    *against,
                ]
            )
    header = ["task", "rule", "server lr", "accuracy (%)", "seeds", "against flat", *CHANGE[1:]]
    return table([*header, "against per-layer", *CHANGE[1:]], lines)


def measure(store: Kept) -> None:
    """All tasks."""
    for task in DIGITS:
        for rule, rate, seed in missing(store, task):
            name = {"task": task, "rule": rule, "rate": rate, "seed": seed}
            store.keep(name, partial(run, **name))


def texts(store: Kept) -> Pages:
    """The table of its page."""
    return {"data/adaptive.md": {"water-filling": comparison(store)}}


MAKER = Maker("water-filling.json", texts, measure)
