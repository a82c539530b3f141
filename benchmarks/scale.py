"""Cross-device scale: `python -m benchmarks.scale --json`.

* 100,000 registered clients against 500, same expected cohort, one optimizer step a client: ratio of peak memory
(driver
  and workers) and of the median time of a round;
* a cohort of 1,000 out of 100,000, against one of 50: peak memory;
* a two-node Ray cluster on this machine against one node with the same cores: ratio of time per round;
* ResNet-18 on 32x32 images, 10 clients a round: the share of a round that is not training.
Every measurement runs in a process of its own; ratios are over medians of interleaved repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def peak_megabytes() -> float:
    """Sum of the peak resident sizes of this process and of the Ray workers it started."""
    total = _peak("self")
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                total += _peak(entry.name)
        except OSError:
            continue
    return total / 1024


def _peak(process: str) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return float(line.split()[1])
    return 0.0


def federation(clients: int, cohort: int, rounds: int, nodes: int = 1) -> dict[str, Any]:
    """Run a synthetic federation on Ray and return seconds of each round and peak memory."""
    from simulations import launch
    from simulations import recipe as recipes
    from simulations.engines import ray as ray_engine

    overrides = [
        "data={name = 'synthetic-100000', partition = 'dirichlet-large', alpha = 0.5}",
        "model={name = 'logistic'}",
        f"federation.clients={clients}",
        f"federation.rate={cohort / clients}",
        f"federation.rounds={rounds}",
        "training.epochs=1",
        "training.batch_size=100000",
        "privacy.delta=1e-6",
        "run.evaluate_every=1000",
        "run.checkpoint_every=1000",
        "run.block_size=16",
    ]
    cluster = None
    if nodes > 1:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
        ray_engine.connect(cluster.address, nodes)
    with tempfile.TemporaryDirectory() as directory:
        peaks = []
        run = Path(directory) / "run"
        launch.simulate(
            recipes.load("digits", overrides),
            engine="ray",
            workers=2,
            run_dir=run,
            ray_address=cluster.address if cluster else None,
            progress=lambda row: peaks.append(peak_megabytes()) if row["round"] % 10 == 0 else None,
        )
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if cluster is not None:
        cluster.shutdown()
    return {"seconds": [row["seconds"] for row in rows][2:], "peak_megabytes": max(peaks)}


def resnet18_overhead(rounds: int) -> dict[str, Any]:
    """Share of a round of ten ResNet-18 clients that the trainers do not account for (one process)."""
    from flwr.app import ConfigRecord

    from fedlgm.keys import KeyRing
    from fedlgm.privacy import Ledger
    from simulations import recipe as recipes
    from simulations.assembly import Assembly
    from simulations.engines.local import LocalGrid
    from strategies import CohortSampler, LayerwiseFedAvg, ServerOptimizer

    overrides = [
        "data={name = 'synthetic-cifar', partition = 'iid'}",
        "model={name = 'resnet18'}",
        "federation.clients=100",
        "federation.rate=0.1",
        "training={optimizer = 'sgd', lr = 0.05, epochs = 1, batch_size = 8}",
    ]
    recipe = recipes.load("fashion-mnist", overrides)
    from fedlgm import data

    shaped = data.synthetic(1600, shape=(3, 32, 32))
    parts = data.partition(shaped.train_y, 100, "iid")
    assembly = Assembly(recipe).holding(shaped, parts)
    keys = KeyRing.from_seed(1)
    client = assembly.client(keys)
    trainer, spent = client._trainer, [0.0]

    class Timed:
        """The trainer, with a stopwatch."""

        def updates(self, model: Any, tasks: Any) -> Any:
            iterator = trainer.updates(model, tasks)
            while True:
                started = time.perf_counter()
                update = next(iterator, None)
                spent[0] += time.perf_counter() - started
                if update is None:
                    return
                yield update

    client._trainer = Timed()
    with tempfile.TemporaryDirectory() as directory:
        strategy = LayerwiseFedAvg(
            assembly.mechanism, assembly.layers, assembly.budget, assembly.start(),
            CohortSampler(assembly.budget.sampling, keys), ServerOptimizer("sgd", 1.0), keys,
            Ledger(Path(directory) / "ledger.sqlite", "benchmark"), work=assembly.sizes,
        )  # fmt: skip
        grid, shares = LocalGrid(client.as_app()), []
        for _ in range(rounds + 1):
            spent[0], started = 0.0, time.perf_counter()
            messages = strategy.configure_train(1, strategy.initial_arrays(), ConfigRecord(), grid)
            strategy.aggregate_train(1, grid.send_and_receive(messages))
            shares.append(1 - spent[0] / (time.perf_counter() - started))
    return {"share_not_training": statistics.median(shares[1:]), "all": shares[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON (always done; kept for symmetry)")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(federation(**json.loads(arguments.child))))
        return
    jobs = {
        "registered_500": {"clients": 500, "cohort": 50},
        "registered_100000": {"clients": 100_000, "cohort": 50},
        "cohort_1000": {"clients": 100_000, "cohort": 1000},
        "two_nodes": {"clients": 500, "cohort": 50, "nodes": 2},
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for _ in range(arguments.repeats):
        for name, job in jobs.items():
            results[name].append(_child(job | {"rounds": arguments.rounds}))
    seconds = {n: statistics.median(s for run in runs for s in run["seconds"]) for n, runs in results.items()}
    memory = {name: statistics.median(run["peak_megabytes"] for run in runs) for name, runs in results.items()}
    report = {
        "seconds_per_round": seconds,
        "peak_megabytes": memory,
        "memory_ratio_100000_to_500": memory["registered_100000"] / memory["registered_500"],
        "time_ratio_100000_to_500": seconds["registered_100000"] / seconds["registered_500"],
        "memory_ratio_cohort_1000_to_50": memory["cohort_1000"] / memory["registered_100000"],
        "time_ratio_two_nodes_to_one": seconds["two_nodes"] / seconds["registered_500"],
        "resnet18": resnet18_overhead(3),
        "torch": torch.__version__,
    }
    print(json.dumps(report))


def _child(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "--child", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
