"""A Flower Grid over our own workers: in this process, or resident Ray actors."""

from __future__ import annotations

import itertools
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import ArrayRecord, Context, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedlgm import wire
from fedlgm.errors import Notice

_TTL = 12 * 3600.0
_SERVER_NODE = 1


class Served:
    """A ClientApp in a worker's process."""

    def __init__(self, app: ClientApp) -> None:
        self._app = app
        self._context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})

    def answer(self, metadata: Any, config: Any, arrays: ArrayRecord | None) -> tuple[Message, list[Notice]]:
        """The reply to a message, and warnings for the driver to print, because a worker's output is not read."""
        content = RecordDict({wire.CONFIG: config})
        if arrays is not None:
            content[wire.ARRAYS] = arrays
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Notice)
            reply = self._app(Message(content=content, metadata=metadata), self._context)  # type: ignore[call-overload]
        return reply, [w.message for w in caught if isinstance(w.message, Notice)]


class WorkerGrid(Grid):
    """Delivers messages to workers and yields their replies in the order of the messages, as they become ready.

    Replies come from a generator, so a strategy that consumes them one by one never holds a whole round.
    """

    def __init__(self, workers: int) -> None:
        self._node_ids = list(range(2, workers + 2))
        self._numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}
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
        """Used by Flower only if a run is fetched from a SuperLink."""

    @property
    def run(self) -> Any:
        """There is no SuperLink run."""
        return None

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message of this grid."""
        metadata = Metadata(
            run_id=1,
            message_id=str(next(self._numbers)),
            src_node_id=_SERVER_NODE,
            dst_node_id=dst_node_id,
            reply_to_message_id="",
            group_id=group_id,
            created_at=time.time(),
            ttl=ttl or _TTL,
            message_type=message_type,
        )
        return Message(content=content, metadata=metadata)  # type: ignore[call-overload]

    def get_node_ids(self) -> list[int]:
        """One node per worker."""
        return list(self._node_ids)

    def get_nodes(self) -> list[Any]:
        """Not needed: workers hold no information."""
        return []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver at once and keep the replies for `pull_messages`."""
        batch = list(messages)
        for message, reply in zip(batch, self.deliver(batch), strict=True):
            self._replies[message.metadata.message_id] = reply
        return [message.metadata.message_id for message in batch]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies to pushed messages, each once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:  # type: ignore[override]
        """Replies in the order of the messages, streamed."""
        return self.deliver(list(messages))
