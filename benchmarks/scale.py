"""Cross-device scale: `python -m benchmarks.scale --json`.

The comparisons and their figures are:

* 100,000 registered clients, compared with 500. Clients have four examples and take one optimizer
  step. The expected cohorts are equal. Figures: ratios of the peak memory (driver and workers) and
  of the median time of a round.
* A cohort of 1,000, compared with a cohort of 50, out of 100,000 clients. The model's 63 sums of
  blocks are 280 MB. Figure: peak memory.
* A million registered clients, whose inputs are generated when they train, compared with 500; also
  a cohort of 10,000 of the million. Figures: the same two ratios, with proportional set sizes as
  memory.
* A cohort of 5,000 out of 50,000 clients with a linear model, on Ray and with forked workers.
  Figures: time and memory.
* A two-node Ray cluster on this machine, compared with one node that has the same number of cores.
  Figure: ratio of the time per round, for the simulators' work and for rounds of a few
  milliseconds.
* Two Ray nodes whose object stores are smaller than a round's sums, or smaller than one sum.
  Figure: time.
* ResNet-18 on 32x32 images, with 10 clients of 64 images in a round. Figure: the share of the
  workers' time that is not training, for fedlgm and for Flower's runtime.

Every measurement runs in a separate process. Ratios are ratios of medians over interleaved repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.contenders import resnet_work
from benchmarks.simulators import Contender, interleaved

EXAMPLES = 4  # examples of each client
LOGISTIC, WIDE = "{name = 'logistic'}", "{name = 'mlp', hidden = [1024, 512]}"
WIDER = "{name = 'mlp', hidden = [6000, 2000]}"
SHORT_ROUNDS = (
    "training.epochs=1",
    f"training.batch_size={EXAMPLES}",
    "run.evaluate_every=1000",
    "run.checkpoint_every=1000",
    "run.block_size=16",
)
"""Settings of rounds in which each client takes one step."""


def peak_megabytes() -> float:
    """Return the sum of the peak resident sizes of this process and of the Ray or forked workers
    that it started.

    A page that a forked worker shares with this process counts once for each of the two.
    """
    total = _peak("self")
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            forked = (
                entry.name.isdigit()
                and int(entry.name) in children
                and b"benchmarks.scale" in command
            )
            if forked or command.startswith(b"ray::Worker"):
                total += _peak(entry.name)
        except OSError:
            continue
    return total / 1024


def _peak(process: str) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return float(line.split()[1])
    return 0.0


def federation(
    clients: int,
    cohort: int,
    rounds: int,
    nodes: int = 1,
    model: str = LOGISTIC,
    engine: str = "ray",
    device: str = "cpu",
    store: int | None = None,
) -> dict[str, Any]:
    """Run a synthetic federation, and return the seconds of each round and the peak memory."""
    from benchmarks.contenders.cluster import one_core_nodes
    from simulations import launch
    from simulations.config import recipe as recipes
    from simulations.runs.folder import RunFolder

    overrides = [
        f"data={{name = 'synthetic-{EXAMPLES * clients}', partition = 'iid'}}",
        f"model={model}",
        f"federation.clients={clients}",
        f"federation.rate={cohort / clients}",
        f"federation.rounds={rounds}",
        f"training.device={device}",
        "privacy.delta=1e-6",
        *SHORT_ROUNDS,
    ]
    cluster = one_core_nodes(nodes, store) if nodes > 1 else contextlib.nullcontext()
    with cluster as address, tempfile.TemporaryDirectory() as directory:
        peaks = []
        run = Path(directory) / "run"
        launch.simulate(
            recipes.load("digits", overrides),
            engine=engine,
            workers=2,
            run_dir=run,
            ray_address=address,
            progress=lambda row: peaks.append(peak_megabytes()) if row["round"] % 5 == 0 else None,
        )
        rows = RunFolder(run).rows(private=True)  # only private rows have seconds
    return {"seconds": [row["seconds"] for row in rows][2:], "peak_megabytes": max(peaks)}


class Generated:
    """Inputs [n, 1, 4, 4], each computed from its row number."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: int) -> None:
        self.shape = (rows, 1, 4, 4)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        waves = np.sin(np.outer(rows + 1.0, np.sqrt(np.arange(2.0, 18.0))))
        return (waves + np.cos(rows % 10)[:, None]).reshape(-1, *self.shape[1:])


