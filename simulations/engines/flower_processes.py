"""Flower's processes on this machine: tests whether they answer, and ways to find and end them."""

from __future__ import annotations

import errno
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from fedlgm.errors import RunError

_ENDING_S = 10.0


def free_ports(count: int) -> list[int]:
    """Different free ports of this machine."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def is_port_taken(port: int) -> bool:
    """Whether a program listens on a port of 127.0.0.1.

    >>> is_port_taken(free_ports(1)[0])
    False
    """
    with socket.socket() as probe:
        # servers set this option, too, because connections may still be closing
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def answers(superlink: str, context: ssl.SSLContext | None = None) -> bool:
    """Whether the SuperLink at a URL answers, when asked directly and not through a proxy.

    Args:
        superlink: "http://HOST:PORT", or https.
        context: trusted certificates.

    Raises:
        RunError: its certificate is not accepted, for example because it has expired.
    """
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with direct.open(f"{superlink}/health", timeout=2):
            return True
    except OSError as error:  # URLError is an OSError
        reason = getattr(error, "reason", None)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise RunError(
                f"the certificate of the SuperLink at {superlink} is not accepted "
                f"({reason.verify_message}): if this machine's clock is right, make new "
                "certificates; if the authority's certificate is also new, copy it to every node"
            ) from error
        return False


def started_under(home: Path) -> set[psutil.Process]:
    """Processes that were started with this FLWR_HOME, directly or not, except this one.

    A SuperLink's SuperExec, ServerApps and Ray have their own sessions.
    """
    processes = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("FLWR_HOME") == str(home):
                # Ray's workers write their names over their environment
                processes |= with_children(process)
    return {process for process in processes if process.pid != psutil.Process().pid}


def with_children(process: psutil.Process) -> set[psutil.Process]:
    """A process, and all processes that it has started."""
    with suppress(psutil.Error):
        return {process, *process.children(recursive=True)}
    return {process}


def end(family: set[psutil.Process], more: Callable[[], set[psutil.Process]] = set) -> None:
    """End processes, and kill processes that need longer than 10 seconds.

    Args:
        family: the processes.
        more: function that finds processes that replace ended ones.
    """
    for process in family:
        with suppress(psutil.Error):
            process.terminate()
    gently, at_all = (time.monotonic() + seconds for seconds in (_ENDING_S, 2 * _ENDING_S))
    while (
        left := {process for process in family if is_alive(process)}
    ) and time.monotonic() < at_all:
        for process in left if time.monotonic() > gently else ():
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
        family = left | more()


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a later process with the same number does not count."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
