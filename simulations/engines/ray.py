"""The `ray` engine: resident actors that hold model and data once and serve whole blocks of clients.

The global model is put into Ray's object store once a round; the data set once a run, read by every actor without a
copy.
A block lost with its actor is done again elsewhere with the same keys, so the result does not change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from ray.exceptions import RayActorError, RayError

from fedlgm import wire
from fedlgm.data import DataSet, Partition
from fedlgm.errors import RunError
from fedlgm.keys import KeyRing
from simulations.engines.grid import WorkerGrid

_RETRIES = 8  # losses of one block before the run gives up
_DATA_FIELDS = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True)
class _Parcel:
    """A message taken apart so that its model travels once a round."""

    metadata: Any
    config: Any
    model: ray.ObjectRef | None


class Worker:
    """Runs inside a Ray actor: a ClientApp with its data, made once.

    Args:
        recipe: the recipe as TOML.
        root: root of the key ring.
        arrays: data set and partition arrays, read from the object store without a copy.
        classes: number of classes.
    """

    def __init__(self, recipe: dict[str, Any], root: int, arrays: dict[str, np.ndarray], classes: int) -> None:
        from simulations import recipe as recipes
        from simulations.assembly import Assembly

        parsed = recipes.validate(recipe)
        assembly = Assembly(parsed)
        dataset = DataSet(parsed.data.name, **{name: arrays[name] for name in _DATA_FIELDS}, classes=classes)
        assembly.__dict__["dataset"] = dataset
        assembly.__dict__["partition"] = Partition(arrays["order"], arrays["offsets"])
        self._app = assembly.client(KeyRing(root)).as_app()
        self._context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})

    def ready(self) -> int:
        """Process id, once the actor is up."""
        return os.getpid()

    def run(self, metadata: Any, config: Any, model: np.ndarray | None) -> Message:
        """Serve one message."""
        content = RecordDict({wire.CONFIG: config})
        if model is not None:
            content[wire.ARRAYS] = ArrayRecord({wire.MODEL: Array(model)})
        return self._app(Message(content=content, metadata=metadata), self._context)  # type: ignore[call-overload]


class RayGrid(WorkerGrid):
    """Grid over resident actors.

    Args:
        assembly: the run's objects; its data are shipped once through the object store.
        keys: key ring of the clients.
        workers: number of actors.
        gpus: GPU share of an actor.
    """

    def __init__(self, assembly: Any, keys: KeyRing, workers: int, gpus: float = 0.0) -> None:
        super().__init__(workers)
        dataset, partition = assembly.dataset, assembly.partition
        arrays = {name: getattr(dataset, name) for name in _DATA_FIELDS}
        arrays |= {"order": partition.order, "offsets": partition.offsets}
        self._arguments = (
            assembly.recipe.model_dump(exclude_none=True),
            keys.root,
            {name: ray.put(np.ascontiguousarray(array)) for name, array in arrays.items()},
            dataset.classes,
        )
        self._options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0}
        self._actors = [self._start() for _ in range(workers)]

    def _start(self) -> Any:
        recipe, root, arrays, classes = self._arguments
        return (
            ray.remote(_RemoteWorker)
            .options(**self._options)
            .remote(recipe, root, list(arrays), list(arrays.values()), classes)
        )

    def pids(self) -> list[int]:
        """Process ids of the actors."""
        return [int(pid) for pid in ray.get([actor.ready.remote() for actor in self._actors])]

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        """See `WorkerGrid.deliver`: each actor takes the next block when it is free; replies wait for their turn."""
        models: dict[int, ray.ObjectRef] = {}
        parcels = [self._parcel(message, models) for message in messages]
        waiting = list(range(len(parcels)))[::-1]
        losses = dict.fromkeys(waiting, 0)
        idle = list(range(len(self._actors)))
        running: dict[ray.ObjectRef, tuple[int, int]] = {}
        done: dict[int, Message] = {}
        turn = 0
        while turn < len(parcels):
            # Out-of-turn replies are bounded, so that memory does not grow with the cohort.
            while waiting and idle and len(done) + len(running) < 4 * len(self._actors):
                block, slot = waiting.pop(), idle.pop()
                parcel = parcels[block]
                running[self._actors[slot].run.remote(parcel.metadata, parcel.config, parcel.model)] = (block, slot)
            (finished,), _ = ray.wait(list(running), num_returns=1)
            block, slot = running.pop(finished)
            try:
                done[block] = ray.get(finished)
            except RayActorError as error:
                losses[block] += 1
                if losses[block] > _RETRIES:
                    raise RunError(f"a block of clients was lost {_RETRIES} times with its worker: {error}") from error
                waiting.append(block)
                self._actors[slot] = self._start()
            except RayError as error:
                cause = getattr(error, "cause", None)
                raise (cause if isinstance(cause, Exception) else error) from error
            idle.append(slot)
            while turn in done:
                yield done.pop(turn)
                turn += 1

    def _parcel(self, message: Message, models: dict[int, ray.ObjectRef]) -> _Parcel:
        arrays = message.content.array_records.get(wire.ARRAYS)
        model = None
        if arrays is not None:
            if id(arrays) not in models:
                models[id(arrays)] = ray.put(arrays[wire.MODEL].numpy())
            model = models[id(arrays)]
        return _Parcel(message.metadata, message.content.config_records[wire.CONFIG], model)

    def close(self) -> None:
        """Stop the actors."""
        for actor in self._actors:
            ray.kill(actor)


class _RemoteWorker(Worker):
    """`Worker` with its arrays as separate arguments, which Ray maps from the object store."""

    def __init__(
        self, recipe: dict[str, Any], root: int, names: list[str], refs: list[ray.ObjectRef], classes: int
    ) -> None:
        super().__init__(recipe, root, dict(zip(names, ray.get(refs), strict=True)), classes)


def connect(address: str | None, workers: int) -> None:
    """Start Ray on this machine, or join the cluster at `address`.

    Raises:
        RunError: no cluster there, or too few CPUs for the workers.
    """
    options: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "configure_logging": True,
    }
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not ray.is_initialized():
        if address is None:
            ray.init(num_cpus=max(workers, 1), **options)
        else:
            try:
                ray.init(address=address, **{k: v for k, v in options.items() if k != "include_dashboard"})
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise RunError(f"no Ray cluster at {address!r}: {error}") from error
    available = int(ray.cluster_resources().get("CPU", 0))
    if workers > available:
        raise RunError(f"{workers} workers need {workers} CPUs, Ray has {available}: use --workers {max(available, 1)}")


def shutdown() -> None:
    """Leave Ray; a local instance stops with it."""
    ray.shutdown()
