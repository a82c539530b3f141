"""Messages of a Flower Grid that numbers them itself."""

from __future__ import annotations

import itertools
import time
from abc import ABC

from flwr.app import Message, Metadata, RecordDict
from flwr.serverapp import Grid

_TTL = 12 * 3600.0
_SERVER_NODE = 1


class NumberingGrid(Grid, ABC):
    """A Grid that makes its messages."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message of this grid."""
        metadata = Metadata(
            run_id=1, message_id=str(next(self._numbers)), src_node_id=_SERVER_NODE, dst_node_id=dst_node_id,
            reply_to_message_id="", group_id=group_id, created_at=time.time(), ttl=ttl or _TTL,
            message_type=message_type,
        )  # fmt: skip
        return Message(content=content, metadata=metadata)  # type: ignore[call-overload]
