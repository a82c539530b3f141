"""Cost of a round at scales beyond these machines: `python -m benchmarks.beyond --write`.

Every part of a round is measured separately, on one core and in a fresh process: the draw of
a cohort, a bounded contribution, the sum of a block, the noise, the ledger and the accountant. The
table for a million clients, cohorts of 10,000 and a model of 100 million parameters multiplies
these parts; nothing of that size is run as a whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale import peak_megabytes
from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from fedlgm_lab.studies.tables.pages import put, table
from strategies.cohort import CohortSampler

RESULTS = Path(__file__).parents[1] / "docs" / "results"
POPULATIONS = (10_000, 1_000_000, 10_000_000)
SIZES = (1_000_000, 10_000_000, 100_000_000)
LAYERS = 100
CLIENTS, COHORT, ROUNDS, PARAMETERS = 1_000_000, 10_000, 10_000, 100_000_000
REPEATS = 5


def plan_of(size: int) -> ReleasePlan:
    layers = LayerTable.from_sizes({f"layer {i}": size // LAYERS for i in range(LAYERS)})
    facts = RunFacts(1.0, Sampling("poisson", CLIENTS, COHORT / CLIENTS))
    return mechanisms.get("snr-consistent").plan(layers, facts, Transcript.start(torch.zeros(1)))


def median_of(job: Callable[[int], Any]) -> float:
    """Return the median seconds of `job(repeat)`, after one call that warms up."""
    seconds = []
    for repeat in range(REPEATS + 1):
        started = time.perf_counter()
        job(repeat + 1)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def draw(population: int) -> dict[str, float]:
    sampler = CohortSampler(Sampling("poisson", population, COHORT / CLIENTS), KeyRing.from_seed(1))
    return {"seconds": median_of(sampler.cohort)}


def release_of(size: int) -> dict[str, float]:
    plan, keys = plan_of(size), KeyRing.from_seed(1)
    update, total, other = torch.randn(size), BoundedSum.empty(plan), BoundedSum.empty(plan)
    bound = median_of(lambda _: total.add(update))
    merge = median_of(lambda _: total.merge(other.total, 0, 0))
    noise = median_of(lambda repeat: release(total.total, plan, keys, repeat))
    return {
        "bound_seconds": bound,
        "merge_seconds": merge,
        "noise_seconds": noise,
        "megabytes": peak_megabytes(),
    }


def accounts(_: int) -> dict[str, float]:
    event = plan_of(LAYERS).event
    with (
        tempfile.TemporaryDirectory() as folder,
        Ledger(Path(folder) / "ledger.sqlite", owner="a benchmark") as ledger,
    ):
        charge = median_of(lambda round: ledger.charge(event, round=round, key=str(round)))
        for round in range(100, 100 + ROUNDS):
            ledger.charge(event, round=round, key=str(round))
        started = time.perf_counter()
        ledger.epsilon(1e-7)  # called once: the ledger remembers the result
        return {"charge_seconds": charge, "epsilon_seconds": time.perf_counter() - started}


PARTS: dict[str, tuple[Callable[[int], dict[str, float]], tuple[int, ...]]] = {
    "draw": (draw, POPULATIONS),
    "release": (release_of, SIZES),
    "accounts": (accounts, (ROUNDS,)),
}


def measured() -> dict[str, dict[str, dict[str, float]]]:
    """Measure every part of a round at every size, each in a fresh process."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for part, (_, sizes) in PARTS.items():
        for size in sizes:
            command = [
                sys.executable,
                "-m",
                "benchmarks.beyond",
                "--part",
                part,
                "--size",
                str(size),
            ]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            figures.setdefault(part, {})[str(size)] = json.loads(answer)
    return figures


def parts_table(figures: dict[str, Any]) -> str:
    (account,) = figures["accounts"].values()
    rows = [
        [f"draw of a cohort from {int(size):,} clients", f"{1e3 * figure['seconds']:.1f} ms"]
        for size, figure in figures["draw"].items()
    ]
    rows.append(["charge of a round, on disk", f"{1e3 * account['charge_seconds']:.1f} ms"])
    rows.append([f"epsilon after {ROUNDS:,} rounds", f"{account['epsilon_seconds']:.1f} s"])
    return table(["part", "time on one core"], rows)


def sizes_table(figures: dict[str, Any]) -> str:
    rows = []
    for size, figure in figures["release"].items():
        per = [1e9 * figure[f"{part}_seconds"] / int(size) for part in ("bound", "merge", "noise")]
        rows.append(
            [f"{int(size):,}", *(f"{value:.1f}" for value in per), f"{figure['megabytes']:,.0f} MB"]
        )
    return table(
        [
            "parameters",
            "bound and add a client (ns)",
            "add a block's sum (ns)",
            "noise (ns)",
            "peak memory",
        ],
        rows,
    )


def large_table(figures: dict[str, Any]) -> str:
    one = figures["release"][str(PARAMETERS)]
    (account,) = figures["accounts"].values()
    upload = 4 * PARAMETERS * COHORT / 1e12
    hours = COHORT * one["bound_seconds"] / 3600
    rows = [
        [
            "draw of the cohort",
            f"{figures['draw'][str(CLIENTS)]['seconds']:.3f} s",
            "server",
            "nothing",
        ],
        [
            "models sent, updates returned",
            f"{upload:.0f} TB each way",
            "server's network",
            "several SuperLinks",
        ],
        [
            "bound and add the updates",
            f"{hours:.1f} core-hours",
            "every update",
            "divides over workers",
        ],
        [
            "one partial sum in float64",
            f"{8 * PARAMETERS / 1e6:,.0f} MB",
            "memory of a worker",
            "nothing",
        ],
        [
            "add a partial sum",
            f"{one['merge_seconds']:.2g} s",
            "server, one per block",
            "large blocks",
        ],
        ["noise", f"{one['noise_seconds']:.2g} s", "server, once", "nothing"],
        ["ledger", f"{1e3 * account['charge_seconds']:.1f} ms", "server, once", "nothing"],
    ]
    return table(["part of a round", "cost", "where", "what reduces it"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the figures and write the page's tables"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        torch.set_num_threads(1)
        print(json.dumps(PARTS[options.part][0](options.size)))
        return
    figures = measured()
    print(json.dumps(figures, indent=1))
    if options.write:
        (RESULTS / "beyond.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        put(RESULTS / "data" / "performance.md", "parts of a round", parts_table(figures))
        put(RESULTS / "data" / "performance.md", "nanoseconds per parameter", sizes_table(figures))
        put(RESULTS / "performance.md", "a large round", large_table(figures))


if __name__ == "__main__":
    main()
