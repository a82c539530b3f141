"""Splits of the noise over the layers, fixed and learnt from released outputs: figures of docs/results/adaptive.md.

    python -m benchmarks.adaptive [--tasks NAME ...] [--minutes M] [--write]

A small federation around the library's own parts: its data, partition, mechanisms and their plans, bounded sums, noise
and server optimizer. Only local training is written anew: full-batch steps of all clients of a cohort at once, several
times as fast as training them one by one. Every method gets the same search (server learning rate, on a seed of its
own) and is then run on other seeds, all at one proven epsilon. A run is a line of JSON in a file as soon as it is done;
a second call goes on where the first one stopped. `--write` puts tables of what there is into the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional

from benchmarks.pages import put, table
from fedlgm import clipping, data, mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.allocation import shares, spread
from fedlgm.facts import RunFacts, Sampling
from fedlgm.keys import KeyRing
from fedlgm.layers import LayerTable
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.adaptive import AdaptiveAllocation, within
from fedlgm.models.dense import mlp
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.release import release
from fedlgm.transcript import Transcript
from strategies.server_optimizer import ServerOptimizer

PAGE = Path(__file__).parents[1] / "docs" / "results" / "adaptive.md"
CLIENTS, RATE, ROUNDS, LOCAL_STEPS, LOCAL_RATE = 500, 0.1, 50, 5, 0.5
SEARCH_SEED, SEEDS = 100, tuple(range(1, 6))


@dataclass(frozen=True)
class Split(Mechanism):
    """Two layers at a fixed split: the second has the share `share` of the budget and `energy` of S^2."""

    share: float = 0.5
    energy: float = 0.5

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """The same plan in every round."""
        clip = np.sqrt([1 - self.energy, self.energy])
        sigma = spread(np.array([1 - self.share, self.share]), clip, facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", "bounded, then noised"))


@dataclass(frozen=True)
class Updates(AdaptiveAllocation):
    """Shares that follow released updates, not weights: t_j ~ s_j sqrt(d_j) / m_j, m_j the norm without its noise.

    That is the least sum of 1 / SNR_j with SNR_j = m_j^2 / (d_j sigma_j^2): the SNR-consistent rule with what was
    released in the place of the bounds.
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
    "adaptive, weights": mechanisms.get("adaptive"),
    "adaptive, updates": Updates("updates"),
    "LaDP-FL": mechanisms.get("ladp"),
    "LaDP-FL, memory 0": mechanisms.get("ladp", memory=0.0),
}
SPLITS: dict[str, Mechanism] = {
    f"share {share:g}, energy {energy:g}": Split("split", share, energy)
    for share, energy in itertools.product((0.1, 0.25, 0.5, 0.75), (0.1, 0.25, 0.5, 0.8))
}


@dataclass(frozen=True)
class Task:
    """A model, a budget, and the server learning rates of the search."""

    hidden: tuple[int, ...]
    epsilon: float
    rates: tuple[float, ...]
    methods: dict[str, Mechanism]
    seeds: tuple[int, ...] = SEEDS


TASKS = {
    "deep": Task((64, 32, 32), 3.0, (0.05, 0.1, 0.2), FIXED | LEARNT),
    "small": Task((32,), 1.0, (0.025, 0.05, 0.1), FIXED | LEARNT),
    "splits": Task((32,), 1.0, (0.1,), SPLITS, SEEDS[:4]),
}


class Federation:
    """Digits over 500 clients (Dirichlet 0.5) and a stack of fully connected layers with tanh."""

    def __init__(self, hidden: tuple[int, ...], seed: int) -> None:
        digits = data.load("digits")
        self.widths = (64, *hidden, 10)
        self.x, self.y = (torch.from_numpy(a) for a in (np.asarray(digits.train_x).reshape(-1, 64), digits.train_y))
        self.test_x = torch.from_numpy(np.asarray(digits.test_x).reshape(-1, 64))
        self.test_y = torch.from_numpy(digits.test_y)
        parts = list(data.partition(digits.train_y, CLIENTS, "dirichlet", seed=seed, alpha=0.5))
        longest = max(len(part) for part in parts)
        self.index, self.weight = torch.zeros(CLIENTS, longest, dtype=torch.long), torch.zeros(CLIENTS, longest)
        for row, part in enumerate(parts):
            self.index[row, : len(part)] = torch.from_numpy(part)
            self.weight[row, : len(part)] = 1 / max(len(part), 1)
        torch.manual_seed(seed)
        module = mlp((1, 8, 8), 10, hidden=hidden)
        self.layers = LayerTable.from_module(module)
        self.start = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    def outputs(self, tensors: Sequence[Tensor], x: Tensor) -> Tensor:
        """Logits of b models, weights [b, out, in] and biases [b, out] in turn, on inputs [b, n, 64]."""
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
        weight, y = self.weight[members, :length].flatten(), self.y[self.index[members, :length]].flatten()
        x = self.x[self.index[members, :length]]
        rows = model.repeat(len(members), 1)
        for _ in range(LOCAL_STEPS):
            leaves = [piece.contiguous().requires_grad_() for piece in self.tensors(rows)]
            losses = functional.cross_entropy(self.outputs(leaves, x).flatten(0, 1), y, reduction="none")
            slopes = torch.autograd.grad((losses * weight).sum(), leaves)
            for piece, slope in zip(self.tensors(rows), slopes, strict=True):
                piece.sub_(slope, alpha=LOCAL_RATE)
        return rows - model

    def accuracy(self, model: Tensor) -> float:
        """On the test set, in per cent."""
        found = self.outputs(self.tensors(model[None]), self.test_x[None])[0].argmax(1)
        return 100 * float((found == self.test_y).double().mean())


