"""Which allocation is best on the digits federation? `python -m benchmarks.allocations` (about five minutes on a core).

Every method gets the same search (server learning rate on a separate seed at epsilon = 3) and is then run on other
seeds. Writes docs/results/allocations.md and allocations.png.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import matplotlib as mpl

from benchmarks.pages import put, spread, table
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
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def accuracy(overrides: list[str], epsilon: float, rate: float, seed: int) -> float:
    settings = [f"privacy.epsilon={epsilon}", f"federation.server_lr={rate}", f"run.seed={seed}"]
    every = ["federation.rounds=50", "run.evaluate_every=100", "run.checkpoint_every=100"]
    with tempfile.TemporaryDirectory() as directory:
        recipe = recipes.load("digits", [*overrides, *settings, *every])
        return float(launch.simulate(recipe, engine="local", run_dir=Path(directory) / "run")["accuracy"])


def main() -> None:
    found: dict[str, tuple[float, dict[float, list[float]]]] = {}
    for name, overrides in METHODS.items():
        rate = max(RATES, key=lambda r, o=overrides: accuracy(o, 3.0, r, SEARCH_SEED))
        found[name] = rate, {e: [accuracy(overrides, e, rate, seed) for seed in SEEDS] for e in EPSILONS}
        print(name, rate, {e: round(statistics.mean(a), 4) for e, a in found[name][1].items()}, flush=True)
    lines = []
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, (rate, by_epsilon) in found.items():
        lines.append([name, f"{rate:g}", *(spread(a, 100, 1) for a in by_epsilon.values())])
        means = [statistics.mean(a) for a in by_epsilon.values()]
        axes.errorbar(EPSILONS, means, [statistics.stdev(a) for a in by_epsilon.values()], marker="o", label=name)
    axes.set(xscale="log", xlabel="proven epsilon (delta = 1e-5)", ylabel="test accuracy", title="digits, 500 clients")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(RESULTS / "allocations.png", dpi=100)
    header = ["method", "server lr", *(f"epsilon {e:g}" for e in EPSILONS)]
    put(RESULTS / "allocations.md", "table", table(header, lines))


if __name__ == "__main__":
    main()
