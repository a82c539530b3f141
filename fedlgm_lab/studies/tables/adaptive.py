"""Splits of the noise over the layers, fixed and learned from released outputs.

A small federation of the library's parts: data, partition, mechanisms and their plans, bounded
sums, noise and server optimizer. Only local training is reimplemented: full-batch steps of all
clients of a cohort at once, several times as fast as training them one by one. Every method gets
the same search (server learning rate, on a separate seed) and is then run on other seeds, all at
one proven epsilon.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
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
from fedlgm_lab.studies.tables.searched import Cell, Search
from fedlgm_lab.studies.tables.store import CHANGE, Kept, Row, change
from strategies.server_optimizer import ServerOptimizer

CLIENTS, RATE, ROUNDS, LOCAL_STEPS, LOCAL_RATE = 500, 0.1, 50, 5, 0.5
SEEDS = tuple(range(1, 11))


@dataclass(frozen=True)
class Split(Mechanism):
    """Two layers at a fixed split: the second has the share `share` of the budget and `energy` of
    S^2.
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
    """Shares that follow released updates, not weights: t_j ~ s_j sqrt(d_j) / m_j, m_j the norm
    without its noise.

    That is the least sum of 1 / SNR_j with SNR_j = m_j^2 / (d_j sigma_j^2): the SNR-consistent rule
    with released norms instead of the bounds.
    """

    def _target(self, layers: LayerTable, clip: np.ndarray, transcript: Transcript) -> np.ndarray:
        if transcript.mean is None or transcript.plan is None:
            return shares("snr-consistent", clip, layers.sizes)
        norms = clipping.released_norms(transcript.mean, transcript.plan)
        target = within(clip * np.sqrt(layers.sizes), norms, self.span)
        return np.asarray(target / target.sum())


FIXED: dict[str, Mechanism] = {
    "flat Gaussian": mechanisms.get("gaussian"),
    "uniform": mechanisms.get("uniform"),
    "SNR-consistent": mechanisms.get("snr-consistent"),
}
LEARNT: dict[str, Mechanism] = {
    "MedClip (stale), uniform": mechanisms.get("uniform", clip="med", norms="stale"),
    "adaptive, weights": mechanisms.get("adaptive", span=8.0),
    "adaptive, weights, span 2": mechanisms.get("adaptive", span=2.0),
    "adaptive, weights, memory 0": mechanisms.get("adaptive", memory=0.0, span=8.0),
    "adaptive, weights, memory 1": mechanisms.get("adaptive", memory=1.0, span=8.0),
    "adaptive, updates": Updates("updates"),
    "LaDP-FL": mechanisms.get("ladp"),
    "LaDP-FL, memory 0": mechanisms.get("ladp", memory=0.0),
}
SPLITS: dict[str, Mechanism] = {
    f"share {share:g}, energy {energy:g}": Split("split", share, energy)
    for share, energy in itertools.product((0.1, 0.25, 0.5, 0.75), (0.1, 0.25, 0.5, 0.8))
}


FOLLOWED = (*FIXED, "adaptive, weights", "adaptive, weights, span 2")
"""Methods that are compared on all seeds; the others have the first five, splits the first four."""


@dataclass(frozen=True)
class Task:
    """A model, a budget, and the search of the server learning rate."""

    hidden: tuple[int, ...]
    epsilon: float
    search: Search
    methods: dict[str, Mechanism]

    def seeds(self, method: str) -> tuple[int, ...]:
        """Seeds of a method, in this order."""
        return SEEDS if method in FOLLOWED else SEEDS[:4] if method in SPLITS else SEEDS[:5]


TASKS = {
    "deep": Task((64, 32, 32), 3.0, Search((0.05, 0.1, 0.2), 0.0125, 0.8), FIXED | LEARNT),
    "small": Task((32,), 1.0, Search((0.025, 0.05, 0.1), 0.0125, 0.8), FIXED | LEARNT),
    "splits": Task((32,), 1.0, Search((0.1,), 0.1, 0.1), SPLITS),
}


class Federation:
    """Digits over 500 clients (Dirichlet 0.5) and a stack of fully connected layers with tanh."""

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
        """Logits of b models, weights [b, out, in] and biases [b, out] in turn, on inputs [b, n,
        64].
        """
        for i in range(0, len(tensors), 2):
            x = torch.baddbmm(tensors[i + 1][:, None], x, tensors[i].transpose(1, 2))
            x = torch.tanh(x) if i < len(tensors) - 2 else x
        return x

    def tensors(self, rows: Tensor) -> list[Tensor]:
        """Weights and biases of models [b, D]."""
        pieces, position = [], 0
        for width, units in itertools.pairwise(self.widths):
            for shape in ((units, width), (units,)):
                size = math.prod(shape)
                pieces.append(rows[:, position : position + size].unflatten(1, shape))
                position += size
        return pieces

    def updates(self, model: Tensor, cohort: np.ndarray) -> Tensor:
        """Updates [b, D] of the cohort's clients that have data."""
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
        """A function that moves models [b, D] by one step of gradient descent, given the gradients
        of `tensors`.
        """

        def step(slopes: Sequence[Tensor]) -> None:
            for piece, slope in zip(self.tensors(rows), slopes, strict=True):
                piece.sub_(slope, alpha=LOCAL_RATE)

        return step

    def accuracy(self, model: Tensor) -> float:
        """Accuracy on the test set, in per cent."""
        found = self.outputs(self.tensors(model[None]), self.test_x[None])[0].argmax(1)
        return 100 * float((found == self.test_y).double().mean())