def memory_in_use() -> float:
    """Return the megabytes of this process and its children; a page that they share counts once."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def generated(clients: int, cohort: int, rounds: int) -> dict[str, Any]:
    """Run a federation of generated clients with two forked workers; returns what `federation`
    returns.
    """
    import simulations
    from fedlgm.data import LazyArray
    from simulations.runs.folder import RunFolder

    inputs = Generated(EXAMPLES * clients)
    test = np.arange(1000)
    used: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        simulations.simulate(
            model="logistic",
            data={
                "train": (LazyArray(inputs), np.arange(EXAMPLES * clients) % 10),
                "test": (inputs[test], test % 10),
            },
            overrides=[
                f"federation.clients={clients}",
                f"federation.rate={cohort / clients}",
                f"federation.rounds={rounds}",
                "privacy.delta=1e-7",
                *SHORT_ROUNDS,
            ],
            engine="processes",
            workers=2,
            run_dir=run,
            progress=lambda row: used.append(memory_in_use()) if row["round"] % 5 == 0 else None,
        )
        rows = RunFolder(run).rows(private=True)
    return {"seconds": [row["seconds"] for row in rows][2:], "peak_megabytes": max(used)}


def million() -> dict[str, Any]:
    """Measure the seconds of a round and the memory with generated clients, over three interleaved
    runs.
    """
    jobs = {
        "500, cohort of 50": {"clients": 500, "cohort": 50, "rounds": 40},
        "1,000,000, cohort of 50": {"clients": 1_000_000, "cohort": 50, "rounds": 40},
        "1,000,000, cohort of 10,000": {"clients": 1_000_000, "cohort": 10_000, "rounds": 10},
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for _ in range(3):
        for name, job in jobs.items():
            runs[name].append(_child(job | {"inputs": "generated"}))
    return {
        name: {
            "seconds": statistics.median(second for run in each for second in run["seconds"]),
            "megabytes": statistics.median(run["peak_megabytes"] for run in each),
            "all": each,
        }
        for name, each in runs.items()
    }


def cohort_5000() -> dict[str, Any]:
    """Measure the seconds of a round and the peak memory for a cohort of 5,000 out of 50,000, on
    Ray and with forked workers.
    """
    job = {"clients": 50_000, "cohort": 5_000, "rounds": 10}
    runs = {engine: _child(job | {"engine": engine}) for engine in ("ray", "processes")}
    return {
        engine: run | {"median": statistics.median(run["seconds"])} for engine, run in runs.items()
    }


def resnet18_shares(rounds: int) -> dict[str, Any]:
    """Measure the share of the workers' time that is not local training, for fedlgm and for Flower.

    A round has ten ResNet-18 clients.
    """
    contenders = {
        "ours": Contender(["resnet_ours"]),
        "flower": Contender(["flower", "resnet_work"]),
    }
    answers = interleaved(contenders, rounds, warm=1)
    shares = {
        name: [
            1 - answer["training"] / (resnet_work.WORKERS * answer["seconds"]) for answer in rows
        ]
        for name, rows in answers.items()
    }
    return {
        "share_not_training": {name: statistics.median(values) for name, values in shares.items()},
        "seconds_per_round": {
            n: statistics.median(a["seconds"] for a in rows) for n, rows in answers.items()
        },
        "all": shares,
    }


def registered(rounds: int, repeats: int) -> dict[str, Any]:
    """Measure the memory and time of federations of different sizes, over `repeats` interleaved
    runs of `rounds` rounds.
    """
    jobs = {
        "registered_500": {"clients": 500, "cohort": 50},
        "registered_100000": {"clients": 100_000, "cohort": 50},
        "wide_model_50": {"clients": 100_000, "cohort": 50, "model": WIDE, "rounds": 6},
        "wide_model_1000": {"clients": 100_000, "cohort": 1000, "model": WIDE, "rounds": 6},
        "small_rounds_two_nodes": {"clients": 500, "cohort": 50, "nodes": 2},
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            results[name].append(_child({"rounds": rounds} | job))
    seconds = {
        n: statistics.median(s for run in runs for s in run["seconds"])
        for n, runs in results.items()
    }
    memory = {
        name: statistics.median(run["peak_megabytes"] for run in runs)
        for name, runs in results.items()
    }
    return {
        "seconds_per_round": seconds,
        "peak_megabytes": memory,
        "memory_ratio_100000_to_500": memory["registered_100000"] / memory["registered_500"],
        "time_ratio_100000_to_500": seconds["registered_100000"] / seconds["registered_500"],
        "memory_ratio_cohort_1000_to_50": memory["wide_model_1000"] / memory["wide_model_50"],
        "time_ratio_two_nodes_to_one_small_rounds": seconds["small_rounds_two_nodes"]
        / seconds["registered_500"],
    }


def two_nodes(rounds: int) -> dict[str, Any]:
    """Measure the seconds of a round of the simulators' benchmark, on two nodes with one core each
    and on one node with two cores.
    """
    contenders = {"one": Contender(["ours", "ray"]), "two": Contender(["ours", "two-nodes"])}
    answers = interleaved(contenders, rounds)
    seconds = {name: [answer["seconds"] for answer in rows] for name, rows in answers.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds_per_round": medians,
        "ratio": medians["two"] / medians["one"],
        "all_seconds": seconds,
    }


def object_stores() -> dict[str, Any]:
    """Measure the seconds of a round on two Ray nodes with object stores of several sizes.

    In one group of runs a round has 280 MB of sums. In the other group one sum is larger than the
    smallest store.
    """
    wide = {"clients": 2000, "cohort": 1000, "model": WIDE, "rounds": 7, "nodes": 2}
    larger = {"clients": 100, "cohort": 40, "model": WIDER, "rounds": 5, "nodes": 2}
    jobs = {
        f"sums of 280 MB, stores of {size} MB": wide | {"store": size} for size in (80, 160, 600)
    }
    jobs |= {f"a sum of 97 MB, stores of {size} MB": larger | {"store": size} for size in (80, 600)}
    runs = {name: _child(job) for name, job in jobs.items()}
    return {name: run | {"median": statistics.median(run["seconds"])} for name, run in runs.items()}


def _child(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "--child", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print JSON (always done; kept for symmetry)"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only",
        choices=("registered", "million", "cohort-5000", "two-nodes", "object-stores", "resnet18"),
        help="measure this alone",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        job = json.loads(arguments.child)
        made = generated if job.pop("inputs", None) == "generated" else federation
        print(json.dumps(made(**job)))
        return
    measurements = {
        "registered": lambda: registered(arguments.rounds, arguments.repeats),
        "million": million,
        "cohort-5000": cohort_5000,
        "two-nodes": lambda: two_nodes(9),
        "object-stores": object_stores,
        "resnet18": lambda: resnet18_shares(arguments.repeats),
    }
    names = [arguments.only] if arguments.only else list(measurements)
    print(json.dumps({name: measurements[name]() for name in names} | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
