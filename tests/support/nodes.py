"""Nodes with real release services, in processes forked from the test's: they start without
importing torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training import models
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.service import accounting_process, child, listener, service, training_process
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.ledger import NodeLedger
from tests.support.patience import LIMIT_S

SHAPE, CLASSES, EXAMPLES = (1, 4, 4), 3, 24
WORK: dict[str, Any] = {
    "mechanism": {"name": "snr-consistent"},
    "model": {"name": "logistic"},
    "training": {"lr": 0.1, "epochs": 1, "batch_size": 8},
}
_MODULE = models.build("logistic", in_shape=SHAPE, classes=CLASSES)
LAYERS = mechanisms.get("snr-consistent").table(LayerTable.from_module(_MODULE))
MODEL = LAYERS.flatten(_MODULE)
BODY = frames.npy(MODEL.numpy())
_fork = multiprocessing.get_context("fork")


class _ChildThread:
    """A thread of the service's process in place of a process: to fork one for each service took a
    quarter of the suite's system time. `test_training_process.py` has real ones."""

    def __init__(self, answers: Any, link: Connection) -> None:
        self._answers = answers
        own = Connection(os.dup(link.fileno()))  # the service closes `link` after the start
        self._thread = threading.Thread(target=self._serve, args=(own,), daemon=True)
        self._thread.start()

    def _serve(self, link: Connection) -> None:
        with link, contextlib.suppress(OSError):
            child.serve(link, self._answers())

    def kill(self) -> None:
        """A thread ends when the service has closed the connection."""

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0


training_process.start = partial(_ChildThread, training_process._Answers)
accounting_process.start = partial(_ChildThread, accounting_process._Answers)


def write_data(path: Path, examples: int = EXAMPLES, seed: int = 0) -> None:
    """Random examples; more of them with the same seed begin with the same ones."""
    rng = np.random.default_rng(seed)
    x = rng.random((1000, *SHAPE), dtype=np.float32)[:examples]
    np.savez(path, x=x, y=np.arange(examples) % CLASSES)


def make_node(
    path: Path, *, test_seed: int | None = None, signer: Any = None, **values: Any
) -> NodeFolder:
    """A node's folder with its own data beside it."""
    write_data(path.with_name(path.name + ".npz"))
    policy = {
        "population": 3,
        "path": f"../{path.name}.npz",
        "shape": list(SHAPE),
        "classes": CLASSES,
    } | values
    made = NodeFolder.create(path, policy, test_seed=test_seed, signer=signer)
    edit(made, "reply_every_seconds = 0.5", "reply_every_seconds = 0.0")
    return made


def edit(folder: NodeFolder, old: str, new: str) -> None:
    """Change the node's policy."""
    text = folder.policy_file.read_text()
    assert old in text, old
    folder.policy_file.write_text(text.replace(old, new))


def plan(
    multiplier: float = 4.0,
    *,
    trust: str = "local",
    bound: float = 1.0,
    population: int = 3,
    mechanism: str = "snr-consistent",
    **facts_options: Any,
) -> ReleasePlan:
    """A plan for the nodes' model; `multiplier` is noise over bound."""
    options = {
        "sampling": Sampling("poisson", population, 1.0),
        "relation": "replace-one",
        "rounds": 10,
    }
    facts = RunFacts(multiplier, trust=trust, **(options | facts_options))  # type: ignore[arg-type]
    return Method(mechanisms.get(mechanism, bound=bound), LAYERS, facts).plan(
        Transcript.start(MODEL)
    )


def asked(folder: NodeFolder, **values: Any) -> Question:
    """A question to this node; whatever is not given is the usual one."""
    usual = {
        "run": "run",
        "round": 1,
        "client": 0,
        "plan": plan().to_json(),
        "model": protocol.sha256(BODY),
    }
    usual |= {"work": WORK, "nonce": "00", "service": folder.public()["service_key"]}
    return Question(**(usual | values))


