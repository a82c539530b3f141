"""The training process, which holds the node's data and trains, and the service's connection to it.

The service starts the process whenever a question needs it. Without questions the process ends
after some minutes, so that an idle node has neither torch nor data in memory. Only the service
admits, names and charges releases, and it parses every plan and work itself. The training process
gets the noise key and the name of a release, draws the release's noise, and never opens the ledger.
The service reads what the process sends as JSON and numbers, and unpickles nothing, because other
people's models and losses run in the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from typing_extensions import override

from fedlgm.errors import DataError, RunError
from fedlgm.importing import importing
from fedlgm_nodes.policy import Policy
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol.messages import sha256
from fedlgm_nodes.service import child
from fedlgm_nodes.service.child import END_S, Child, ChildProcess, EndedError
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.naming import Naming
from fedlgm_nodes.service.request import Request, layer_values, layers_of, parse_plan
from fedlgm_nodes.service.work import Work

_log = logging.getLogger("fedlgm.node")


def start(link: Connection) -> Child:
    """Start the training process with its end of the connection."""
    return child.start("fedlgm_nodes.service.training_process", link)


class TrainingProcess(ChildProcess):
    """The service's connection to the training process.

    A process that has ended is started again, at most once for each call. A release has the same
    noise in every process, so its numbers do not depend on how often it is made.

    Args:
        folder: the node's folder.
        policy: the node's policy, as the service has read it.
        released: function that returns whether the node's ledger has releases.

    Attributes:
        data_digest: digest of the examples that the process has read.
        people: digest of the list of people who count elsewhere; empty if there is no list.
        examples: number of examples that the process has read.
        starts: number of times that the process was started and read the data.
    """

    def __init__(self, folder: NodeFolder, policy: Policy, released: Callable[[], bool]) -> None:
        super().__init__("training process", lambda link: start(link))
        self._folder, self._policy, self._released = folder, policy, released
        self._keys: tuple[bytes, int | None] = b"", None
        self._torch = ""  # version of torch in the process
        self._current: Request | None = None  # the request that the process holds
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
        """End the process if the policy is another one. The next process starts with the given
        policy.
        """
        if policy is not self._policy:
            self._policy = policy
            self.close()

    def understand(self, round: int, plan: str, work: Any, model: np.ndarray | None) -> Request:
        """Build the request of a question from its values (see `Releaser.understand`).

        Raises:
            Refusal: the question is malformed or not allowed.
        """
        header, _ = self._call_twice("understand", round, plan, work, model)
        layers = layers_of(header["layers"])
        model = np.zeros(layers.size, np.float32) if model is None else model
        parsed = parse_plan(layers, plan, self._policy)
        asked = Work.model_validate(work)  # the process has already checked the work
        self._current = Request(round, parsed, plan, model, asked, self.data_digest)
        return self._current

    def names(self, request: Request, run: str, cohort: str = "") -> tuple[str, str]:
        """The release's `Naming.name` and `Naming.lasting_name`."""
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

    @override
    def close(self) -> None:
        super().close()
        self._current = None

    def _call_for(self, request: Request, method: str, *given: Any) -> tuple[dict[str, Any], Any]:
        """Call a method of the process for a request. If the process has ended, a new process
        parses the request again first.
        """
        with self._explain_end():
            try:
                return self._call_holding(request, method, *given)
            except EndedError:
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
            # The release's name, and with it the noise, belongs to the data before the change.
            raise RunError("the node's data have changed while a question was answered")
        return self._call(method, *given)

    @override
    def _start(self) -> None:
        super()._start()
        header, _ = self._exchange(
            "open", self._folder, self._policy, self._released(), *self._keys
        )
        self.starts += 1
        if self.data_digest not in ("", header["data"]):
            _log.warning("the node's data have changed since they were last read")
        self.data_digest, self.examples = header["data"], header["examples"]
        self._torch, self.people = header["torch"], header["people"]


class _Answers:
    """The training process's side of the connection. The service calls its methods by name."""

    def __init__(self) -> None:
        self._releaser: Any = None
        self._request: Any = None
        self.idle = END_S

    def open(
        self,
        folder: NodeFolder,
        policy: Policy,
        released: bool,
        secret: bytes,
        test_seed: int | None,
    ) -> Any:
        with importing():
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
                "data.people: this ledger's releases count each person at one node, and without "
                "data.people a person could count at several nodes: state it again"
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

    def close(self) -> None:
        """Do nothing, because nothing has to be closed."""

    def words(self, name: str) -> Any:
        return {}, frames.npy(self._releaser.words(self._request, name))


if __name__ == "__main__":
    child.main(_Answers())
