"""A Flower Grid over our own workers: in this process, or other processes."""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedlgm import wire
from fedlgm.errors import Notice, RunError
from strategies.messages import NumberingGrid

# How often one block may be lost, in addition to once per worker. Also how many workers in a row
# may fail to start.
RETRIES = 8


class Served:
    """A ClientApp in a worker's process."""

    def __init__(self, app: ClientApp) -> None:
        self._app = app
        self._context = Context(
            run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={}
        )

    def answer(
        self, metadata: Any, config: Any, arrays: ArrayRecord | None
    ) -> tuple[Message, list[Notice]]:
        """The reply to a message, and warnings that the driver prints because a worker's output is
        not shown.
        """
        content = RecordDict({wire.CONFIG: config})
        if arrays is not None:
            content[wire.ARRAYS] = arrays
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Notice)
            reply = self._app(Message(content=content, metadata=metadata), self._context)  # type: ignore[call-overload]
        return reply, [w.message for w in caught if isinstance(w.message, Notice)]


class WorkerGrid(NumberingGrid):
    """Delivers messages to workers and yields their replies in the order of the messages, as they
    become ready.

    Replies come from a generator, so a strategy that consumes them one by one never holds a whole
    round.
    """

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._node_ids = list(range(2, workers + 2))
        self._said: set[str] = set()

    def say(self, notice: Notice) -> None:
        """Print a worker's warning, once for all workers."""
        if str(notice) not in self._said:
            self._said.add(str(notice))
            warnings.warn(notice, stacklevel=5)

    @abstractmethod
    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        """Replies to `messages`, in their order."""

    def set_run(self, run: Any) -> None:
        """Do nothing; Flower uses this only if a run is fetched from a SuperLink."""

    @property
    def run(self) -> Any:
        """The run; there is none, because there is no SuperLink."""
        return None

    def get_node_ids(self) -> list[int]:
        """One node per worker."""
        return list(self._node_ids)

    def get_nodes(self) -> list[Any]:
        """Not needed, because workers hold no information."""
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:  # type: ignore[override]
        """Replies in the order of the messages, streamed."""
        return self.deliver(list(messages))


class Lost(Exception):
    """A worker, or its machine, ended before it replied."""


class PoolGrid(WorkerGrid):
    """Gives the next block to a worker that is free. If a worker is lost, its block goes to another
    worker.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._workers = workers
        self._idle: list[Any] = []

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        """See `WorkerGrid.deliver`. Replies wait for their turn.

        Raises:
            RunError: a block was lost too often with its worker.
            Exception: a client's error, unchanged.
        """
        waiting = list(range(len(messages)))[::-1]
        losses = dict.fromkeys(waiting, 0)
        asked: dict[Any, int] = {}  # what `_ask` returned -> block
        done: dict[int, Message] = {}
        turn = 0
        while turn < len(messages):
            # Out-of-turn replies are bounded, so that memory does not grow with the cohort.
            while waiting and self._idle and len(done) + len(asked) < 4 * self._workers:
                name = self._ask(messages[waiting[-1]])
                if name is not None:
                    asked[name] = waiting.pop()
            # the reply is yielded after the next question is sent, so that no worker waits for the
            # caller
            if turn in done:
                yield done.pop(turn)
                turn += 1
                continue
            for name, reply in self._wait_for_replies():
                block = asked.pop(name, None)
                if block is None:  # a reply from an earlier round that was given up
                    continue
                if isinstance(reply, Lost):
                    waiting.append(block)
                    losses[block] += 1
                    # A lost machine's idle workers are noticed one by one, each by a block that it
                    # is given.
                    if losses[block] > RETRIES + self._workers:
                        raise RunError(
                            f"a block of clients was lost {losses[block]} times with its worker "
                            "(if memory ran out: use a smaller training.width, or fewer "
                            f"workers){reply}"
                        )
                elif isinstance(reply, Exception):
                    raise reply
                else:
                    done[block] = reply

    @abstractmethod
    def _ask(self, message: Message) -> Any:
        """Send a message to an idle worker, and return a name for it; None if the worker is
        gone.
        """

    @abstractmethod
    def _wait_for_replies(self) -> Iterator[tuple[Any, Message | Exception]]:
        """Wait, and yield (name, reply) of what was answered or failed; `Lost` without an
        answer.
        """


def require_memory(workers: int, each: float) -> None:
    """Refuse more workers than fit into this machine's memory, before anything starts; CPUs may be
    shared.

    Args:
        workers: number of worker processes.
        each: GiB that a worker needs at least.

    Raises:
        RunError: the workers need more memory than the machine has.
    """
    cores, memory = os.cpu_count() or 1, psutil.virtual_memory().total / 2**30
    if workers * each > memory:
        raise RunError(
            f"{workers} workers need at least {workers * each:g} GiB of memory, but this machine "
            f"has {memory:.1f} GiB and {cores} cores: use --workers "
            f"{min(cores, max(1, int(memory / each)))}"
        )
