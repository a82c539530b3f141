"""Time and memory of a step with clipped per-example gradients, compared with plain SGD and Opacus.

    python -m benchmarks.example_level [--networks d-cnn-256 ...] [--contenders plain ...] [--rounds
    7] [--write]

Every contender is a separate process with one torch thread. The contenders take their steps in
turn, so that changes of the machine's speed affect all equally. Times are CPU seconds of the
process. A ratio is a step's time divided by the time of the plain step in the same turn. There are
two baselines: `plain` is SGD by autograd as users write it, and `plain-best` is the same SGD with
its fastest micro-batch and memory layout. Contenders whose names end in `-quiet` add no noise;
those whose names end in `-exact` add no noise and sum in float64. `--write` adds the figures to
docs/results/example-level.json, which keeps the figures of other networks and contenders, and puts
the tables on their page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders.example_level import NETWORKS
from fedlgm_lab.studies.tables.pages import put, table

PAGE = Path(__file__).parents[1] / "docs" / "results" / "example-level.md"
KEPT = PAGE.with_suffix(".json")
OURS = {
    "plain-best": "plain, best layout",
    "per-layer": "per layer",
    "flat": "flat",
    "lm": "LM",
    "per-layer-quiet": "per layer, no noise",
}
OPACUS = {
    "opacus-flat": "Opacus, flat",
    "opacus-per-layer": "Opacus, per layer",
    "opacus-ghost": "Opacus, ghost",
}
KERNEL = {"per-layer-kernel": "per layer, kernel", "flat-kernel": "flat, kernel"}
EXACT = {"per-layer-exact": "per-layer-quiet", "flat-exact": "flat-quiet"}
CONTENDERS = ("plain", *OURS, *KERNEL, *OPACUS, "flat-quiet", *EXACT)
UNKNOWN = (
    "resnet18-32",
    "resnet20-64",
    "embedding-256",
    "lstm-64",
    "nn-gru-64",
    "gru-64",
    "transformer-32",
    "gpt2-lora-8",
)  # networks that the compiled kernel does not know
TIED = {"gru-64": {"opacus-ghost"}}  # contenders that do not support a layer that is called twice
NAMES = {
    "d-cnn-256": "D-CNN 605k, 256",
    "mnist-cnn-64": "MNIST CNN 26k, 64",
    "mnist-cnn-256": "MNIST CNN 26k, 256",
    "mlp-256": "MLP 784-256-10, 256",
    "resnet18-32": "ResNet-18 GroupNorm 11.2M, 32",
    "resnet20-64": "ResNet-20 GroupNorm 272k, 64",
    "embedding-256": "MLP on 20,000 embeddings 1.28M, 256",
    "lstm-64": "LSTM 228k, 64",
    "nn-gru-64": "GRU of PyTorch 204k, 64",
    "gru-64": "GRU 21k, 64",
    "transformer-32": "transformer, 32",
    "gpt2-lora-8": "LoRA of GPT-2 124M, 8",
}
Results = dict[str, dict[str, Any]]
"""Network -> contender -> figures."""


class Process:
    """Process of a contender."""

    def __init__(self, network: str, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.contenders.example_level", network, name]
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self._process.communicate("")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the contender {self.name} has ended: see its message above")
        return json.loads(line)


def compare(network: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Measure all contenders, whose steps alternate. The first two turns warm up and do not count."""
    processes = [Process(network, name) for name in names]
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, dict[str, float]] = {}
    for turn in range(rounds + 2):
        for process in processes:
            answer = process.step()
            peaks[process.name] = answer
            if turn >= 2:
                times[process.name].append(answer["seconds"])
    for process in processes:
        process.close()
    plain = times[names[0]]
    return {
        name: {
            "ratios": [round(a / b, 3) for a, b in zip(times[name], plain, strict=True)],
            "milliseconds": round(1e3 * statistics.median(times[name]), 2),
            "above_imports_mb": round(peaks[name]["peak_mb"] - peaks[name]["imports_mb"], 1),
            "code_mb": round(peaks[name]["code_mb"], 1),
        }
        for name in names
    }


def rows(
    results: Results, cell: Callable[[dict[str, Any]], str], names: list[str]
) -> list[list[str]]:
    """Return a table's rows, with one row per network, one cell per contender and a dash for a
    missing figure.
    """
    return [
        [NAMES[network], *(cell(found[name]) if name in found else "-" for name in names)]
        for network, found in results.items()
    ]


def times(results: Results, names: dict[str, str]) -> str:
    """Return the table of the ratios' medians, with the smallest and the largest ratio."""

    def cell(row: dict[str, Any]) -> str:
        ratios = row["ratios"]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    return table(["network, batch", *names.values()], rows(results, cell, list(names)))


def memory(results: Results) -> str:
    """Return the table of the peak memory in excess of the imports' memory, and of the share of it
    that is code.
    """
    names = {"plain": "plain"} | OURS | KERNEL | OPACUS
    cells = rows(
        results, lambda row: f"{row['above_imports_mb']:.0f} ({row['code_mb']:.0f})", list(names)
    )
    return table(["network, batch", *names.values()], cells)


def exact(results: Results) -> str:
    """Return the table of the cost of sums in float64, as medians of ratios between steps of the
    same turn.
    """
    found = [
        [
            NAMES[network],
            *(
                f"{statistics.median(a / b for a, b in zip(of[name]['ratios'], of[base]['ratios'], strict=True)):.2f}"
                for name, base in EXACT.items()
            ),
        ]
        for network, of in results.items()
        if EXACT.keys() <= of.keys()
    ]
    return table(["network, batch", "per layer", "flat"], found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--write", action="store_true", help=f"keep the figures, and put the tables on {PAGE.name}"
    )
    options = parser.parse_args()
    names = ["plain", *(name for name in options.contenders if name != "plain")]
    results: Results = {}
    for network in options.networks:
        refused = TIED.get(network, set()) | (KERNEL.keys() if network in UNKNOWN else set())
        known = [name for name in names if name not in refused]
        results[network] = compare(network, known, options.rounds)
        print(network, json.dumps(results[network]), file=sys.stderr, flush=True)
    if options.write:
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
        results = kept | {name: kept.get(name, {}) | found for name, found in results.items()}
        KEPT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    shown = OURS | KERNEL
    tables = {"times": times(results, shown), "Opacus": times(results, OPACUS)}
    for name, text in (tables | {"memory": memory(results), "exact": exact(results)}).items():
        print(f"\n{name}\n\n{text}")
        if options.write:
            put(PAGE, name, text)


if __name__ == "__main__":
    main()
