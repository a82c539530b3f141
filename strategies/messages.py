"""Messages to nodes, for Flower's Grids and for Grids that number their messages themselves."""

from __future__ import annotations

import itertools
import time
from abc import ABC
from collections.abc import Iterable

from flwr.app import Message, Metadata, RecordDict
from flwr.serverapp import Grid

_TTL = 12 * 3600.0
_SERVER_NODE = 1


class NumberingGrid(Grid, ABC):
    """A Grid that numbers its messages itself. Its `send_and_receive` returns the replies in the
    order of the messages.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message with the next number of this grid."""
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

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, wait for the replies, and store these for `pull_messages`."""
        batch = list(messages)
        ids = [message.metadata.message_id for message in batch]
        self._replies |= zip(ids, self.send_and_receive(batch), strict=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to pushed messages. Each reply is returned only once."""
        return [self._replies.pop(key) for key in message_ids if key in self._replies]


def message_to(grid: Grid, content: RecordDict, kind: str, node: int, group: str) -> Message:
    """Make a message for a node. Flower's Grids give a message its number when they send it.

    Args:
        grid: the Grid that will send the message.
        content: content of the message.
        kind: type of the message, such as "train".
        node: ID of the node.
        group: label of the messages that belong together, such as the round.
    """
    if isinstance(grid, NumberingGrid):
        return grid.create_message(content, kind, node, group)
    return Message(content, node, kind, group_id=group)
