"""Greetings for nodes that are connected and silent.

A SuperNode sends replies only after it has received a message, and then what is there. If a run ended while it was
receiving, that run's reply is what it sends after the next message, whose own reply then waits for the one after: the
node stays behind by one until it is started again. A greeting brings the answer forth; a node that is behind gets one
with every question. Whose greeting is answered before it is sent the next question is not behind but at work: it is
greeted when it takes twice as long as the last time.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping

from flwr.app import ConfigRecord, RecordDict

from fedlgm import node_protocol as protocol
from fedlgm import wire
from fedlgm.node_protocol import HEADER, MASK

_BEHIND_S = 1.0  # after which a node that is behind is greeted


class Greetings:
    """Whom to greet, and what the answers tell.

    Args:
        shortest: seconds of silence after which a node is greeted of which nothing is known.
    """

    def __init__(self, shortest: float) -> None:
        self._shortest = shortest
        self._sent: dict[str, tuple[int, str]] = {}  # message id -> client, question during which it was sent
        self._behind: set[int] = set()
        self._at_work: set[int] = set()
        self._took: dict[int, float] = {}  # client -> seconds until its last answer

    @property
    def sent(self) -> Iterable[str]:
        """Messages whose answers are still to come."""
        return self._sent

    def due(self, client: int, silent: float) -> bool:
        """Whether to greet a client's node that has been silent for so many seconds since its question."""
        after = self._shortest
        if client in self._behind:
            after = _BEHIND_S
        elif client in self._at_work:
            after = max(after, 2 * self._took.get(client, 0.0))
        return silent > after

    @staticmethod
    def content() -> RecordDict:
        """A greeting, unlike any other."""
        header = {**protocol.HELLO, "nonce": secrets.token_hex(16)}
        return RecordDict({wire.CONFIG: ConfigRecord({HEADER: json.dumps(header), MASK: 0})})

    def was_sent(self, message_id: str, client: int, question: str) -> None:
        """Remember a greeting, and the question that its node was silent about."""
        self._sent[message_id] = client, question

    def answered(self, message_id: str, asked: Mapping[int, str]) -> None:
        """Learn from the answer to a greeting.

        Args:
            message_id: of the greeting.
            asked: client -> question of this round.
        """
        client, question = self._sent.pop(message_id)
        behind = asked.get(client, question) != question
        (self._behind if behind else self._at_work).add(client)
        (self._at_work if behind else self._behind).discard(client)

    def took(self, client: int, seconds: float) -> None:
        """Remember how long a client's answer took."""
        self._took[client] = seconds
