"""Ray on this machine or on a cluster: start or join it, and shut it down or leave it."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psutil
import ray

from fedlgm.errors import RunError
from fedlgm.files import explain_failure
from simulations.engines.grid import require_memory

left_behind = threading.Event()
"""Set if Ray was stopped from outside but does not end. Ray's handler at Python's exit would then
also hang.
"""
_SERVERS = ("gcs_server", "raylet")
_WORKER_GIB = 0.5  # memory of a worker that has imported everything, with a small model
_LOOK_S = 0.2
# patience with Ray's start and end, and with a start whose control store is gone
_PATIENCE_S, _GONE_S = 15.0, 3.0
_START = "start it with `ray start --head`, or check the address"
_QUIET: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": "ERROR",
    "configure_logging": True,
}

T = TypeVar("T")


@contextmanager
def session(
    address: str | None,
    workers: int,
    then: Callable[[], T],
    leave: Callable[[T], None] = lambda outcome: None,
) -> Iterator[Callable[[], T]]:
    """Ray within a context. It starts in the background, which takes seconds, and is shut down or
    left at the end.

    If the caller has already started or joined Ray, this Ray is used and kept.

    Args:
        address: see `connect`.
        workers: see `connect`.
        then: function to call as soon as Ray is up.
        leave: function that undoes `then` if Ray is kept.

    Yields:
        Function that waits for the result of `then`, or raises the exception of `then` or of
        `connect`.
    """
    ours = not ray.is_initialized()
    on_sigterm = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    started: Future[T] = Future()
    stopped: Future[None] = Future()
    over = threading.Event()

    def start() -> T:
        connect(address, workers)
        return then()

    def live() -> None:
        _settle(started, start)
        if ours:
            _say_if_lost(over)
        over.wait()
        if ours:
            _settle(stopped, ray.shutdown)

    # The kernel ends Ray's processes with the thread that started them; Python does not wait for a
    # daemon thread at exit.
    threading.Thread(target=live, name="ray", daemon=True).start()

    def ready() -> T:
        result = started.result()
        if threading.current_thread() is threading.main_thread():
            # Ray's handler prints a stack trace, and aborts a process that needs more than three
            # seconds to end.
            signal.signal(signal.SIGTERM, on_sigterm)
        return result

    in_order = False
    try:
        yield ready
        in_order = True
    finally:
        if not ours and started.exception() is None:
            leave(started.result())
        over.set()
        if ours and in_order:
            stopped.result()
        elif ours and not (_ends(started, starting=True) and _ends(stopped)):
            left_behind.set()


def _say_if_lost(over: threading.Event) -> None:
    """Wait for the end, and report if Ray's own processes end earlier. Ray then ends this process
    without giving a reason.
    """
    alive = [process for process in psutil.Process().children() if _is_alive(process, *_SERVERS)]
    while not over.wait(_LOOK_S):
        for process in alive:
            if not _is_alive(process, *_SERVERS):
                print(
                    f"Ray's own processes have ended (pid {process.pid} first), and the run ends "
                    "with them: continue it with `fedlgm simulate --resume RUN`",
                    file=sys.stderr,
                    flush=True,
                )
                return


def _is_alive(process: psutil.Process, *names: str) -> bool:
    """Whether a process has one of these names, and is alive."""
    with suppress(psutil.Error):
        return process.name() in names and process.status() != psutil.STATUS_ZOMBIE
    return False


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    """Call, and hand over the result or the exception."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _ends(call: Future[Any], starting: bool = False) -> bool:
    """Wait a while for Ray's results; False if they will not come, because Ray itself was stopped.

    A signal to the process group ends Ray's own processes, too; Ray would wait for them for
    minutes.
    """
    patience = _PATIENCE_S
    while not wait([call], timeout=_LOOK_S).done:
        gone = starting and not any(
            _is_alive(process, "gcs_server") for process in psutil.Process().children()
        )
        patience -= _LOOK_S * _PATIENCE_S / _GONE_S if gone else _LOOK_S
        if patience <= 0:
            return False
    return True


def connect(address: str | None, workers: int) -> None:
    """Start Ray on this machine, or join the cluster at `address`.

    Args:
        address: a cluster's address; by default a new private instance.
        workers: required number of CPUs.

    Raises:
        RunError: there is no cluster, or too few CPUs or too little memory for the workers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not ray.is_initialized():
        if address is None:
            require_memory(workers, _WORKER_GIB)
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **_QUIET)
        else:
            _reach(address)
            try:
                ray.init(address=address, **_QUIET)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise RunError(
                    explain_failure(f"no Ray cluster at {address!r}", error, _START)
                ) from error
    resources = ray.cluster_resources()
    cpus, memory = int(resources.get("CPU", 0)), resources.get("memory", math.inf) / 2**30
    fitting = max(1, int(min(cpus, memory / _WORKER_GIB)))
    if workers > fitting:
        raise RunError(
            f"{workers} workers need {workers} CPUs and at least {workers * _WORKER_GIB:g} GiB of "
            f"memory, but Ray has {cpus} and {memory:.1f} GiB: use --workers {fitting}"
        )


def _reach(address: str) -> None:
    """Check the address first, because Ray retries an address without a listener for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return  # Ray itself resolves "auto" and client addresses
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            return
    except OSError as error:
        raise RunError(explain_failure(f"no Ray cluster at {address!r}", error, _START)) from error
