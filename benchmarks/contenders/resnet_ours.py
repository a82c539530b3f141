"""fedlgm's Ray engine on `resnet_work`, with a stopwatch around local training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from flwr.app import Message

from benchmarks.contenders import ours
from benchmarks.contenders import resnet_work as here
from fedlgm.noise.keys import KeyRing
from fedlgm.training import Trainer
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.run_model import RunModel
from simulations.engines import cluster
from simulations.engines import ray as ray_engine


class _Timed:
    """A trainer with a stopwatch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def updates(self, model: Any, tasks: Any) -> Iterator[Any]:
        iterator = iter(self._trainer.updates(model, tasks))
        while True:
            started = time.perf_counter()
            update = next(iterator, None)
            here.spent[0] += time.perf_counter() - started
            if update is None:
                return
            yield update


class _TimedModel(RunModel):
    def trainer(self, vectorized: bool | None = None, compiled: bool | None = None) -> Trainer:
        return _Timed(super().trainer(vectorized, compiled))


class _Worker(ray_engine.Worker):
    """A worker that reports its training time."""

    def hold(self, *arguments: Any) -> None:
        ray_engine.Assembly = partial(Assembly, model=_TimedModel)  # type: ignore[assignment, attr-defined]
        super().hold(*arguments)

    def run(self, *arguments: Any) -> Any:
        here.spent[0] = 0.0
        message, *more = super().run(*arguments)
        for metrics in message.content.metric_records.values():
            metrics["training"] = here.spent[0]
        return message, *more


class _Grid(ray_engine.RayGrid):
    """Adds up the workers' training times in a round."""

    worker = _Worker
    training = 0.0

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        self.training = 0.0
        for reply in super().deliver(messages):
            for metrics in reply.content.metric_records.values():
                self.training += float(metrics.pop("training"))  # type: ignore[arg-type]
            yield reply


def main() -> None:
    recipe = recipes.load(
        "fashion-mnist",
        [
            "model={name = 'resnet18'}",
            f"federation.clients={here.CLIENTS}",
            f"federation.rate={here.COHORT / here.CLIENTS}",
            (
                f"training={{optimizer = 'sgd', lr = {here.LR}, epochs = 1, batch_size = "
                f"{here.BATCH}}}"
            ),
            f"run.block_size={here.COHORT // here.WORKERS}",
        ],
    )
    assembly = Assembly(recipe, divided=(here.dataset(), here.clients()))
    keys = KeyRing.from_seed(1)
    with cluster.session(None, here.WORKERS, lambda: _Grid(here.WORKERS)) as ready:
        grid = ready()
        ours.serve(
            grid.serving(assembly, keys), assembly, keys, here, lambda: {"training": grid.training}
        )


if __name__ == "__main__":
    main()