def run(task: Task, mechanism: Mechanism, rate: float, seed: int) -> float:
    """Test accuracy, in per cent, of one run."""
    federation, keys, rng = Federation(task.hidden, seed), KeyRing.from_seed(seed), np.random.default_rng(seed)
    layers = mechanism.table(federation.layers)
    facts = RunFacts(0.0, Sampling("poisson", CLIENTS, RATE), rounds=ROUNDS, epsilon=task.epsilon, delta=1e-5)
    facts = facts.with_multiplier(mechanism.calibrate(facts))
    server, transcript = ServerOptimizer("momentum", rate), Transcript.start(federation.start)
    for number in range(1, ROUNDS + 1):
        plan = mechanism.plan(layers, facts, transcript)
        total = BoundedSum.empty(plan)
        total.add(federation.updates(transcript.models[-1], np.flatnonzero(rng.random(CLIENTS) < RATE)))
        mean = (release(total.total, plan, keys, number) / plan.denominator).float()
        transcript = transcript.extend(server.step(transcript.models[-1], mean), mean, plan)
    return federation.accuracy(transcript.models[-1])


Cell = tuple[str, str, float, int]


def best_rate(done: dict[Cell, float], name: str, method: str) -> float | None:
    """The rate that the search chose, once all of its runs are there."""
    found = {rate: done.get((name, method, rate, SEARCH_SEED)) for rate in TASKS[name].rates}
    if len(found) == 1:
        return TASKS[name].rates[0]
    known = {rate: accuracy for rate, accuracy in found.items() if accuracy is not None}
    return max(known, key=lambda rate: known[rate]) if len(known) == len(found) else None


def cells(done: dict[Cell, float], names: list[str]) -> Iterator[Cell]:
    """Runs in their order: a task's search, then all methods seed by seed."""
    for name in names:
        task = TASKS[name]
        if len(task.rates) > 1:
            yield from ((name, method, rate, SEARCH_SEED) for method in task.methods for rate in task.rates)
        for seed, method in itertools.product(task.seeds, task.methods):
            rate = best_rate(done, name, method)
            assert rate is not None
            yield name, method, rate, seed


def read(file: Path) -> dict[Cell, float]:
    """Finished runs."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {(row["task"], row["method"], row["rate"], row["seed"]): row["accuracy"] for row in rows}


def summary(done: dict[Cell, float], name: str) -> list[dict[str, Any]]:
    """One row per method: rate, accuracies, paired change against the best fixed rule (the best split) and its p."""
    task = TASKS[name]
    found: dict[str, tuple[float, dict[int, float]]] = {}
    for method in task.methods:
        rate = best_rate(done, name, method)
        values = {seed: done[name, method, rate, seed] for seed in task.seeds if (name, method, rate, seed) in done}  # type: ignore[index]
        if rate is not None and len(values) > 1:
            found[method] = rate, values
    candidates = [method for method in found if method in FIXED or method in SPLITS]
    if not candidates:
        return []
    best = max(candidates, key=lambda method: statistics.mean(found[method][1].values()))
    table = []
    for method, (rate, values) in found.items():
        common = sorted(set(values) & set(found[best][1]))
        change = np.array([values[seed] - found[best][1][seed] for seed in common])
        p = float(stats.ttest_1samp(change, 0.0).pvalue) if change.any() and len(change) > 1 else None
        mean, std = statistics.mean(values.values()), statistics.stdev(values.values())
        table.append({"method": method, "rate": rate, "seeds": len(values), "mean": mean, "std": std})
        table[-1] |= {"change": float(change.mean()), "p": p}
    return table


def write(done: dict[Cell, float]) -> None:
    """Put the tables between the markers of the results page."""
    for name in TASKS:
        lines = []
        for row in summary(done, name):
            p = "" if row["p"] is None else f"{row['p']:.2g}"
            change = "best fixed" if row["p"] is None and row["change"] == 0 else f"{row['change']:+.2f}"
            mean = f"{row['mean']:.2f} ± {row['std']:.2f}"
            lines.append([row["method"], f"{row['rate']:g}", mean, str(row["seeds"]), change, p])
        if lines:
            put(PAGE, name, table(["method", "server lr", "accuracy (%)", "seeds", "change", "p"], lines))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Splits of the noise over the layers on digits.")
    parser.add_argument("--file", type=Path, default=Path("runs/adaptive.jsonl"), help="finished runs")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--minutes", type=float, default=60.0, help="processor time after which no run is started")
    parser.add_argument("--write", action="store_true", help="write docs/results/adaptive.md, run nothing")
    options = parser.parse_args()
    done = read(options.file)
    if options.write:
        write(done)
        return
    torch.set_num_threads(1)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    for cell in cells(done, options.tasks):
        if cell in done:
            continue
        if time.process_time() > 60 * options.minutes:
            return
        name, method, rate, seed = cell
        done[cell] = run(TASKS[name], TASKS[name].methods[method], rate, seed)
        row = {"task": name, "method": method, "rate": rate, "seed": seed, "accuracy": done[cell]}
        with options.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
