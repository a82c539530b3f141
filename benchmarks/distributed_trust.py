"""Accuracy by who adds the noise, at one epsilon: the table of docs/how-to/distributed-trust.md.

    python -m benchmarks.distributed_trust           # the runs that are not kept yet
    python -m benchmarks.distributed_trust --write   # the page's table from the kept runs

The recipe is `distributed-digits`; nothing but who adds the noise, the number of nodes and the seed differs. Epsilon is
that against the server where nodes add the noise, under replace-one everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import show, spread, table

KEPT = Path(__file__).parents[1] / "docs" / "results" / "distributed-trust.json"
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "distributed-trust.md"
NODES = {30: (20, 3), 100: (67, 10)}
SEEDS = (1, 2, 3)
ALONE = {"distributed": None}
TRUST: dict[str, dict[str, Any]] = {
    "no noise to speak of (epsilon 1e6)": {
        "privacy.trust": "central",
        "privacy.max_participations": None,
        "privacy.epsilon": 1e6,
        **ALONE,
    },
    "trusted server": {"privacy.trust": "central", "privacy.max_participations": None, **ALONE},
    "in shares": {},
    "each node alone": {"privacy.trust": "local", **ALONE},
}


def run(trust: str, nodes: int, seed: int) -> dict[str, Any]:
    """One run's row."""
    from simulations import simulate

    threshold, colluders = NODES[nodes]
    shares = {"distributed.threshold": threshold, "distributed.colluders": colluders}
    setting = {"federation.clients": nodes, "run.seed": seed, "run.evaluate_every": 20, "run.checkpoint_every": 20}
    changes = setting | TRUST[trust] | ({} if ALONE.items() <= TRUST[trust].items() else shares)
    with tempfile.TemporaryDirectory() as folder:
        result = simulate("distributed-digits", overrides=changes, run_dir=Path(folder) / "run")
    row = {"trust": trust, "nodes": nodes, "seed": seed, "accuracy": result.accuracy, "epsilon": result.epsilon}
    return row | ({"readers_epsilon": result["readers_epsilon"]} if "readers_epsilon" in result else {})


def kept() -> list[dict[str, Any]]:
    """The rows so far."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else []


def accuracies() -> str:
    """The page's table: mean and standard deviation over the seeds."""
    rows = kept()

    def cell(trust: str, nodes: int) -> str:
        return spread([row["accuracy"] for row in rows if (row["trust"], row["nodes"]) == (trust, nodes)], digits=3)

    return table(
        ("who adds the noise", *(f"{nodes} nodes, t = {t}, m = {m}" for nodes, (t, m) in NODES.items())),
        [(trust, *(cell(trust, nodes) for nodes in NODES)) for trust in TRUST],
    )


def main() -> None:
    """Run what is missing, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the page; runs nothing")
    if not parser.parse_args().write:
        for nodes, seed, trust in itertools.product(NODES, SEEDS, TRUST):
            rows = kept()
            if not any((row["trust"], row["nodes"], row["seed"]) == (trust, nodes, seed) for row in rows):
                KEPT.write_text(json.dumps([*rows, run(trust, nodes, seed)], indent=1) + "\n")
        return
    show(PAGE, {"accuracy by trust": accuracies()}, write=True)


if __name__ == "__main__":
    main()
