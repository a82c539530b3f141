"""Allocations on the digits federation, and the picture of the README.

Every method gets the same search (server learning rate on a separate seed at epsilon = 3) and is
then run on other seeds.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.store import Values
from simulations import launch
from simulations.config import recipe as recipes

mpl.use("Agg")
import matplotlib.pyplot as plt

METHODS = {
    "flat Gaussian": ["mechanism.name=gaussian"],
    "uniform": ["mechanism.name=uniform"],
    "dimension-adjusted": ["mechanism.name=dimension-adjusted"],
    "SNR-consistent": ["mechanism.name=snr-consistent"],
    "SNR-consistent, MedClip (stale)": ["mechanism.clip=med", "mechanism.norms=stale"],
    "SNR-consistent, MedClip (quantile)": ["mechanism.clip=med", "mechanism.norms=quantile"],
    "max-SNR-sum": ["mechanism.name=max-snr-sum"],
}
RATES, EPSILONS = (0.1, 0.2, 0.4), (1.0, 3.0, 8.0)
SEARCH_SEED, SEEDS = 100, (1, 2, 3)
TICKS = (1, 2, 3, 4, 6, 8)


def accuracy(overrides: list[str], epsilon: float, rate: float, seed: int) -> float:
    settings = [f"privacy.epsilon={epsilon}", f"federation.server_lr={rate}", f"run.seed={seed}"]
    every = ["federation.rounds=50", "run.evaluate_every=100", "run.checkpoint_every=100"]
    with tempfile.TemporaryDirectory() as directory:
        recipe = recipes.load("digits", [*overrides, *settings, *every])
        return float(
            launch.simulate(recipe, engine="local", run_dir=Path(directory) / "run")["accuracy"]
        )


def measure(store: Values) -> None:
    """Search and runs, as far as they are missing."""
    for name, overrides in METHODS.items():
        for rate in RATES:
            store.get(
                f"search {name} {rate:g}",
                lambda o=overrides, r=rate: accuracy(o, 3.0, r, SEARCH_SEED),
            )
        rate = best(store.values, name)
        for epsilon in EPSILONS:
            store.get(f"run {name} {epsilon:g}", lambda o=overrides, e=epsilon, r=rate: [
                accuracy(o, e, r, seed) for seed in SEEDS
            ])  # fmt: skip


def best(values: Mapping[str, Any], name: str) -> float:
    """The rate that the search chose for a method."""
    return max(RATES, key=lambda rate: float(values[f"search {name} {rate:g}"]))


def texts(store: Values) -> Pages:
    """Accuracy by method and epsilon."""
    values = store.values
    lines = [
        [
            name,
            f"{best(values, name):g}",
            *(spread(values[f"run {name} {e:g}"], 100, 1) for e in EPSILONS),
        ]
        for name in METHODS
    ]
    head = ["method", "server lr", *(f"epsilon {e:g}" for e in EPSILONS)]
    return {"allocations.md": {"table": table(head, lines)}}


def draw(store: Values, path: Path) -> None:
    """The picture that the README shows."""
    values = store.values
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in METHODS:
        found = [values[f"run {name} {e:g}"] for e in EPSILONS]
        means, spreads = map(statistics.mean, found), map(statistics.stdev, found)
        axes.errorbar(EPSILONS, list(means), list(spreads), marker="o", label=name)
    axes.set(
        xscale="log",
        xlabel="proven epsilon (delta = 1e-5)",
        ylabel="test accuracy",
        title="digits, 500 clients",
    )
    axes.set_xticks(TICKS, map(str, TICKS))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


MAKER = Maker("allocations.json", texts, measure, Values, {"allocations.png": draw})
