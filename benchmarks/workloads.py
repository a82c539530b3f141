"""Local training of client-level recipes, compared with a plain loop:
`python -m benchmarks.workloads --json [RECIPE ...]`.

Both train the same block of clients with the same module, examples, epochs and batches; the plain
loop is `zero_grad`, `backward`, `step` as users write it. Each side runs in a separate process,
since a trainer changes how its process returns memory. They take turns, and a ratio is the loop's
processor time divided by ours in the same turn: above 1, ours is faster. Both sides use one thread.
If a data set is not on this machine, random inputs of its shape replace it, since contents do not
change the time. The clients then have equal shares of the published number of examples. Models of
more than 200,000 parameters train `LARGE` examples per client for one epoch.
`benchmarks.example_level` compares recipes that bound every example. `benchmarks.whole_rounds`
compares correlated noise and rounds of one client.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from clients import PartitionedSource
from fedlgm import data
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.errors import DataError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.training import ClientTask, LocalTraining, inputs
from fedlgm.training.tasks import Task
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_auto

LARGE = 16
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}


def client_level() -> list[str]:
    """List the bundled recipes whose clients train before anything is bounded, and whose model
    needs no file.
    """
    loaded = {name: recipes.load(name) for name in recipes.names() if name != "nodes"}
    return [
        name
        for name, recipe in loaded.items()
        if recipe.unit == "client" and recipe.model.weights is None
    ]


def plain(
    module: nn.Module, start: dict[str, Any], task: ClientTask, settings: LocalTraining, of: Task
) -> None:
    """Train one client in plain PyTorch."""
    module.load_state_dict(start)
    options = {"momentum": settings.momentum} if settings.optimizer == "sgd" else {}
    optimizer = _OPTIMIZERS[settings.optimizer](module.parameters(), lr=settings.lr, **options)
    module.train()
    for order in task.permutations():
        for rows in order.split(settings.batch_size):
            optimizer.zero_grad()
            of.loss(inputs.call(module, inputs.take(task.x, rows)), task.y[rows]).backward()
            if settings.gradient_clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), settings.gradient_clip)
            optimizer.step()
    _ = [value - start[name] for name, value in module.state_dict().items()]


def typical(assembly: Assembly, count: int) -> list[ClientTask]:
    """Choose `count` clients, from the median number of examples upwards, with the layers that the
    first plan trains.
    """
    source, keys = (
        PartitionedSource(*assembly.data.division),
        KeyRing.from_seed(0),
    )
    order = np.argsort(assembly.data.sizes)
    order = order[assembly.data.sizes[order] > 0]
    epochs, trained = assembly.recipe.training.epochs, assembly.privacy.first_plan().trained
    orders = (
        (source(int(c)), keys.torch_generator(Purpose.PROBE, int(c)))
        for c in order[len(order) // 2 :][:count]
    )
    return [ClientTask(data.x, data.y, order, epochs, trained) for data, order in orders]


def blocks(assembly: Assembly) -> tuple[list[tuple[Any, torch.Tensor]], bool]:
    """Return the (inputs, targets) of a typical block of clients, and whether they come from the
    recipe's data.
    """
    recipe = assembly.recipe
    size = recipe.run.block_size
    try:
        return [(task.x, task.y) for task in typical(assembly, size)], True
    except DataError:
        outline = data.outline(recipe.data.name, **recipe.data.reading)
        assert outline is not None
        examples = (
            data.published_examples(recipe.data.name) or 100 * recipe.federation.clients
        ) // (recipe.federation.clients)
        stand_in = (
            torch.randn(examples, *outline.shape),
            torch.randint(outline.classes or 2, (examples,)),
        )
        return [stand_in] * size, False


class Side:
    """A forked process that does one contender's work on request, and answers with its processor
    time.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._line, other = context.Pipe()
        self._process = context.Process(target=self._serve, args=(work, other), daemon=True)
        self._process.start()

    @staticmethod
    def _serve(work: Callable[[], None], line: Connection) -> None:
        while line.recv():
            started = time.process_time()
            work()
            line.send(time.process_time() - started)

    def seconds(self) -> float:
        """Return the processor time of one turn."""
        self._line.send(True)
        return float(self._line.recv())

    def close(self) -> None:
        """End the process."""
        self._line.send(False)
        self._process.join()