def run(task: Task, mechanism: Mechanism, rate: float, seed: int) -> Row:
    """Test accuracy, in per cent, of one run."""
    federation = Federation(task.hidden, seed)
    return {"accuracy": train_and_test(federation, mechanism, rate, seed, ROUNDS, task.epsilon)}


def train_and_test(
    federation: Federation,
    mechanism: Mechanism,
    rate: float,
    seed: int,
    rounds: int,
    epsilon: float,
) -> float:
    """Test accuracy, in per cent, after private rounds of a federation."""
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


def runs_of(store: Kept, name: str, method: str) -> Cell:
    """The runs of a method on a task."""
    task = TASKS[name]
    label = {"task": name, "method": method}
    return Cell(
        store, label, task.search, partial(run, task, task.methods[method]), figure="accuracy"
    )


def best_rate(store: Kept, name: str, method: str) -> float | None:
    """The rate that the search chose, once it is over; the only one where there is no choice."""
    search = TASKS[name].search
    only = search.grid[0] if search.least == search.most else None
    return only if only is not None else runs_of(store, name, method).best()


def measure(store: Kept) -> None:
    """Missing runs in order: a task's search, then all methods seed by seed."""
    for name, task in TASKS.items():
        if task.search.least < task.search.most:
            for method in task.methods:
                runs_of(store, name, method).finish_search()
        for seed, method in itertools.product(SEEDS, task.methods):
            if seed in task.seeds(method):
                runs_of(store, name, method).measure(best_rate(store, name, method), seed)


def figures_by_method(store: Kept, name: str) -> dict[str, dict[int, float]]:
    """Accuracies of every method at the rate that its search chose, by seed."""
    cells = {}
    for method in TASKS[name].methods:
        rows = store.find(task=name, method=method, rate=best_rate(store, name, method))
        cells[method] = {
            row["seed"]: row["accuracy"] for row in rows if row["seed"] != TASKS[name].search.seed
        }
    return {method: own for method, own in cells.items() if own}


def best_of(cells: dict[str, dict[int, float]], candidates: Iterable[str]) -> str:
    """The best candidate on average, among those with figures; "" if there is none."""
    known = [method for method in candidates if cells.get(method)]
    return max(known, key=lambda method: statistics.fmean(cells[method].values()), default="")


def text_of(store: Kept, name: str) -> str:
    """One row per method: rate, accuracies, paired change against the best fixed rule (the best
    split).

    Empty until every method has runs.
    """
    cells = figures_by_method(store, name)
    if set(cells) != set(TASKS[name].methods):
        return ""
    best = best_of(cells, [*FIXED, *SPLITS])
    lines = []
    for method, own in cells.items():
        against = ["best fixed", "", ""] if method == best else change(own, cells[best])
        rate = f"{best_rate(store, name, method):g}"
        lines.append([method, rate, plus_minus(list(own.values())), str(len(own)), *against])
    return table(["method", "server lr", "accuracy (%)", "seeds", *CHANGE], lines)


def all_tasks(store: Kept) -> str:
    """The learnt split against the best fixed rule of every task, those of `noise_and_split`
    included.
    """
    lines = []

    def add(label: str, own: dict[int, float], best: str, reference: dict[int, float]) -> None:
        cells = [plus_minus(list(values.values())) for values in (reference, own)]
        lines.append(
            [label, best, *cells, str(len(own.keys() & reference.keys())), *change(own, reference)]
        )

    for name, task in TASKS.items():
        cells = figures_by_method(store, name)
        label = f"digits, {len(task.hidden) + 1} layers"
        best = best_of(cells, FIXED)
        for method, note in {
            "adaptive, weights": "",
            "adaptive, weights, span 2": "; span 2",
        }.items():
            if best and method in cells:
                add(label + note, cells[method], best, cells[best])
    others = noise_and_split.MAKER.open(store.folder)
    assert isinstance(others, Kept)
    for name, other in noise_and_split.TASKS.items():
        by_noise = noise_and_split.figures_by_cell(others, name)
        for noise in noise_and_split.NOISES if all(by_noise.values()) else ():
            best = noise_and_split.best_fixed(by_noise, noise, other.search.better)
            add(
                f"{name}; {noise}",
                by_noise[noise, noise_and_split.ADAPTIVE],
                best,
                by_noise[noise, best],
            )
    return (
        table(["task", "best fixed", "its figure", "adaptive", "seeds", *CHANGE], lines)
        if lines
        else ""
    )


def texts(store: Kept) -> Pages:
    """Every complete task, and all tasks together."""
    shown = {name: text_of(store, name) for name in TASKS}
    return {"data/adaptive.md": shown | {"all tasks": all_tasks(store)}}


MAKER = Maker("adaptive.json", texts, measure, partial=True)
