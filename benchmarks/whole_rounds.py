"""Whole private rounds, compared with rounds of a plain loop without privacy:
`python -m benchmarks.whole_rounds [CASE ...]`.

The cases are those that `benchmarks.workloads` leaves out, because they lie outside of local
training or need another loop: correlated noise, clients that add noise to their own steps, LaDP,
and one client per round. A case in which clients protect their own examples is also compared with
Opacus's loop, whose steps are as private as ours. Our side is a run of engine `local` with its
plan, bounds, noise and ledger on disk, without evaluation and checkpoints. After each round a plain
loop trains the same cohort with the same numbers of steps and averages the models. A ratio is the
loop's processor time divided by ours: above 1, ours is faster. Both sides use one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor

from benchmarks.workloads import plain
from clients import PartitionedSource
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.training import ClientTask, inputs
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from strategies import CohortSampler, LayerwiseFedAvg

ONE = ["federation.sampling=fixed", "federation.cohort=1", "federation.rate=none"]
PYTORCH = ["training.kernel=torch"]
OPACUS = "example-level-federation, PyTorch, Opacus"
CASES: dict[str, tuple[str, list[str]]] = {
    "correlated-digits": ("correlated-digits", []),
    "correlated-fashion-mnist": ("correlated-fashion-mnist", []),
    "example-level-federation": ("example-level-federation", []),
    "example-level-federation, PyTorch": ("example-level-federation", PYTORCH),
    OPACUS: ("example-level-federation", PYTORCH),
    "ten-hospitals": ("ten-hospitals", []),
    "ladp-fashion-mnist": ("ladp-fashion-mnist", []),
    "ladp-fashion-mnist-published": ("ladp-fashion-mnist-published", []),
    "digits, one client a round": ("digits", ONE),
    "fashion-mnist, one client a round": ("fashion-mnist", ONE),
}


class _EnoughError(Exception):
    """Ends a run after the measured rounds."""


class PlainRounds:
    """FedAvg as its users write it, on a run's clients and cohorts."""

    def __init__(self, assembly: Assembly, opacus: bool = False) -> None:
        self._assembly, self._module, self._opacus = assembly, assembly.model.module(), opacus
        if opacus:
            self._module = GradSampleModule(self._module)
        self._source = PartitionedSource(*assembly.data.division)
        self._keys = KeyRing.from_seed(assembly.recipe.run.seed)
        self._sampler = CohortSampler(assembly.recipe.sampling, self._keys)

    def round(self, number: int) -> None:
        """Train the round's cohort and average the models."""
        start = {name: value.clone() for name, value in self._module.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        cohort = [int(client) for client in self._sampler.cohort(number)]
        for client in cohort:
            found = self._source(client)
            if len(found):
                self._train(start, found.x, found.y, number, client)
                for name, value in self._module.state_dict().items():
                    total[name] += value
        self._module.load_state_dict(
            {name: value / max(1, len(cohort)) for name, value in total.items()}
        )

    def _train(
        self, start: dict[str, Tensor], x: inputs.Inputs, y: Tensor, number: int, client: int
    ) -> None:
        section, task = self._assembly.recipe.training, self._assembly.data.task
        if self._assembly.recipe.unit == "client":
            order = self._keys.torch_generator(Purpose.PROBE, number, client)
            plain(self._module, start, ClientTask(x, y, order, section.epochs), section.local, task)
            return
        self._module.load_state_dict(start)
        optimizer: Any = torch.optim.SGD(self._module.parameters(), lr=section.lr)
        if self._opacus:
            optimizer = DPOptimizer(
                optimizer,
                noise_multiplier=self._assembly.privacy.facts.noise_multiplier,
                max_grad_norm=self._assembly.recipe.mechanism.options["bound"],
                expected_batch_size=section.batch_size,
            )
        steps = self._assembly.privacy.facts.steps
        examples = len(self._assembly.data.dataset.train_y)
        count, rate = (
            (steps.count, steps.rate) if steps is not None else (1, section.batch_size / examples)
        )
        for _ in range(count):
            rows = torch.nonzero(torch.rand(len(y)) < rate).flatten()
            if len(rows):
                optimizer.zero_grad()
                task.loss(inputs.call(self._module, inputs.take(x, rows)), y[rows]).backward()
                optimizer.step()


def measure(case: str, rounds: int) -> dict[str, Any]:
    """Measure one case, without the first round, which warms up."""
    name, overrides = CASES[case]
    more = ["run.evaluate_every=100000", "run.checkpoint_every=100000"]
    recipe = recipes.load(name, [*overrides, *more])
    other, ours, loop = PlainRounds(Assembly(recipe), case == OPACUS), list[float](), list[float]()
    aggregate, configure = LayerwiseFedAvg.aggregate_train, LayerwiseFedAvg.configure_train
    started = 0.0

    def configured(strategy: LayerwiseFedAvg, *arguments: Any) -> Any:
        nonlocal started
        started = time.process_time()
        return configure(strategy, *arguments)

    def aggregated(strategy: LayerwiseFedAvg, number: int, replies: Any) -> Any:
        made = aggregate(strategy, number, replies)
        ours.append(time.process_time() - started)
        before = time.process_time()
        other.round(number)
        loop.append(time.process_time() - before)
        if len(ours) > rounds:
            raise _EnoughError
        return made

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(_EnoughError),
        mock.patch.object(LayerwiseFedAvg, "configure_train", configured),
        mock.patch.object(LayerwiseFedAvg, "aggregate_train", aggregated),
    ):
        launch.simulate(recipe, engine="local", run_dir=Path(folder) / "run")
    ours, loop = ours[1:], loop[1:]
    ratio = statistics.median(loop) / statistics.median(ours)
    return {
        "case": case,
        "rounds": len(ours),
        "ratio": ratio,
        "seconds": {"ours": ours, "loop": loop},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "cases", nargs="*", choices=[*CASES, []], metavar="CASE", help="all if left out"
    )
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in arguments.cases or CASES:
        rows.append(measure(case, arguments.rounds))
        print(f"{case}: {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"processor": capability, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
