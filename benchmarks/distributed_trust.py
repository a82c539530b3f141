"""Accuracy by who adds the noise, at two epsilons: the table of docs/how-to/distributed-trust.md.

    python -m benchmarks.distributed_trust           # the runs that are not kept yet
    python -m benchmarks.distributed_trust --write   # the page's table from the kept runs

The recipe is `distributed-digits`. Nothing but who adds the noise, the number of nodes, the budget, the learning rate
and the seed differs. Every cell chooses among the same learning rates, by the accuracy of a seed that the table does
not use. Epsilon is that against the server where nodes add the noise, under replace-one everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import show, spread, table

KEPT = Path(__file__).parents[1] / "docs" / "results" / "distributed-trust.json"
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "distributed-trust.md"
NODES = {30: (20, 3), 100: (67, 10), 10: (7, 1)}
BUDGETS = (8.0, 2.0)
SETTINGS = ((0.5, 0.15), (0.5, 0.5), (0.5, 1.5))  # bound of an update, learning rate
SMALLER = ((0.2, 0.15), (0.2, 0.5))  # of which the kept file has some runs; the page names them beside the table
SEARCH = 11
SEEDS = (1, 2, 3)
_ALONE = {"distributed": None}
_CENTRAL = {"privacy.trust": "central", "privacy.max_participations": None, **_ALONE}
TRUST: dict[str, dict[str, Any]] = {
    "no noise to speak of": {"privacy.epsilon": 1e6, **_CENTRAL},
    "trusted server": _CENTRAL,
    "in shares": {},
    "each node alone": {"privacy.trust": "local", **_ALONE},
}
_FREE = next(iter(TRUST))
_NAMES = ("trust", "nodes", "budget", "bound", "lr", "seed")
Cell = tuple[str, int, float]
Settings = tuple[tuple[float, float], ...]


def cells() -> Iterator[Cell]:
    """(who adds the noise, nodes, epsilon) of all cells; without noise the budget does not matter."""
    for budget, nodes, trust in itertools.product(BUDGETS, NODES, TRUST):
        if trust != _FREE or budget == BUDGETS[0]:
            yield trust, nodes, budget


def run(cell: Cell, setting: tuple[float, float], seed: int) -> dict[str, Any]:
    """One run's row."""
    from simulations import simulate

    (trust, nodes, budget), (bound, rate) = cell, setting
    threshold, colluders = NODES[nodes]
    shares = {} if "distributed" in TRUST[trust] else {
        "distributed.threshold": threshold, "distributed.colluders": colluders
    }  # fmt: skip
    last = {"federation.clients": nodes, "run.seed": seed, "run.evaluate_every": 20, "run.checkpoint_every": 20}
    values = {"mechanism.bound": bound, "training.lr": rate, "privacy.epsilon": budget}
    with tempfile.TemporaryDirectory() as folder:
        changes = last | values | TRUST[trust] | shares
        result = simulate("distributed-digits", overrides=changes, engine="local", run_dir=Path(folder) / "run")
    row = {"trust": trust, "nodes": nodes, "budget": budget, "bound": bound, "lr": rate, "seed": seed}
    figures = {"epsilon": result.epsilon, "readers_epsilon": result.get("readers_epsilon")}
    return row | {"accuracy": result.accuracy} | figures


def kept() -> list[dict[str, Any]]:
    """The rows so far."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else []


def found(cell: Cell, setting: tuple[float, float], seed: int) -> dict[str, Any]:
    """The kept row of one run, which is run and kept if it is missing."""
    rows = kept()
    for row in rows:
        if tuple(row[key] for key in _NAMES) == (*cell, *setting, seed):
            return row
    row = run(cell, setting, seed)
    KEPT.write_text(json.dumps([*rows, row], indent=1) + "\n")
    return row


def chosen(cell: Cell) -> tuple[float, float]:
    """Bound and learning rate of a cell: the best of `SETTINGS` for the seed of the search."""
    return max(SETTINGS, key=lambda setting: found(cell, setting, SEARCH)["accuracy"])


def accuracy(cell: Cell, settings: Settings = SETTINGS) -> str:
    """Mean and standard deviation over the seeds, at the setting that is best for the seed of the search."""
    measured = {tuple(row[key] for key in _NAMES): float(row["accuracy"]) for row in kept()}
    searched = {setting: measured.get((*cell, *setting, SEARCH), -1.0) for setting in settings}
    best = max(settings, key=lambda setting: searched[setting])
    own = [measured.get((*cell, *best, seed), -1.0) for seed in SEEDS]
    return "not run" if min(*searched.values(), *own) < 0 else spread(own, digits=3)


def accuracies() -> str:
    """The page's table."""
    lines = []
    for budget, nodes in itertools.product(BUDGETS, sorted(NODES)):
        threshold, colluders = NODES[nodes]
        shown = [accuracy((trust, nodes, BUDGETS[0] if trust == _FREE else budget)) for trust in TRUST]
        lines.append((f"{budget:g}, {nodes} ({threshold}, {colluders})", *shown))
    return table(("epsilon, nodes (t, m)", *TRUST), lines)


def smaller() -> str:
    """The page's sentence on a smaller bound."""
    measured = [
        f"{accuracy(('in shares', nodes, budget), SMALLER)} at epsilon {budget:g} with {nodes} nodes"
        for budget, nodes in ((8.0, 30), (2.0, 100), (2.0, 30))
    ]
    return (
        "A smaller bound helps where there is much noise. With `mechanism.bound = 0.2` instead of 0.5, noise in shares "
        f"reaches {measured[0]}, {measured[1]}, and {measured[2]}."
    )


def main() -> None:
    """Run what is missing, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the page; runs nothing")
    if parser.parse_args().write:
        show(PAGE, {"accuracy by trust": accuracies(), "smaller bound": smaller()}, write=True)
        return
    for cell in cells():
        for seed in SEEDS:
            found(cell, chosen(cell), seed)


if __name__ == "__main__":
    main()
