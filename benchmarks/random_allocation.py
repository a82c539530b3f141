"""Accuracy at equal epsilon: random allocation against Poisson sampling, paired over seeds.

`python -m benchmarks.random_allocation` writes docs/results/random-allocation.json, run by run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import simulations

FILE = Path(__file__).parents[1] / "docs" / "results" / "random-allocation.json"
SEEDS = range(1, 6)
SETTINGS = {
    "digits": ("digits", (2.0, 8.0), {"training.kernel": "native"}),
    "fashion-mnist": (
        "fashion-mnist",
        (3.0,),
        {"federation.rounds": 100, "model.name": "mlp", "model.hidden": [32]},
    ),
}
DRAWS = {
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


if __name__ == "__main__":
    main(sys.argv[1:])
