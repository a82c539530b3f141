"""A Flower Grid over our own workers: in this process, or resident Ray actors."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedlgm import wire
from fedlgm.errors import Notice
from strategies.messages import NumberingGrid


class Served:
    """A ClientApp in a worker's process."""

    def __init__(self, app: ClientApp) -> None:
        self._app = app
        self._context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})

    def answer(self, metadata: Any, config: Any, arrays: ArrayRecord | None) -> tuple[Message, list[Notice]]:
        """The reply to a message, and warnings that the driver prints because a worker's output is not shown."""
        content = RecordDict({wire.CONFIG: config})
        if arrays is not None:
            content[wire.ARRAYS] = arrays
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Notice)
            reply = self._app(Message(content=content, metadata=metadata), self._context)  # type: ignore[call-overload]
        return reply, [w.message for w in caught if isinstance(w.message, Notice)]


class WorkerGrid(NumberingGrid):
    """Delivers messages to workers and yields their replies in the order of the messages, as they become ready.

    Replies come from a generator, so a strategy that consumes them one by one never holds a whole round.
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

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:  # type: ignore[override]
        """Replies in the order of the messages, streamed."""
        return self.deliver(list(messages))
