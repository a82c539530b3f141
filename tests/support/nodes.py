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
    _work(log, before, lambda: listener.run(folder.path))


def _work(log: Path, before: Callable[[], None] | None, work: Callable[[], None]) -> None:
    """The main function of a forked process."""
    file = log.open("a", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    # Not `file`, which a training process closes.
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    try:
        if before is not None:
            before()
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


class SharedProcess:
    """Services of several nodes in one process, because a fork takes a twentieth of a second. Each
    is stopped by itself.

    Args:
        folders: of the nodes.
        before: see `NodeProcess`.
    """

    def __init__(self, folders: list[NodeFolder], before: Callable[[], None] | None) -> None:
        self.services = [SharedService(self, number) for number in range(len(folders))]
        self._left = set(range(len(folders)))
        self._link, theirs = _fork.Pipe()
        log = folders[0].path.with_name("services.log")
        self._process = _fork.Process(
            target=_work, args=(log, before, partial(_serve_all, folders, theirs)), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            assert self._link.poll(LIMIT_S)
            self._link.recv()  # all of them listen
        except (AssertionError, EOFError):
            self._process.kill()
            raise AssertionError(f"the services did not start:\n{log.read_text()}") from None

    def stop(self, number: int) -> None:
        """End a service in order, and the process after the last one."""
        if number not in self._left:
            return
        self._link.send(number)
        assert self._link.poll(LIMIT_S)
        self._left.remove(self._link.recv())
        if not self._left:
            self._process.join(LIMIT_S)


class SharedService:
    """One of them, as far as it is like a `NodeProcess`."""

    def __init__(self, process: SharedProcess, number: int) -> None:
        self._process, self._number = process, number

    def stop(self) -> None:
        """End it in order."""
        self._process.stop(self._number)


def _serve_all(folders: list[NodeFolder], orders: Connection) -> None:
    np.seterr(all="ignore")
    os.umask(0o077)

    async def main() -> None:
        found = [
            listener.Listener(service.Service(NodeFolder.open(folder.path))) for folder in folders
        ]

        async def serve(number: int) -> None:
            await found[number].serve()
            orders.send(number)

        tasks = [asyncio.create_task(serve(number)) for number in range(len(found))]
        while not all(folder.socket.exists() for folder in folders):
            await asyncio.sleep(0.005)
            for task in tasks:
                if task.done():
                    task.result()
        orders.send("listening")

        def obey() -> None:
            try:
                found[orders.recv()]._stop.set()
            except EOFError:  # the tests' process has ended
                os._exit(1)

        loop = asyncio.get_running_loop()
        loop.add_reader(orders.fileno(), obey)
        loop.add_signal_handler(signal.SIGTERM, lambda: [one._stop.set() for one in found])
        await asyncio.gather(*tasks)

    asyncio.run(main())


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
