"""A child process of the service, which ends after some time without questions, and the service's
connection to it.

The service reads what the process sends as JSON and numbers, and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from fedlgm import errors
from fedlgm.errors import FedlgmError, RunError
from fedlgm.wire import printable
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.protocol import frames

_LOOK_S = 1.0  # seconds between looks for the service's process
END_S = 10.0
_LONGEST_ERROR = 1000  # characters
_log = logging.getLogger("fedlgm.node")


class EndedError(Exception):
    """The child process has ended, with or without an error."""


class Child(Protocol):
    """A started process."""

    def kill(self) -> None:
        """End it now."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended."""


class Answers(Protocol):
    """The process's side of the connection, whose methods the service calls by name.

    Attributes:
        idle: seconds without a question after which the process ends.
    """

    idle: float

    def close(self) -> None:
        """Close what the process has opened."""


def start(module: str, link: Connection) -> Child:
    """Start a module that calls `main` in a new Python process, and give it the connection."""
    command = [sys.executable, "-m", module, str(link.fileno()), str(os.getpid())]
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        command,
        pass_fds=[link.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


class ChildProcess:
    """The service's side of the connection, which starts the process and calls one method at a
    time.

    Args:
        what: name of the process in messages.
        launch: function that starts the process with its end of the connection.
    """

    def __init__(self, what: str, launch: Callable[[Connection], Child]) -> None:
        self._what, self._launch = what, launch
        self._link: Connection | None = None
        self._child: Child | None = None

    def close(self) -> None:
        """End the process."""
        if self._link is not None:
            self._link.close()
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)
            self._child.kill()
            self._child.wait()
        self._link = self._child = None

    def _call(self, method: str, *given: Any) -> tuple[dict[str, Any], Any]:
        if self._link is None:
            self._start()
        return self._exchange(method, *given)

    def _call_twice(self, method: str, *given: Any) -> tuple[dict[str, Any], Any]:
        """Call a method. If the process has ended, usually after a long time without questions, the
        method is called in a new process.
        """
        with self._explain_end():
            try:
                return self._call(method, *given)
            except EndedError:
                return self._call(method, *given)

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._child = self._launch(theirs)
        # The process ends by itself after some minutes. Unless someone waits for it, it would then
        # stay in the system's table of processes.
        threading.Thread(target=self._child.wait, daemon=True).start()
        self._link = ours

    def _exchange(self, method: str, *given: Any) -> tuple[dict[str, Any], Any]:
        assert self._link is not None
        try:
            self._link.send((method, given))
            header, body = frames.decode(self._link.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            raise EndedError from error
        if "refusal" in header:
            raise Refusal(*header["refusal"])
        if "error" in header:
            kind, said = map(str, header["error"])
            known = getattr(errors, kind, RunError)  # the module also has names that are not errors
            if not (isinstance(known, type) and issubclass(known, FedlgmError)):
                known = RunError
            raise known(printable(said, _LONGEST_ERROR))
        return header, body

    @contextlib.contextmanager
    def _explain_end(self) -> Iterator[None]:
        try:
            yield
        except EndedError as error:
            raise RunError(
                f"the {self._what} has ended: it was killed, perhaps for want of memory, or its "
                "libraries fail; see the lines before this one"
            ) from error


def answer(link: Connection, service: int, answers: Answers) -> None:
    """Answer the service until it closes the connection, asks nothing for `answers.idle` seconds,
    or ends.

    Args:
        link: connection to the service.
        service: number of the service's process.
        answers: object whose methods the service calls.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # the service finishes a release, then closes
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(service,), daemon=True).start()
    serve(link, answers)


def serve(link: Connection, answers: Answers) -> None:
    """Answer until the other end is closed, or asks nothing for `answers.idle` seconds."""
    with contextlib.closing(answers):
        while link.poll(answers.idle):
            try:
                method, given = link.recv()
            except EOFError:
                return
            try:
                header, body = getattr(answers, method)(*given)
            except Refusal as refusal:
                header, body = {"refusal": [refusal.code, refusal.why, refusal.about]}, b""
            except FedlgmError as error:
                header, body = {"error": [type(error).__name__, str(error)]}, b""
            except Exception as error:
                _log.exception("a process of the service")
                header, body = {"error": ["RunError", repr(error)]}, b""
            link.send_bytes(frames.encode(header, body))


def _end_with(service: int) -> None:
    """End this process soon after the service has ended, since nobody else could use its answer."""
    while os.getppid() == service:
        time.sleep(_LOOK_S)
    os._exit(1)


def main(answers: Answers) -> None:
    """Entry point of the process. Its arguments are the file number of the connection and the
    number of the service's process.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.umask(0o077)
    link, service = map(int, sys.argv[1:])
    answer(Connection(link), service, answers)