def ask(
    folder: NodeFolder,
    *,
    text: str | None = None,
    round: int = 1,
    run: str = "run",
    client: int = 0,
    body: bytes = BODY,
    work: dict[str, Any] | None = None,
    signer: Any = None,
    nonce: str = "00",
    timeout: float = LIMIT_S,
    **more: Any,
) -> tuple[dict[str, Any], bytes]:
    """Ask the service as a server would; every part may be another."""
    question = asked(
        folder,
        run=run,
        round=round,
        client=client,
        plan=text or plan().to_json(),
        model=protocol.sha256(body),
        work=work or WORK,
        nonce=nonce,
    )
    header, numbers = frames.exchange(
        str(folder.socket), question.header(signer) | more, body, timeout=timeout
    )
    return header, bytes(numbers)


def hello(folder: NodeFolder) -> dict[str, Any]:
    """What the service says of itself."""
    return frames.exchange(str(folder.socket), protocol.HELLO, b"", timeout=LIMIT_S)[0]


def rows(folder: NodeFolder) -> list[Any]:
    """The ledger's rows, whole and checked."""
    with folder.ledger(readonly=True) as ledger:
        return ledger.rows()


class NodeProcess:
    """A service in a process of its own.

    Args:
        folder: of the node.
        before: called in the new process before the service starts; for faults.
    """

    def __init__(self, folder: NodeFolder, before: Callable[[], None] | None = None) -> None:
        self.folder, self.log = folder, folder.path.with_name(folder.path.name + ".log")
        with contextlib.suppress(FileNotFoundError):
            folder.socket.unlink()
        self._process = _fork.Process(target=_serve, args=(folder, self.log, before), daemon=True)
        self._process.start()
        deadline = time.monotonic() + LIMIT_S
        while not folder.socket.exists():
            if not self._process.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"the service did not start:\n{self.log.read_text()}")
            time.sleep(0.005)

    @property
    def pid(self) -> int:
        """Its process."""
        return int(self._process.pid or 0)

    def kill(self) -> None:
        """`kill -9`."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(LIMIT_S)

    def wait(self, seconds: float = LIMIT_S) -> None:
        """Wait for its end."""
        self._process.join(seconds)
        assert not self._process.is_alive()

    def stop(self) -> None:
        """End it in order, or at all."""
        self._process.terminate()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _serve(folder: NodeFolder, log: Path, before: Callable[[], None] | None) -> None:
    file = log.open("a", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    # Not `file`, which a training process closes.
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    try:
        if before is not None:
            before()
        listener.run(folder.path)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


# -- faults, set in the service's own process
# --------------------------------------------------------------------------


def die() -> None:
    """As by `kill -9`, now."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_around(owner: Any, name: str, after: bool) -> Callable[[], None]:
    original = getattr(owner, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if not after:
            die()
        original(*args, **kwargs)
        die()

    return lambda: setattr(owner, name, dying)


CRASHES: dict[str, Callable[[], None]] = {
    "before the charge": die_around(NodeLedger, "charge", after=False),
    "between the charge and its witness": die_around(NodeLedger, "_witness", after=False),
    "after the charge": die_around(NodeLedger, "charge", after=True),
    "after training and noise": die_around(service.Service, "_keep", after=False),
    "after the answer was kept": die_around(NodeLedger, "answer", after=False),
    "before the answer was sent": die_around(service.Service, "_keep", after=True),
}


def die_after(seconds: float) -> Callable[[], None]:
    """A fault: `kill -9` so long after the first question arrives."""
    original = listener.Listener._receive

    def arm() -> None:
        async def receive(self: Any, reader: asyncio.StreamReader) -> Any:
            found = await original(self, reader)
            threading.Timer(seconds, die).start()
            return found

        listener.Listener._receive = receive  # type: ignore[method-assign]

    return arm


@contextlib.contextmanager
def served(folder: NodeFolder) -> Iterator[NodeFolder]:
    """The folder while its service runs."""
    with NodeProcess(folder):
        yield folder


def numbers(body: bytes) -> np.ndarray:
    """An answer's numbers."""
    return frames.vector(body, ("<f4", "<f8"))


def refused(folder: NodeFolder) -> str:
    """What a service says that does not start."""
    with pytest.raises(AssertionError) as error, served(folder):
        pass
    return str(error.value)
