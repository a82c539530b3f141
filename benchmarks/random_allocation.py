"""Accuracy at equal epsilon: random allocation against Poisson sampling, paired over seeds.

`python -m benchmarks.random_allocation` writes docs/results/random-allocation.json, run by run, and
the table of docs/how-to/random-allocation.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import simulations
from benchmarks.pages import put, spread, table

_DOCS = Path(__file__).parents[1] / "docs"
FILE, PAGE = _DOCS / "results" / "random-allocation.json", _DOCS / "how-to" / "random-allocation.md"
SEEDS = range(1, 6)
SETTINGS: dict[str, tuple[str, tuple[float, ...], dict[str, Any]]] = {
    "digits": ("digits", (2.0, 8.0), {"training.kernel": "native"}),
    "fashion-mnist": (
        "fashion-mnist",
        (3.0,),
        {"federation.rounds": 100, "model.name": "mlp", "model.hidden": [32]},
    ),
}
DRAWS: dict[str, dict[str, Any]] = {
    "poisson": {"federation.sampling": "poisson", "federation.rate": 0.1},
    "allocation": {"federation.sampling": "allocation", "federation.participations": 10},
}


def main(names: list[str]) -> None:
    """Run what the file does not hold yet."""
    rows = json.loads(FILE.read_text()) if FILE.is_file() else []
    done = {(row["data"], row["epsilon"], row["seed"], row["sampling"]) for row in rows}
    for data in names or SETTINGS:
        recipe, epsilons, changes = SETTINGS[data]
        for epsilon in epsilons:
            for seed in SEEDS:
                for sampling, draws in DRAWS.items():
                    if (data, epsilon, seed, sampling) in done:
                        continue
                    overrides = {**changes, **draws, "privacy.epsilon": epsilon, "run.seed": seed}
                    with tempfile.TemporaryDirectory() as folder:
                        result = simulations.simulate(
                            recipe, overrides=overrides, run_dir=Path(folder) / "run"
                        )
                    rows.append(
                        {
                            "data": data,
                            "epsilon": epsilon,
                            "seed": seed,
                            "sampling": sampling,
                            "noise_multiplier": result["noise_multiplier"],
                            "proven_epsilon": result.epsilon,
                            "accuracy": result.accuracy,
                        }
                    )
                    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    put(PAGE, "accuracy", accuracy_table(rows))


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    """Accuracies in percent by data and epsilon, with the paired difference."""
    cells: dict[tuple[str, float], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        cell = cells.setdefault((row["data"], row["epsilon"]), {draw: {} for draw in DRAWS})
        cell[row["sampling"]][row["seed"]] = row
    lines = []
    for (data, epsilon), cell in cells.items():
        seeds = sorted(set(cell["poisson"]) & set(cell["allocation"]))
        if len(seeds) < 2:
            continue
        means = {draw: [100 * cell[draw][seed]["accuracy"] for seed in seeds] for draw in DRAWS}
        gains = [b - a for a, b in zip(means["poisson"], means["allocation"], strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        noise = [f"{cell[draw][seeds[0]]['noise_multiplier']:.3f}" for draw in DRAWS]
        lines.append(
            [
                data,
                f"{epsilon:g}",
                " / ".join(noise),
                *(spread(means[draw]) for draw in DRAWS),
                f"{statistics.fmean(gains):+.2f} ± {error:.2f}",
            ]
        )
    header = [
        "data",
        "epsilon",
        "noise: Poisson / allocation",
        "Poisson",
        "allocation",
        "difference",
    ]
    return table(header, lines)


if __name__ == "__main__":
    main(sys.argv[1:])
