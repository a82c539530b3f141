"""The `processes` engine, with workers forked from this process, which has everything imported and
the data loaded.

It is for one Linux machine and the CPU. No service is started, no data are sent, and a worker
shares the driver's memory until it writes.

A lost worker is replaced, and its block is repeated with the same keys. Workers are forked from a
helper process that was forked before the run began, because by the time a worker is replaced the
driver has threads and open files, which a fork should not inherit. All of these processes end with
the driver.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
from flwr.app import ArrayRecord, Message
from typing_extensions import override

from clients import AnyClient
from fedlgm import wire
from fedlgm.errors import ConfigError, RunError
from fedlgm.noise.keys import KeyRing
from fedlgm.training.devices import return_freed_memory
from simulations.config.assembly import Assembly
from simulations.engines.base import EngineOptions, GridEngine
from simulations.engines.grid import RETRIES, Lost, PoolGrid, Served, require_memory

_WORKER_GIB = 0.1  # memory that a worker writes, with a small model
_ENDING_S = 5.0  # time after which a process that does not end is killed
# Seconds that a fork has for its first product, then seconds for the fork that replaces it, and so
# on.
_COMPUTES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_COMPUTED, _NO_GRADIENTS = b"c", b"g"
_PRODUCT = (256, 256)  # so large that MKL allocates memory for the product
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class ProcessGrid(PoolGrid):
    """Grid over forked workers, which `close` ends.

    Args:
        workers: number of workers.
        assembly: the run's objects, which workers inherit.
        keys: key ring of the clients.
    """

    def __init__(self, workers: int, assembly: Assembly, keys: KeyRing) -> None:
        super().__init__(workers)
        self._busy: dict[Connection, int] = {}  # worker -> number of its message
        self._models: dict[
            Connection, ArrayRecord
        ] = {}  # worker -> the last model that it was sent
        self._asked, self._lost_in_a_row = 0, 0
        self._parent = _Parent(assembly, keys)
        try:
            self._idle += (self._parent.worker() for _ in range(workers))
        except BaseException:
            self.close()
            raise

    def _ask(self, message: Message) -> int | None:
        """Number of the message sent to an idle worker; None if the worker is gone and another
        replaced it.
        """
        worker = self._idle.pop()
        arrays = message.content.array_records.get(wire.ARRAYS)
        same_model = arrays is not None and self._models.get(worker) is arrays
        parcel = (
            message.metadata,
            message.content.config_records[wire.CONFIG],
            None if same_model else arrays,
            same_model,
        )
        try:
            worker.send_bytes(pickle.dumps(parcel, protocol=5))
        except OSError:
            self._replace(worker)
            return None
        if arrays is not None:
            self._models[worker] = arrays
        self._asked += 1
        self._busy[worker] = self._asked
        return self._asked

    def _wait_for_replies(self) -> Iterator[tuple[int, Message | Exception]]:
        for worker in wait(list(self._busy)):
            assert isinstance(worker, Connection)
            number = self._busy.pop(worker)
            try:
                reply, said = pickle.loads(worker.recv_bytes())
            except (EOFError, OSError):
                self._replace(worker)
                yield number, Lost()
                continue
            self._lost_in_a_row = 0
            self._idle.append(worker)
            for notice in said:
                self.say(notice)
            yield number, reply

    def _replace(self, worker: Connection) -> None:
        self._models.pop(worker, None)
        worker.close()
        self._lost_in_a_row += 1
        if self._lost_in_a_row > RETRIES + self._workers:
            raise RunError(
                f"{self._lost_in_a_row} workers were lost in a row before they had done any work"
            )
        self._idle.append(self._parent.worker())

    def close(self) -> None:
        """End the workers at once."""
        self._parent.end()
        for worker in (*self._idle, *self._busy):
            worker.close()


class _Parent:
    """A process without threads, forked before the run begins, which forks workers on request.

    A fork inherits the locks that other threads of the driver hold at that moment, and nobody
    releases its copies. A thread that ends holds all locks of MKL's allocator, also after it was
    joined (Python before 3.13 does not wait for the end of the system's thread). So a fork is used
    only after it has computed a product, and a fork that cannot do this is replaced. The forks of a
    fork inherit no held lock.

    Raises:
        RunError: five forks in a row computed nothing, or forks cannot compute gradients.
    """

    def __init__(self, assembly: Assembly, keys: KeyRing) -> None:
        for patience in _COMPUTES_S:
            self._fork(assembly, keys)
            said = b""
            try:
                said = self._first_words(patience)
            finally:
                if said != _COMPUTED:
                    self.end(patience=0)
            if said == _COMPUTED:
                return
            if said == _NO_GRADIENTS:
                raise RunError(
                    "PyTorch has started threads for gradients in this process, so processes that "
                    "are forked from it cannot train. It does this if a program uses torch.compile "
                    "or torch.export before its first gradient: compute a gradient first, with "
                    "torch.ones(1, requires_grad=True).backward(), or use engine 'ray' or 'local'"
                )
        raise RunError(
            f"each of {len(_COMPUTES_S)} processes that were forked from this one waits for a lock "
            "that another thread held when it was forked: end the other threads of this program "
            "first, or use engine 'ray' or 'local'"
        )

    def _fork(self, assembly: Assembly, keys: KeyRing) -> None:
        ours, theirs = socket.socketpair()
        driver = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forks beside threads; what they may break is tested.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _run(lambda: _fork_workers(theirs, assembly, keys, driver))
        theirs.close()
        self._line = ours

    def _first_words(self, patience: float) -> bytes:
        """What the process says within so many seconds of its first product and gradient."""
        self._line.settimeout(patience)
        try:
            return self._line.recv(1)
        except OSError:
            return b""
        finally:
            self._line.settimeout(None)

    def worker(self) -> Connection:
        """A connection to a new worker.

        Raises:
            RunError: this process was killed.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._line, [b"w"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RunError(
                    "the process that starts workers was killed (if memory ran out: use fewer "
                    "workers); released rounds are kept, and the run can be continued"
                ) from error
        return Connection(ours.detach())

    def end(self, patience: float = _ENDING_S) -> None:
        """End the process and its workers, and kill it if it has not ended after so many seconds."""
        self._line.close()
        deadline = time.monotonic() + patience
        with suppress(ChildProcessError, ProcessLookupError):
            while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                time.sleep(0.002)


def _run(body: Any) -> NoReturn:
    """The main function of a forked process, which never returns to its parent's code."""
    status = 1
    try:
        body()
        status = 0
    finally:
        os._exit(status)


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent, and ignore Ctrl-C, which the driver
    handles.
    """
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this call
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _fork_workers(line: socket.socket, assembly: Assembly, keys: KeyRing, driver: int) -> None:
    """Fork a worker for every connection that the driver sends, until the driver closes its own."""
    _end_with(driver)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (the driver's may be locked for good)
    torch.set_num_threads(1)
    gc.freeze()  # a collection would write to every object, and so copy the driver's memory
    torch.ones(_PRODUCT) @ torch.ones(_PRODUCT)
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError:
        line.send(_NO_GRADIENTS)
        return
    line.send(_COMPUTED)
    here = os.getpid()
    workers: set[int] = set()
    while True:
        asked, handles, _, _ = socket.recv_fds(line, 1, 1)
        for worker in list(workers):  # ended workers are reaped
            if os.waitpid(worker, os.WNOHANG)[0] != 0:
                workers.remove(worker)
        if not asked:
            break
        pid = os.fork()
        if pid == 0:
            line.close()
            _run(lambda: _serve(Connection(handles[0]), assembly, keys, here))  # noqa: B023  (at once)
        os.close(handles[0])
        workers.add(pid)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    for worker in workers:
        os.waitpid(worker, 0)


def _serve(line: Connection, assembly: Assembly, keys: KeyRing, parent: int) -> None:
    """A worker: answers message after message."""
    _end_with(parent)
    app: Served | None = None
    model: ArrayRecord | None = None
    while True:
        try:
            metadata, config, arrays, same_model = pickle.loads(line.recv_bytes())
        except (EOFError, OSError):
            return
        model = model if same_model or arrays is None else arrays
        try:
            if app is None:
                warnings.simplefilter("ignore")  # the driver has shown these warnings
                app = Served(assembly.client(keys, AnyClient()).as_app())
            reply, said = app.answer(metadata, config, model if same_model else arrays)
            answer = pickle.dumps((reply, said), protocol=5)
        except Exception as error:
            answer = _failure(error)
        line.send_bytes(answer)


def _failure(error: Exception) -> bytes:
    """A worker's report of an error, with the error itself if it can be pickled."""
    try:
        text = pickle.dumps((error, []), protocol=5)
        pickle.loads(text)
    except Exception:
        return pickle.dumps(
            (RunError(f"a worker failed: {type(error).__name__}: {error}"), []), protocol=5
        )
    return text


class ProcessEngine(GridEngine):
    """Workers forked from this process, for one Linux machine and clients that train on the CPU.

    Args:
        options: workers.

    Raises:
        ConfigError: the system is not Linux, or an option belongs to another engine.

    Example:
        >>> ProcessEngine(EngineOptions(ray_address="auto"))
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: a Ray address is for engine 'ray', not 'processes'
    """

    name = "processes"
    refuses = ("ray_address", "supernodes")

    def __init__(self, options: EngineOptions | None = None) -> None:
        super().__init__(options)
        if sys.platform != "linux":
            raise ConfigError(
                f"engine {self.name!r} forks its workers, which needs Linux: use engine 'ray' or "
                "'local'"
            )

    @contextmanager
    @override
    def start(self, assembly: Assembly) -> Iterator[None]:
        recipe = assembly.recipe
        problem = fork_problem(recipe.training.device, recipe.run.threads)
        if problem:
            raise ConfigError(f"engine {self.name!r} {problem}: use engine 'ray' or 'local'")
        require_memory(self.workers(recipe), _WORKER_GIB)
        yield

    @contextmanager
    @override
    def grid(self, assembly: Assembly, keys: KeyRing) -> Iterator[ProcessGrid]:
        assembly.data.partition  # noqa: B018  (inherited, not made by every worker)
        if assembly.recipe.noised_by.uploads_released:
            assembly.privacy.method  # noqa: B018  (likewise)
        return_freed_memory()
        with closing(ProcessGrid(self.workers(assembly.recipe), assembly, keys)) as grid:
            yield grid


def fork_problem(device: str, threads: int) -> str:
    """The reason why forked workers cannot train clients on this device, with this number of
    threads; "" if they can.
    """
    if device != "cpu":
        return f"trains on the CPU, not on {device}"
    if torch.cuda.is_available():
        return (
            "cannot fork its workers on a machine with a GPU, where torch refuses to train in forks"
        )
    if threads != 1:
        return f"has one thread per worker, not run.threads = {threads}"
    return ""
