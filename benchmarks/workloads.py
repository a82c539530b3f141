"""Local training of client-level recipes beside a plain loop: `python -m benchmarks.workloads --json [RECIPE ...]`.

Both train the same block of clients with the same module, examples, epochs and batches; the plain loop is `zero_grad`,
`backward`, `step` as users write it. They take turns, and a ratio is the loop's processor time over ours in the
same turn: above 1 ours is faster. One thread. If a data set is not on this machine, random inputs of its shape replace
it, with equal clients of the published number of examples; contents do not change the time. Models of more than 200,000
parameters train `LARGE` examples per client for one epoch. Recipes that bound every example are compared in
`benchmarks.example_level`, correlated noise and rounds of one client in `benchmarks.whole_rounds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedlgm import data, inputs
from fedlgm.contributions import unbounded
from fedlgm.data import DataSet
from fedlgm.errors import DataError
from fedlgm.keys import KeyRing, Purpose
from fedlgm.tasks import Task
from fedlgm.training import ClientTask, LocalTraining
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import decided, typical

LARGE = 16
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def client_level() -> list[str]:
    """Bundled recipes whose clients train before anything is bounded, and whose model needs no file."""
    loaded = {name: recipes.load(name) for name in recipes.names() if name != "nodes"}
    return [name for name, recipe in loaded.items() if recipe.unit == "client" and recipe.model.weights is None]


def plain(module: nn.Module, start: dict[str, Any], task: ClientTask, settings: LocalTraining, of: Task) -> None:
    """One client in plain PyTorch."""
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


def blocks(assembly: Assembly) -> tuple[list[tuple[Any, torch.Tensor]], bool]:
    """(inputs, targets) of a typical block of clients, and whether they are the recipe's own."""
    recipe = assembly.recipe
    size = recipe.run.block_size
    try:
        return [(task.x, task.y) for task in typical(assembly, size)], True
    except DataError:
        outline = data.outline(recipe.data.name, **recipe.data.reading)
        assert outline is not None
        examples = (data.published_examples(recipe.data.name) or 100 * recipe.federation.clients) // (
            recipe.federation.clients
        )
        stand_in = torch.randn(examples, *outline.shape), torch.randint(outline.classes or 2, (examples,))
        return [stand_in] * size, False


def measure(name: str, turns: int) -> dict[str, Any]:
    """Figures of one recipe."""
    assembly = Assembly(recipes.load(name))
    found, own = blocks(assembly)
    if not own:
        x, y = found[0]
        few = DataSet.from_arrays(
            (x[:2], y[:2]), (x[:2], y[:2]), classes=data.outline(assembly.recipe.data.name).classes
        )  # type: ignore[union-attr]
        assembly.with_data(few, data.partition(np.zeros(2, np.int64), 1, "iid"))
    assembly = decided(assembly, workers=1)
    section, settings = assembly.recipe.training, assembly.recipe.training.local
    module, epochs, large = assembly.module(), section.epochs, assembly.layers.size > 200_000
    if large:
        found, epochs = [(inputs.take(x, slice(LARGE)), y[:LARGE]) for x, y in found[:2]], 1
    start = {key: value.clone() for key, value in module.state_dict().items()}
    trainer, model = assembly.trainer(section.vectorize == "on", section.compile is True), assembly.initial_model()
    keys = KeyRing.from_seed(0)

    def tasks() -> list[ClientTask]:
        return [ClientTask(x, y, keys.torch_generator(Purpose.PROBE, i), epochs) for i, (x, y) in enumerate(found)]

    def ours() -> None:
        for update in trainer.updates(model, tasks()):
            unbounded(update)

    def loop() -> None:
        for task in tasks():
            plain(module, start, task, settings, assembly.task)

    spent: dict[str, list[float]] = {"ours": [], "loop": []}
    for turn in range(turns + 1):
        for side, work in (("ours", ours), ("loop", loop)):
            started = time.process_time()
            work()
            if turn:  # the first warms up
                spent[side].append(time.process_time() - started)
    ratios = sorted(b / a for a, b in zip(spent["ours"], spent["loop"], strict=True))
    return {
        "recipe": name,
        "model": assembly.recipe.model.name,
        "parameters": int(assembly.layers.size),
        "vectorize": section.vectorize,
        "kernel": section.kernel or "torch",
        "own_data": own,
        "clients": len(found),
        "examples_per_client": [len(y) for _, y in found],
        "epochs": epochs,
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "seconds": spent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", help="names; all client-level recipes if left out")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each")
    parser.add_argument("--json", action="store_true", help="print JSON (always done; kept for symmetry)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.recipes or client_level():
        rows.append(measure(name, arguments.turns))
        print(f"{name}: {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"processor": capability, "torch": torch.__version__, "turns": arguments.turns, "rows": rows}))


if __name__ == "__main__":
    main()
