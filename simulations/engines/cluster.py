"""Ray itself: started on this machine or joined, and left again."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from fedlgm.errors import RunError

_WORKER_GIB = 0.5  # of a worker that has imported everything, with a small model
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}

T = TypeVar("T")


@contextmanager
def session(
    address: str | None, workers: int, then: Callable[[], T], leave: Callable[[T], None] = lambda made: None
) -> Iterator[Callable[[], T]]:
    """Ray within a context: it takes seconds to start, in which the caller goes on; at the end Ray is left.

    A Ray that the caller has started, or joined, is used and stays.

    Args:
        address: see `connect`.
        workers: see `connect`.
        then: what to make as soon as Ray is there.
        leave: how to undo it where Ray stays.

    Yields:
        Function that waits for what `then` returns, or raises what it or `connect` raised.
    """
    # The kernel ends Ray's processes with the thread that started them, so one thread does everything and stays.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")

    def start() -> T:
        connect(address, workers)
        return then()

    ours = not ray.is_initialized()
    on_sigterm = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    started = thread.submit(start)

    def ready() -> T:
        result = started.result()
        if threading.current_thread() is threading.main_thread():
            # Ray's handler prints a stack trace, and aborts whoever needs more than three seconds to end in order.
            signal.signal(signal.SIGTERM, on_sigterm)
        return result

    try:
        yield ready
    finally:
        if ours:
            thread.submit(ray.shutdown).result()
        elif started.exception() is None:
            leave(started.result())
        thread.shutdown()


def connect(address: str | None, workers: int) -> None:
    """Start Ray on this machine, or join the cluster at `address`.

    Args:
        address: a cluster's address; by default an instance of our own, never somebody else's.
        workers: CPUs that will be needed.

    Raises:
        RunError: no cluster there, or too few CPUs or too little memory for the workers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not ray.is_initialized():
        if address is None:
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **_QUIET)
        else:
            _reach(address)
            try:
                ray.init(address=address, **_QUIET)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise RunError(f"no Ray cluster at {address!r}: {error}") from error
    resources = ray.cluster_resources()
    cpus, memory = int(resources.get("CPU", 0)), resources.get("memory", math.inf) / 2**30
    fitting = max(1, int(min(cpus, memory / _WORKER_GIB)))
    if workers > fitting:
        raise RunError(
            f"{workers} workers need {workers} CPUs and at least {workers * _WORKER_GIB:g} GiB of memory, Ray has "
            f"{cpus} and {memory:.1f} GiB: use --workers {fitting}"
        )


def _reach(address: str) -> None:
    """Ray itself retries an address for minutes where nothing listens."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return  # "auto" and client addresses: Ray knows
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            return
    except OSError as error:
        raise RunError(f"no Ray cluster at {address!r}: {error}") from error
