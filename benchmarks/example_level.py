"""Clipped per-example gradients: time and memory of a step beside plain SGD and Opacus.

    python -m benchmarks.example_level [--networks d-cnn-256 ...] [--contenders plain ...] [--rounds 7] [--json]

Every contender is a separate process with one torch thread; they take their steps in turn, so that all see the same
machine. Times are CPU seconds of the process; the output is medians of the ratios to the plain step of the same turn.
Two baselines: `plain` is SGD by autograd as users write it, `plain-best` the same with the micro-batch and the memory
layout that are best for it. `-quiet` contenders add no noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.contenders.example_level import NETWORKS

CONTENDERS = (
    "plain",
    "plain-best",
    "per-layer",
    "flat",
    "lm",
    "per-layer-quiet",
    "opacus-flat",
    "opacus-per-layer",
    "opacus-ghost",
)


class Process:
    """A contender."""

    def __init__(self, network: str, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.contenders.example_level", network, name]
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
    """Steps of all contenders in turn, after two that warm up."""
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
            "ratio": statistics.median(a / b for a, b in zip(times[name], plain, strict=True)),
            "milliseconds": 1e3 * statistics.median(times[name]),
            "peak_mb": peaks[name]["peak_mb"],
            "above_imports_mb": peaks[name]["peak_mb"] - peaks[name]["imports_mb"],
            "code_mb": peaks[name]["code_mb"],
        }
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = ["plain", *(name for name in options.contenders if name != "plain")]
    results = {}
    for network in options.networks:
        results[network] = compare(network, names, options.rounds)
        if not options.json:
            print(f"{network}: plain {results[network]['plain']['milliseconds']:.0f} ms", flush=True)
            for name, row in results[network].items():
                memory = f"peak {row['peak_mb']:6.0f} MB   above imports {row['above_imports_mb']:6.0f} MB"
                print(f"  {name:18s} {row['ratio']:6.2f}   {memory}   of it code {row['code_mb']:4.0f} MB")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
