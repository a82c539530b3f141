"""The `ray` engine, with resident actors that hold model and data once and serve whole blocks of
clients.

The global model is put into Ray's object store once per round, and the data set once per run; every
actor reads them without a copy. A block lost with its actor is repeated elsewhere with the same
keys, so the result does not change.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
from flwr.app import Array, ArrayRecord, Message
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError

from clients import AnyClient
from fedlgm import wire
from fedlgm.cache import version_of
from fedlgm.data import DataSet, LazyArray, Partition
from fedlgm.errors import ConfigError, MemoryWarning, Notice, RunError
from fedlgm.noise.keys import KeyRing
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.own import Own
from simulations.engines.grid import RETRIES, Lost, PoolGrid, Served

# time for the first of several workers to start, and this time on a machine that is busy with other
# work
_START_S, _BUSY_S = 180.0, 1800.0
_SAY_S = 30.0  # time between two notices that no worker has started
_BUSY = 2.0  # load per CPU above which a machine is busy
# packages that must have the same version on every machine
_SAME = ("fedlgm", "torch", "numpy", "flwr")
# errors that mean the loss of a worker or its node, not a fault of its code
_LOST = (RayActorError, OutOfMemoryError, ObjectLostError)

_Arrays = dict[str, tuple[str, tuple[int, ...], str, np.ndarray]]
"""A record in parts: name -> dtype, shape, stype and data of Flower's `Array`, with the data as
uint8."""


class Worker:
    """A ClientApp with its data, made once inside a Ray actor."""

    def hold(
        self,
        recipe: dict[str, Any],
        keys: tuple[int, bool],
        arrays: dict[str, ray.ObjectRef],
        classes: int | None,
        own: Own,
        versions: dict[str, str],
    ) -> None:
        """Make the app.

        Args:
            recipe: the recipe as plain values.
            keys: root of the key ring, and whether it is secret.
            arrays: references to the data set's and the partition's arrays, which are mapped from
                the object store.
            classes: number of classes, if the set has any.
            own: users' objects.
            versions: versions of packages on the driver's machine.

        Raises:
            RunError: this machine has other versions.
        """
        here = _versions()
        if here != versions:
            others = ", ".join(
                f"{name} {here[name]} instead of {versions[name]}"
                for name in _SAME
                if here[name] != versions[name]
            )
            raise RunError(
                f"a worker on {platform.node()} has {others}: install the same versions on every "
                "machine"
            )
        parsed = recipes.Recipe.model_validate(recipe)
        values = dict(zip(arrays, ray.get(list(arrays.values())), strict=True))
        partition = Partition(values.pop("order"), values.pop("offsets"))
        dataset = DataSet.from_parts(parsed.data.name, values, classes)
        assembly = Assembly(parsed, own, divided=(dataset, partition))
        self._served = Served(assembly.client(KeyRing(*keys), AnyClient()).as_app())

    def run(
        self, metadata: Any, config: Any, model: _Arrays | None
    ) -> tuple[Message, _Arrays, list[Notice]]:
        """Serve one message, and return the reply, its arrays, and warnings for the driver to
        print.
        """
        reply, said = self._served.answer(
            metadata, config, None if model is None else _record(model)
        )
        arrays = _apart(reply.content.pop(wire.ARRAYS, ArrayRecord()))  # type: ignore[arg-type]
        return reply, arrays, said


class RayGrid(PoolGrid):
    """Grid over resident actors, which start at once; `serving` sends them data and objects.

    Args:
        workers: number of actors.
        gpus: GPU share of an actor.
    """

    worker = Worker
    """The class that an actor runs."""

    def __init__(self, workers: int, gpus: float = 0.0) -> None:
        super().__init__(workers)
        self._options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0}
        self._actors = [self._actor() for _ in range(workers)]
        self._arguments: tuple[Any, ...] = ()
        self._held: dict[int, tuple[Any, ...]] = {}  # actor -> arguments with which it started
        self._starting: dict[ray.ObjectRef, int] = {}
        self._busy: dict[ray.ObjectRef, int] = {}
        # the last model in the object store
        self._model: tuple[ArrayRecord | None, ray.ObjectRef | None] = (None, None)
        self._failed_starts = 0

    def serving(self, assembly: Assembly, keys: KeyRing) -> RayGrid:
        """Send the data once through the object store and make the actors' clients; returns `self`.

        Args:
            assembly: the run's objects.
            keys: key ring of the clients.

        Raises:
            ConfigError: the training set is a `LazyArray`.
        """
        dataset, partition = assembly.data.division
        if isinstance(dataset.held("train_x"), LazyArray):
            raise ConfigError(
                "a LazyArray cannot be sent to Ray's workers: use engine='processes' or 'local'"
            )
        arrays = dataset.parts() | {"order": partition.order, "offsets": partition.offsets}
        self._arguments = (
            assembly.recipe.model_dump(exclude_none=True),
            (keys.root, keys.secret),
            {name: ray.put(np.ascontiguousarray(array)) for name, array in arrays.items()},
            dataset.classes,
            assembly.own.without_data(),
            _versions(),
        )
        for slot in range(len(self._actors)):
            self._equip(slot)
        return self

    def _ask(self, message: Message) -> ray.ObjectRef:
        arrays = message.content.array_records.get(wire.ARRAYS)
        if arrays is not None and self._model[0] is not arrays:
            self._model = arrays, ray.put(_apart(arrays))
        model = None if arrays is None else self._model[1]
        slot = self._idle.pop()
        config = message.content.config_records[wire.CONFIG]
        signal = self._actors[slot].run.remote(message.metadata, config, model)
        self._busy[signal] = slot
        return signal

    def _wait_for_replies(self) -> Iterator[tuple[ray.ObjectRef, Message | Exception]]:
        finished = self._next([*self._busy, *self._starting])
        if finished in self._starting:
            self._finish_start(finished)
            return
        slot = self._busy.pop(finished)
        try:
            reply, arrays, said = ray.get(finished)
        except _LOST as error:
            if isinstance(error, OutOfMemoryError):
                self._narrow(slot)
            self._restart(slot)
            yield finished, Lost(f": {error}")
            return
        except RayError as error:
            self._idle.append(slot)
            yield finished, _cause(error)
            return
        self._idle.append(slot)
        if arrays:
            reply.content[wire.ARRAYS] = _record(arrays)
        for notice in said:
            self.say(notice)
        yield finished, reply

    def _actor(self) -> Any:
        return ray.remote(self.worker).options(**self._options).remote()

    def _restart(self, slot: int) -> None:
        # needed if the actor still runs and only the objects that it made are lost
        ray.kill(self._actors[slot])
        self._actors[slot] = self._actor()
        self._equip(slot)

    def _narrow(self, slot: int) -> None:
        """Let workers train half as many clients at once as did the worker that Ray ended for lack
        of memory.
        """
        if self._held[slot] is not self._arguments:
            # another worker ended before, and workers that start now already train fewer clients at
            # once
            return
        recipe, *others = self._arguments
        training = recipe["training"]
        width = training.get("width", recipe["run"]["block_size"])
        if training["vectorize"] == "on" and width > 1:
            half = (width + 1) // 2
            self.say(
                MemoryWarning(
                    f"a worker with {width} clients at once did not fit into memory: continuing "
                    f"with {half}"
                )
            )
            self._arguments = (recipe | {"training": training | {"width": half}}, *others)

    def _equip(self, slot: int) -> None:
        """Give an actor work once it is up. If it never comes up, other actors do the work."""
        self._held[slot] = self._arguments
        self._starting[self._actors[slot].hold.remote(*self._arguments)] = slot

    def _finish_start(self, signal: ray.ObjectRef) -> None:
        slot = self._starting.pop(signal)
        try:
            ray.get(signal)
            self._failed_starts = 0
            self._idle.append(slot)
        except _LOST as error:
            self._failed_starts += 1
            if self._failed_starts > RETRIES:
                raise RunError(f"the workers did not start: {error}") from error
            self._restart(slot)
        except RayError as error:
            raise _cause(error) from error

    def _next(self, signals: list[ray.ObjectRef]) -> ray.ObjectRef:
        """The first of these signals that is finished."""
        idle_for_good, begun = len(signals) == len(self._starting), time.monotonic()
        while True:
            finished, _ = ray.wait(
                signals, num_returns=1, timeout=_SAY_S if idle_for_good else None
            )
            if finished:
                return finished[0]
            waited, load = time.monotonic() - begun, os.getloadavg()[0] / (os.cpu_count() or 1)
            state = f"{ray.available_resources().get('CPU', 0):g} of Ray's CPUs are free, load {load:.1f} per CPU"
            if waited > (_BUSY_S if load > _BUSY else _START_S):
                raise RunError(
                    f"no worker started within {waited:.0f} s: {state}; use --engine processes, or "
                    "wait"
                )
            self.say(Notice(f"no worker has started for {waited:.0f} s: {state}; still waiting"))

    def close(self) -> None:
        """Stop the actors."""
        for actor in self._actors:
            ray.kill(actor)


def _versions() -> dict[str, str]:
    """The machine's versions of the packages that a client's bits depend on."""
    return {name: version_of(name) for name in _SAME}


def _apart(record: ArrayRecord) -> _Arrays:
    """A record's arrays with their bytes as NumPy arrays, which Ray writes to its object store
    without a copy.
    """
    return {
        name: (a.dtype, a.shape, a.stype, np.frombuffer(a.data, np.uint8))
        for name, a in record.items()
    }


def _record(arrays: _Arrays) -> ArrayRecord:
    """The record that was taken apart; its bytes stay where they are, in Ray's object store."""
    record = ArrayRecord()
    for name, (dtype, shape, stype, data) in arrays.items():
        record[name] = Array(dtype, shape, stype, b"")
        record[name].data = data.data  # type: ignore[assignment]
    return record


def _cause(error: RayError) -> Exception:
    """The error in the worker itself, if Ray knows it, with the worker's traceback."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return error
    cause.__cause__ = error
    return cause


def gpu_share(device: torch.device, workers: int, gpus: float | None = None) -> float:
    """GPU share of each of `workers` actors that train on `device`; 0 if no GPU is needed.

    Args:
        device: where the clients train.
        workers: number of actors.
        gpus: GPUs of the cluster; default: Ray's number.

    Raises:
        RunError: the cluster has no GPU, or the device names one of several GPUs.
    """
    if device.type != "cuda":
        return 0.0
    if device.index is not None:
        raise RunError(
            f"Ray gives each worker its own GPU: use training.device = 'cuda' instead of '{device}'"
        )
    gpus = ray.cluster_resources().get("GPU", 0.0) if gpus is None else gpus
    if gpus < 1:
        raise RunError(
            f"training.device = 'cuda' needs a GPU for {workers} workers, but Ray has {gpus:g}: "
            "use --engine local, or training.device = 'cpu'"
        )
    # The share is small enough for all workers to fit on the GPUs. Ray counts ten-thousandths.
    return math.floor(1e4 / math.ceil(workers / gpus)) / 1e4
