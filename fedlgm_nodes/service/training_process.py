"""The process that holds the node's data and trains, and the service's connection to it.

The service starts it, and starts it again when a question needs it. Without questions it ends after
some minutes, so that a node at rest holds no torch and no data. The service alone admits, prices,
names and charges; it parses every plan and work itself. The training process gets the noise key and
the name of a release, draws its noise, and holds no ledger. What it sends is read as JSON and
numbers, and nothing of it is unpickled: models and losses of others run in it.
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

import numpy as np

from fedlgm import errors
from fedlgm.errors import DataError, FedlgmError, RunError
from fedlgm.wire import printable
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol.messages import sha256
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.naming import Naming
from fedlgm_nodes.service.request import Request, layer_values, layers_of, parse_plan
from fedlgm_nodes.service.work import Work

_LOOK_S = 1.0  # between looks for the service's process
_END_S = 10.0
_LONGEST_ERROR = 1000  # characters
_log = logging.getLogger("fedlgm.node")


class _EndedError(Exception):
    """The training process has ended, in order or not."""


class Child(Protocol):
    """A started process."""

    def kill(self) -> None:
        """End it now."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""


def start(link: Connection) -> Child:
    """Start the training process in a Python of its own."""
    command = [sys.executable, "-m", __name__, str(link.fileno()), str(os.getpid())]
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        command,
        pass_fds=[link.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


class TrainingProcess:
    """The service's side: it starts the process, and asks it one thing at a time.

    A process that has ended is started again, once for each thing that is asked. The same release
    has the same noise in the next process, so its numbers do not depend on how often it was made.

    Args:
        folder: the node's folder.
        policy: the node's policy, as the service has read it.
        released: tells whether the node's ledger has releases.

    Attributes:
        data_digest: digest of the examples that the process has read.
        people: digest of the people who count elsewhere; empty if the policy does not list them.
        examples: number of these examples.
        starts: number of times that the process was started, and read the data.
    """

    def __init__(self, folder: NodeFolder, policy: Policy, released: Callable[[], bool]) -> None:
        self._folder, self._policy, self._released = folder, policy, released
        self._keys: tuple[bytes, int | None] = b"", None
        self._torch = ""  # version in the process
        self._link: Connection | None = None
        self._child: Child | None = None
        self._current: Request | None = None  # the one that the process holds
        self.data_digest, self.people, self.examples, self.starts = "", "", 0, 0

    def open(self, secret: bytes, test_seed: int | None) -> None:
        """Start the process, which reads the data.

        Args:
            secret: the node's noise key.
            test_seed: see `Releaser`.

        Raises:
            FedlgmError: the data or the policy cannot be used.
        """
        self._keys = secret, test_seed
        with self._explain_end():
            self._start()

    def enforce(self, policy: Policy) -> None:
        """Use a policy from now on; another process starts with it when a question needs one."""
        if policy is not self._policy:
            self._policy = policy
            self.close()

    def understand(self, round: int, plan: str, work: Any, model: np.ndarray | None) -> Request:
        """The request that a question's parts make (see `Releaser.understand`).

        Raises:
            Refusal: the question is malformed or not allowed.
        """
        header: dict[str, Any] = {}
        with self._explain_end():
            try:
                header, _ = self._call("understand", round, plan, work, model)
            except _EndedError:  # most often since nobody has asked for a while
                header, _ = self._call("understand", round, plan, work, model)
        layers = layers_of(header["layers"])
        model = np.zeros(layers.size, np.float32) if model is None else model
        parsed = parse_plan(layers, plan, self._policy)
        asked = Work.model_validate(work)  # which the process has checked
        self._current = Request(round, parsed, plan, model, asked, self.data_digest)
        return self._current

    def names(self, request: Request, run: str, cohort: str = "") -> tuple[str, str]:
        """`Naming.name` and `Naming.lasting_name`."""
        naming = Naming(self._policy, self._keys[0], request.data, self._torch)
        return naming.name(request, run, cohort), naming.lasting_name(request, run, cohort)

    def prepare(self, request: Request) -> None:
        """See `Releaser.prepare`."""
        self._call_for(request, "prepare")

    def make(self, request: Request, name: str) -> np.ndarray:
        """See `Releaser.make`."""
        return frames.vector(self._call_for(request, "make", name)[1], ("<f4", "<f8"))

    def words(self, request: Request, name: str) -> np.ndarray:
        """See `Releaser.words`."""
        return frames.vector(self._call_for(request, "words", name)[1], ("<u4",))

    def close(self) -> None:
        """End the process."""
        if self._link is not None:
            self._link.close()
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_S)
            self._child.kill()
            self._child.wait()
        self._link = self._child = self._current = None

    def _call_for(self, request: Request, method: str, *given: Any) -> tuple[dict[str, Any], Any]:
        """Call a method for a request, in another process if the one that parsed it has ended."""
        with self._explain_end():
            try:
                return self._call_holding(request, method, *given)
            except _EndedError:
                _log.warning("the training process has ended while it was needed: it starts again")
                return self._call_holding(request, method, *given)

    def _call_holding(
        self, request: Request, method: str, *given: Any
    ) -> tuple[dict[str, Any], Any]:
        if self._current is not request:
            work = request.work.values()
            self._call("understand", request.round, request.text, work, request.model)
            self._current = request
        if self.data_digest != request.data:
            # The release's name, and so its noise, belong to the data as they were.
            raise RunError("the node's data have changed while a question was answered")
        return self._call(method, *given)

    def _call(self, method: str, *given: Any) -> tuple[dict[str, Any], Any]:
        if self._link is None:
            self._start()
        return self._exchange(method, *given)

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._child = start(theirs)
        # It ends by itself after some minutes. Without a wait it would stay in the system's table.
        threading.Thread(target=self._child.wait, daemon=True).start()
        self._link = ours
        header, _ = self._exchange(
            "open", self._folder, self._policy, self._released(), *self._keys
        )
        self.starts += 1
        if self.data_digest not in ("", header["data"]):
            _log.warning("the node's data have changed since they were last read")
        self.data_digest, self.examples = header["data"], header["examples"]
        self._torch, self.people = header["torch"], header["people"]

    def _exchange(self, method: str, *given: Any) -> tuple[dict[str, Any], Any]:
        assert self._link is not None
        try:
            self._link.send((method, given))
            header, body = frames.decode(self._link.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            raise _EndedError from error
        if "refusal" in header:
            raise Refusal(*header["refusal"])
        if "error" in header:
            kind, said = map(str, header["error"])
            known = getattr(errors, kind, RunError)  # the module has other names, too
            if not (isinstance(known, type) and issubclass(known, FedlgmError)):
                known = RunError
            raise known(printable(said, _LONGEST_ERROR))
        return header, body

    @contextlib.contextmanager
    def _explain_end(self) -> Iterator[None]:
        try:
            yield
        except _EndedError as error:
            raise RunError(
                "the training process has ended: it was killed, perhaps for want of memory, or its "
                "libraries fail; see the lines before this one"
            ) from error


class _Answers:
    """The training process's side: what may be asked of it, by name."""

    def __init__(self) -> None:
        self._releaser: Any = None
        self._request: Any = None
        self.idle = _END_S

    def open(
        self,
        folder: NodeFolder,
        policy: Policy,
        released: bool,
        secret: bytes,
        test_seed: int | None,
    ) -> Any:
        import torch

        from fedlgm_nodes.service import data as node_data
        from fedlgm_nodes.service.people import require_once
        from fedlgm_nodes.service.release import Releaser

        np.seterr(all="ignore")
        data, counted = node_data.read_with_people(policy.data, folder.path)
        digest, people = node_data.digest(data), ""
        if counted is not None:
            people = counted.digest
            digest = sha256(f"{digest} {people}".encode())
            if policy.privacy.unit == "example":
                require_once(counted, len(data))
            counted.settle(folder.people_file, released)
        elif released and folder.people_file.exists():
            raise DataError(
                "data.people: this ledger's releases count each person at one node, and without it "
                "people would count at several: state it again"
            )
        self._releaser = Releaser(policy, data, digest, secret, test_seed)
        self._releaser.warm()
        self.idle = policy.limits.training_idle_seconds
        return {
            "data": digest,
            "people": people,
            "examples": len(data),
            "torch": torch.__version__,
        }, b""

    def understand(self, round: int, plan: str, work: Any, model: np.ndarray | None) -> Any:
        parsed = Work.parse(work, self._releaser.policy)
        self._request = request = self._releaser.understand(round, plan, parsed, model)
        return {"layers": layer_values(request.plan.layers)}, b""

    def prepare(self) -> Any:
        self._releaser.prepare(self._request)
        return {}, b""

    def make(self, name: str) -> Any:
        return {}, frames.npy(self._releaser.make(self._request, name))

    def words(self, name: str) -> Any:
        return {}, frames.npy(self._releaser.words(self._request, name))


def answer(link: Connection, service: int) -> None:
    """Answer the service until it closes the connection, asks nothing for a while, or ends.

    Args:
        link: connection to the service.
        service: number of the service's process.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # the service finishes a release, then closes
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(service,), daemon=True).start()
    serve(link)


def serve(link: Connection) -> None:
    """Answer until the other end is closed, or asks nothing for a while."""
    answers = _Answers()
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
            _log.exception("the training process")
            header, body = {"error": ["RunError", repr(error)]}, b""
        link.send_bytes(frames.encode(header, body))


def _end_with(service: int) -> None:
    """End this process as soon as the service has: nobody else could use its answer."""
    while os.getppid() == service:
        time.sleep(_LOOK_S)
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Entry point: the connection's file number, and the number of the service's process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.umask(0o077)
    answer(Connection(int(arguments[0])), int(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
