"""Comparison of fixed splits of the noise over the layers with splits that are learned from
released outputs.

A small federation uses the library's data, partition, mechanisms, bounded sums, noise and server
optimizer. Only local training is reimplemented: all clients of a cohort take full-batch steps at
once, which is several times as fast as training the clients one by one. For every method, the
server learning rate is searched in the same way on a separate seed, and the best rate is then run
on other seeds. All runs have the same proven epsilon.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from fedlgm import data, mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.adaptive import AdaptiveAllocation, within
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning import clipping
from fedlgm.planning.allocation import shares, spread
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.training.models.dense import mlp
from fedlgm_lab.studies.tables import noise_and_split
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread as plus_minus
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.runs import Cell, Label, cells, labels, measure_cells
from fedlgm_lab.studies.tables.store import CHANGE, Kept, Row, change
from strategies.server_optimizer import ServerOptimizer

CLIENTS, RATE, ROUNDS, LOCAL_STEPS, LOCAL_RATE = 500, 0.1, 50, 5, 0.5


@dataclass(frozen=True)
class Split(Mechanism):
    """A fixed split over two layers. The second layer has the share `share` of the budget and the
    share `energy` of the squared bound S^2.
    """

    share: float = 0.5
    energy: float = 0.5

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """The same plan in every round."""
        clip = np.sqrt([1 - self.energy, self.energy])
        sigma = spread(np.array([1 - self.share, self.share]), clip, facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", "bounded, then noised"))


@dataclass(frozen=True)
class Updates(AdaptiveAllocation):
    """Shares that follow the released updates instead of the weights: t_j ~ s_j sqrt(d_j) / m_j,
    where m_j is the released norm, corrected for the noise.

    These shares minimise the sum of 1 / SNR_j with SNR_j = m_j^2 / (d_j sigma_j^2). This is the
    SNR-consistent rule with released norms instead of the bounds.
    """

    def _target(self, layers: LayerTable, clip: np.ndarray, transcript: Transcript) -> np.ndarray:
        if transcript.mean is None or transcript.plan is None:
            return shares("snr-consistent", clip, layers.sizes)
        norms = clipping.released_norms(transcript.mean, transcript.plan)
        target = within(clip * np.sqrt(layers.sizes), norms, self.span)
        return np.asarray(target / target.sum())


NAME = "adaptive"
TASKS = ("deep", "small", "splits")
FIXED = labels(NAME, "method")[:3]
LEARNT = {"adaptive, weights": "", "adaptive, weights, span 2": "; span 2"}
"""Methods in the table of all tasks, each with the note that the table adds to its rows."""


class Federation:
    """A federation of 500 clients with the digits (Dirichlet 0.5) and a fully connected network
    with tanh.
    """

    def __init__(self, hidden: tuple[int, ...], seed: int) -> None:
        digits = data.load("digits")
        self.widths = (64, *hidden, 10)
        self.x, self.y = (
            torch.from_numpy(a)
            for a in (np.asarray(digits.train_x).reshape(-1, 64), digits.train_y)
        )
        self.test_x = torch.from_numpy(np.asarray(digits.test_x).reshape(-1, 64))
        self.test_y = torch.from_numpy(digits.test_y)
        parts = list(data.partition(digits.train_y, CLIENTS, "dirichlet", seed=seed, alpha=0.5))
        longest = max(len(part) for part in parts)
        self.index, self.weight = (
            torch.zeros(CLIENTS, longest, dtype=torch.long),
            torch.zeros(CLIENTS, longest),
        )
        for row, part in enumerate(parts):
            self.index[row, : len(part)] = torch.from_numpy(part)
            self.weight[row, : len(part)] = 1 / max(len(part), 1)
        torch.manual_seed(seed)
        module = mlp((1, 8, 8), 10, hidden=hidden)
        self.layers = LayerTable.from_module(module)
        self.start = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    def outputs(self, tensors: Sequence[Tensor], x: Tensor) -> Tensor:
        """Compute the logits of b models on inputs [b, n, 64]. `tensors` holds weights [b, out, in]
        and biases [b, out] in turn.
        """
        for i in range(0, len(tensors), 2):
            x = torch.baddbmm(tensors[i + 1][:, None], x, tensors[i].transpose(1, 2))
            x = torch.tanh(x) if i < len(tensors) - 2 else x
        return x

    def tensors(self, rows: Tensor) -> list[Tensor]:
        """Split models [b, D] into their weights and biases."""
        pieces, position = [], 0
        for width, units in itertools.pairwise(self.widths):
            for shape in ((units, width), (units,)):
                size = math.prod(shape)
                pieces.append(rows[:, position : position + size].unflatten(1, shape))
                position += size
        return pieces

    def updates(self, model: Tensor, cohort: np.ndarray) -> Tensor:
        """Compute the updates [b, D] of the cohort's clients that have data."""
        members = torch.from_numpy(cohort)
        members = members[self.weight[members, 0] > 0]
        length = int((self.weight[members] > 0).sum(1).max()) if len(members) else 1
        weight, y = (
            self.weight[members, :length].flatten(),
            self.y[self.index[members, :length]].flatten(),
        )
        x = self.x[self.index[members, :length]]
        rows = model.repeat(len(members), 1)
        optimizer = self.optimizer(rows)
        for _ in range(LOCAL_STEPS):
            leaves = [piece.contiguous().requires_grad_() for piece in self.tensors(rows)]
            losses = functional.cross_entropy(
                self.outputs(leaves, x).flatten(0, 1), y, reduction="none"
            )
            optimizer(torch.autograd.grad((losses * weight).sum(), leaves))
        return rows - model

    def optimizer(self, rows: Tensor) -> Callable[[Sequence[Tensor]], None]:
        """Return a function that moves models [b, D] by one step of gradient descent, given the
        gradients of `tensors`.
        """

        def step(slopes: Sequence[Tensor]) -> None:
            for piece, slope in zip(self.tensors(rows), slopes, strict=True):
                piece.sub_(slope, alpha=LOCAL_RATE)

        return step

    def accuracy(self, model: Tensor) -> float:
        """Measure the accuracy of a flat model [D] on the test set, in per cent."""
        found = self.outputs(self.tensors(model[None]), self.test_x[None])[0].argmax(1)
        return 100 * float((found == self.test_y).double().mean())


