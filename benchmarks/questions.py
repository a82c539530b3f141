"""Seconds that a node takes to answer, with an empty ledger and with a long ledger:
`python -m benchmarks.questions --json`.

A real service answers over its socket: `fedlgm node serve`, with the processes that train and
account. Each round asks a new question, which is admitted, priced, charged on disk, trained,
bounded and noised. The round then asks the same question again and gets the stored answer. The
model is logistic regression, so that nearly all of the time is spent in the service. The long
ledger has 10,000 releases of 100 distinct example-level plans. The two services answer in turn.
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

import numpy as np

from fedlgm import mechanisms
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.events import gaussian_event, repeat_event
from fedlgm.privacy.guarantee import ONE_EXAMPLE
from fedlgm.training import models
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.service.folder import NodeFolder

ROWS, PLANS = 10_000, 100
SHAPE, CLASSES, EXAMPLES = (1, 4, 4), 3, 24
_WORK = {
    "mechanism": {"name": "dp-sgd"},
    "model": {"name": "logistic"},
    "training": {"lr": 0.1, "epochs": 1, "batch_size": 8},
}
_POLICY = {"shape": list(SHAPE), "classes": CLASSES, "unit": "example", "epsilon": 50.0}
_EDITS = {
    "reply_every_seconds = 0.5": "reply_every_seconds = 0.0",
    # a release costs at least this share of the budget
    "releases = 1000 #": "releases = 10_000_000 #",
    "releases_per_run = 1000": "releases_per_run = 100_000",
    "releases_per_day = 1000": "releases_per_day = 100_000",
}


class Node:
    """A node with a given number of ledger rows, and its service."""

    def __init__(self, path: Path, rows: int) -> None:
        rng = np.random.default_rng(0)
        x = rng.random((EXAMPLES, *SHAPE), dtype=np.float32)
        data = path.with_suffix(".npz")
        np.savez(data, x=x, y=np.arange(EXAMPLES) % CLASSES)
        self.folder = NodeFolder.create(path, {**_POLICY, "path": str(data)})
        text = self.folder.policy_file.read_text()
        for old, new in _EDITS.items():
            text = text.replace(old, new)
        self.folder.policy_file.write_text(text)
        with self.folder.ledger() as ledger:
            for number in range(rows):
                step = gaussian_event(40.0 + number % PLANS / 50, 1e-3)
                ledger.charge(
                    f"{number:064x}", repeat_event(step, 5 + number % 7), trust="local", run="old",
                    round=number, data="d", protects=ONE_EXAMPLE,
                )  # fmt: skip
        module = models.build("logistic", in_shape=SHAPE, classes=CLASSES)
        mechanism = mechanisms.get("dp-sgd")
        layers = mechanism.table(LayerTable.from_module(module))
        model = layers.flatten(module)
        steps, sampling = LocalSteps(4, 0.25, 6.0), Sampling("poisson", 1, 1.0)
        facts = RunFacts(40.0, sampling, "add-remove", "local", 10, steps=steps)
        self._plan = mechanism.plan(layers, facts, Transcript.start(model)).to_json()
        self._body = frames.npy(model.numpy())
        self._key = self.folder.public()["service_key"]
        serve = "from simulations.entry import main; main()"
        self.service = subprocess.Popen(
            [sys.executable, "-c", serve, "node", "serve", str(path)], stderr=subprocess.DEVNULL
        )
        while not self.folder.socket.exists():
            if self.service.poll() is not None:
                raise SystemExit(f"the service of {path} did not start")
            time.sleep(0.05)

    def ask(self, round: int) -> float:
        """Ask a round's question, and return the seconds until the answer."""
        question = Question(
            "run", round, 0, self._plan, protocol.sha256(self._body), _WORK, "00", self._key
        )
        started = time.perf_counter()
        header, _ = frames.exchange(
            str(self.folder.socket), question.header(), self._body, timeout=120
        )
        seconds = time.perf_counter() - started
        assert header["ok"], header
        return seconds


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the medians of both services over the rounds after the first five; the services answer
    in turn.
    """
    with tempfile.TemporaryDirectory() as folder:
        nodes = {rows: Node(Path(folder) / str(rows), rows) for rows in (0, ROWS)}
        try:
            seconds = [
                (rows, node.ask(round), node.ask(round))
                for round in range(1, rounds + 6)
                for rows, node in nodes.items()
            ][5 * len(nodes) :]
        finally:
            for node in nodes.values():
                node.service.terminate()
                node.service.wait()
    return [
        {
            "rows": rows,
            "new_seconds": statistics.median(new for row, new, _ in seconds if row == rows),
            "again_seconds": statistics.median(again for row, _, again in seconds if row == rows),
        }
        for rows in nodes
    ]


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="questions to each service")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    measured = measure(options.rounds)
    if options.json:
        print(json.dumps(measured, indent=1))
        return
    for row in measured:
        new, again = 1e3 * row["new_seconds"], 1e3 * row["again_seconds"]
        print(f"{row['rows']:6} rows: {new:.1f} ms a new question, {again:.1f} ms the same again")


if __name__ == "__main__":
    main()