class Block(NamedTuple):
    """The clients that both sides of a comparison train, by inputs and targets, and the number of
    epochs.
    """

    assembly: Assembly
    clients: list[tuple[Any, torch.Tensor]]
    epochs: int
    own_data: bool

    @classmethod
    def of(cls, name: str, changes: Sequence[str] = ()) -> Block:
        """Make a typical block of clients of a recipe."""
        assembly = Assembly(recipes.load(name, list(changes)))
        found, own = blocks(assembly)
        epochs = assembly.recipe.training.epochs
        if assembly.model.layers.size > 200_000:
            found, epochs = [(inputs.take(x, slice(LARGE)), y[:LARGE]) for x, y in found[:2]], 1
        return cls(assembly, found, epochs, own)

    def tasks(self) -> list[ClientTask]:
        """Return the clients' tasks, with the same order of examples at every call."""
        keys = KeyRing.from_seed(0)
        return [
            ClientTask(x, y, keys.torch_generator(Purpose.PROBE, i), self.epochs)
            for i, (x, y) in enumerate(self.clients)
        ]


def compared(seconds: dict[str, Callable[[], float]], turns: int) -> dict[str, Any]:
    """Measure "ours" and "loop" in turn, after one turn that warms up; return their seconds and the
    ratios of the loop's time to ours.
    """
    spent: dict[str, list[float]] = {side: [] for side in seconds}
    for turn in range(turns + 1):
        for side, measured in seconds.items():
            took = measured()
            if turn:
                spent[side].append(took)
    ratios = sorted(b / a for a, b in zip(spent["ours"], spent["loop"], strict=True))
    return {
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "seconds": spent,
    }


def measure(name: str, turns: int) -> dict[str, Any]:
    """Measure one recipe."""
    block = Block.of(name)
    module, settings = block.assembly.model.module(), block.assembly.recipe.training.local
    start = {key: value.clone() for key, value in module.state_dict().items()}

    def loop() -> None:
        for task in block.tasks():
            plain(module, start, task, settings, block.assembly.data.task)

    plainly = Side(loop)  # before this process makes a trainer
    assembly = resolve_auto(block.assembly, workers=1)
    section, model = assembly.recipe.training, assembly.model.initial()
    trainer = assembly.model.trainer()

    def ours() -> None:
        for update in trainer.updates(model, block.tasks()):
            raw_updates(update)

    sides = {"ours": Side(ours), "loop": plainly}
    figures = compared({side: work.seconds for side, work in sides.items()}, turns)
    for work in sides.values():
        work.close()
    return {
        "recipe": name,
        "model": assembly.recipe.model.name,
        "parameters": int(assembly.model.layers.size),
        "vectorize": section.vectorize,
        "kernel": section.kernel or "torch",
        "own_data": block.own_data,
        "clients": len(block.clients),
        "examples_per_client": [len(y) for _, y in block.clients],
        "epochs": block.epochs,
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", help="names; all client-level recipes if left out")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each")
    parser.add_argument(
        "--json", action="store_true", help="print JSON (always done; kept for symmetry)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.recipes or client_level()
    rows = [measure(names[0], arguments.turns)] if len(names) == 1 else []
    for name in names[len(rows) :]:
        command = [
            sys.executable,
            "-m",
            "benchmarks.workloads",
            name,
            "--turns",
            str(arguments.turns),
        ]
        rows += json.loads(
            subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        )["rows"]
        print(f"{name}: {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        json.dumps(
            {
                "processor": capability,
                "torch": torch.__version__,
                "turns": arguments.turns,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
