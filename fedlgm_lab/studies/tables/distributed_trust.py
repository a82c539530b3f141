"""Accuracy at two epsilons, by the party that adds the noise.

The recipe is `distributed-digits`. Runs differ only in the party that adds the noise, the number of
nodes, the budget, the bound, the learning rate and the seed. Every cell chooses among the same
bounds and learning rates, by the mean accuracy of three seeds that the table does not use. If the
nodes add the noise, epsilon is the epsilon that holds against the server. All runs use the
replace-one relation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.store import Kept, Row, simulated

NODES = {30: (20, 3), 100: (67, 10), 10: (7, 1)}
BUDGETS = (8.0, 2.0)
# bound of an update, learning rate
SETTINGS = tuple(itertools.product((0.1, 0.2, 0.5), (0.15, 0.5, 1.5)))
SEARCH = (11, 12, 13)
SEEDS = {8.0: (1, 2, 3, 4, 5), 2.0: (1, 2, 3, 4, 5, *range(21, 36))}
"""Seeds by epsilon. At epsilon 2, accuracy varies so much between seeds that five seeds do not
determine its mean to within 0.03.
"""
_ALONE = {"distributed": None}
_CENTRAL = {"privacy.trust": "central", "privacy.max_participations": None, **_ALONE}
TRUST: dict[str, dict[str, Any]] = {
    "no noise to speak of": {"privacy.epsilon": 1e6, **_CENTRAL},
    "trusted server": _CENTRAL,
    "in shares": {},
    "each node alone": {"privacy.trust": "local", **_ALONE},
}
_FREE = next(iter(TRUST))
_NAMES = ("trust", "nodes", "budget", "bound", "lr")
Cell = tuple[str, int, float]
Setting = tuple[float, float]


def run(cell: Cell, setting: Setting, seed: int) -> Row:
    """Make one run, and return its figures."""
    (trust, nodes, budget), (bound, rate) = cell, setting
    changes = {
        **dict(zip(("distributed.threshold", "distributed.colluders"), NODES[nodes], strict=True)),
        "federation.clients": nodes,
        "run.seed": seed,
        "run.evaluate_every": 20,
        "run.checkpoint_every": 20,
        "mechanism.bound": bound,
        "training.lr": rate,
        "privacy.epsilon": budget,
        **TRUST[trust],
    }
    if "distributed" in changes:
        changes = {key: value for key, value in changes.items() if "distributed." not in key}
    with simulated("distributed-digits", overrides=changes, engine="local") as result:
        figures = {"epsilon": result.epsilon, "readers_epsilon": result.get("readers_epsilon")}
        return {"accuracy": result.accuracy} | figures


def accuracies(store: Kept, cell: Cell, setting: Setting, seeds: Iterable[int]) -> list[float]:
    """Return the accuracies of a cell's runs; make and store the runs that are missing."""
    name = dict(zip(_NAMES, (*cell, *setting), strict=True))
    return [
        float(store.keep({**name, "seed": seed}, partial(run, cell, setting, seed))["accuracy"])
        for seed in seeds
    ]


def accuracy(store: Kept, cell: Cell) -> str:
    """Format the mean accuracy and its standard deviation over the seeds, at the bound and the
    learning rate with the best mean over the seeds of the search.
    """
    best = max(SETTINGS, key=lambda setting: sum(accuracies(store, cell, setting, SEARCH)))
    return spread(accuracies(store, cell, best, SEEDS[cell[2]]), digits=3)


def texts(store: Kept) -> Pages:
    """Make the missing runs, and the table of accuracies by epsilon and number of nodes."""
    lines = []
    for budget, nodes in itertools.product(BUDGETS, sorted(NODES)):
        cells = ((who, nodes, BUDGETS[0] if who == _FREE else budget) for who in TRUST)
        shown = [accuracy(store, cell) for cell in cells]
        lines.append((f"{budget:g}, {nodes} ({', '.join(map(str, NODES[nodes]))})", *shown))
    text = table(("epsilon, nodes (t, m)", *TRUST), lines)
    return {"../how-to/distributed-trust.md": {"accuracy by trust": text}}


MAKER = Maker("distributed-trust.json", texts, texts)