def run(_: str, changes: Mapping[str, Any], seed: int) -> Row:
    """Make one run, and return its test accuracy in per cent."""
    options = dict(changes)
    federation, rate = Federation(options.pop("hidden"), seed), options.pop("rate")
    epsilon, mechanism = options.pop("epsilon"), options.pop("mechanism")
    mechanism = mechanisms.get(mechanism, **options)
    return {"final": train_and_test(federation, mechanism, rate, seed, ROUNDS, epsilon)}


def train_and_test(
    federation: Federation,
    mechanism: Mechanism,
    rate: float,
    seed: int,
    rounds: int,
    epsilon: float,
) -> float:
    """Train a federation for some private rounds, and return the test accuracy in per cent."""
    keys, rng = KeyRing.from_seed(seed), np.random.default_rng(seed)
    layers = mechanism.table(federation.layers)
    facts = RunFacts(
        0.0, Sampling("poisson", CLIENTS, RATE), rounds=rounds, epsilon=epsilon, delta=1e-5
    )
    facts = facts.with_multiplier(mechanism.calibrate(facts))
    server, transcript = ServerOptimizer("momentum", rate), Transcript.start(federation.start)
    for number in range(1, rounds + 1):
        plan = mechanism.plan(layers, facts, transcript)
        total = BoundedSum.empty(plan)
        total.add(
            federation.updates(transcript.models[-1], np.flatnonzero(rng.random(CLIENTS) < RATE))
        )
        mean = (release(total.total, plan, keys, number) / plan.denominator).float()
        transcript = transcript.extend(server.step(transcript.models[-1], mean), mean, plan)
    return federation.accuracy(transcript.models[-1])


def runs_of(store: Kept, task: str) -> dict[Label, Cell]:
    """Return a task's cells by method."""
    runs = {cell.name["method"]: cell for cell in cells(store, NAME, run, task=task)}
    order = [method for method in labels(NAME, "method") if method in runs]
    return {method: runs[method] for method in order or runs}


def best_of(figures: Mapping[Label, pd.Series], candidates: Iterable[Label]) -> Label:
    """Find the candidate with the highest mean figure; "" if no candidate has figures."""
    measured = [method for method in candidates if len(figures.get(method, ()))]
    return max(measured, key=lambda method: figures[method].mean(), default="")


def text_of(store: Kept, task: str) -> str:
    """Make the table with one row per method: the rate, the accuracy, and the paired change from
    the best fixed rule, or from the best split.

    The text is empty until every method has runs.
    """
    runs = runs_of(store, task)
    figures = {method: cell.figures() for method, cell in runs.items()}
    if not all(map(len, figures.values())):
        return ""
    best = best_of(figures, FIXED if FIXED[0] in figures else figures)
    lines = []
    for method, accuracies in figures.items():
        against = ["best fixed", "", ""] if method == best else change(accuracies, figures[best])
        rate = runs[method].rate() or runs[method].name["rate"]
        lines.append([method, f"{rate:g}", plus_minus(accuracies), len(accuracies), *against])
    return table(["method", "server lr", "accuracy (%)", "seeds", *CHANGE], lines)


def all_tasks(store: Kept) -> str:
    """Make the table that compares the learnt splits with the best fixed rule in every task,
    including the tasks of `noise_and_split`.
    """
    lines = []

    def add(label: str, learnt: pd.Series, best: Label, reference: pd.Series) -> None:
        shared = len(learnt.index.intersection(reference.index))
        shown = [plus_minus(reference), plus_minus(learnt)]
        lines.append([label, best, *shown, shared, *change(learnt, reference)])

    for task in ("deep", "small"):
        runs = runs_of(store, task)
        figures = {method: cell.figures() for method, cell in runs.items()}
        best = best_of(figures, FIXED)
        layers = len(runs[FIXED[0]].changes["hidden"]) + 1
        for method, note in LEARNT.items():
            if best and len(figures[method]):
                add(f"digits, {layers} layers{note}", figures[method], best, figures[best])
    others = noise_and_split.MAKER.open(store.folder)
    assert isinstance(others, Kept)
    for task in noise_and_split.TASKS:
        other = noise_and_split.runs_of(others, task)
        by_noise = noise_and_split.figures_by_cell(other)
        for noise in noise_and_split.NOISES if other else ():
            best = noise_and_split.best_fixed(by_noise, noise, noise_and_split.better_of(other))
            learnt = by_noise[noise, noise_and_split.ADAPTIVE]
            add(f"{task}; {noise}", learnt, best, by_noise[noise, best])
    header = ["task", "best fixed", "its figure", "adaptive", "seeds", *CHANGE]
    return table(header, lines) if lines else ""


def texts(store: Kept) -> Pages:
    """Make a table for every complete task, and the table of all tasks."""
    shown = {task: text_of(store, task) for task in TASKS}
    return {"data/adaptive.md": shown | {"all tasks": all_tasks(store)}}


def measure(store: Kept) -> None:
    """Make the missing runs in order: a task's search, then all methods seed by seed."""
    for task in TASKS:
        measure_cells(cells(store, NAME, run, task=task))


MAKER = Maker("adaptive.json", texts, measure, partial=True)
