"""Greetings for nodes that are connected but silent.

A SuperNode sends waiting replies only after it has received a message. If a run ended while the
node was receiving, the node sends that run's reply only after the next message. The reply to the
next message then waits for a further message, so the node stays one reply behind until it is
restarted. A greeting is a message that makes such a node send its reply. Once a node is known to be
behind, it gets a greeting a second after every question. A node that answers a greeting during the
same question is busy, not behind. Its next greeting then comes after twice the time that its last
answer took, but never before the usual wait.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from flwr.app import RecordDict

from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.server.link import content_of

_BEHIND_S = 1.0  # seconds of silence after which a node that is behind is greeted


class Greetings:
    """Decides which nodes to greet, and learns from their answers.

    Args:
        shortest: seconds of silence after which a node is greeted if it is not known to be behind
            or busy.
    """

    def __init__(self, shortest: float) -> None:
        self._shortest = shortest
        self._sent: dict[
            str, tuple[int, str]
        ] = {}  # message id -> client, question during which it was sent
        self._behind: set[int] = set()
        self._at_work: set[int] = set()
        self._took: dict[int, float] = {}  # client -> seconds until its last answer

    @property
    def sent(self) -> Iterable[str]:
        """Ids of the greetings without an answer so far."""
        return self._sent

    def due(self, client: int, silent: float) -> bool:
        """Whether to greet a client's node after this many seconds of silence since its
        question.
        """
        after = self._shortest
        if client in self._behind:
            after = _BEHIND_S
        elif client in self._at_work:
            after = max(after, 2 * self._took.get(client, 0.0))
        return silent > after

    @staticmethod
    def content() -> RecordDict:
        """The content of a greeting, which is unique."""
        return content_of({**protocol.HELLO, "nonce": secrets.token_hex(16)})

    def was_sent(self, message_id: str, client: int, question: str) -> None:
        """Record that a greeting was sent while a client's question was unanswered."""
        self._sent[message_id] = client, question

    def record_answer(self, message_id: str, asked: Mapping[int, str]) -> None:
        """Learn from the answer to a greeting whether its node is behind or busy.

        Args:
            message_id: id of the greeting.
            asked: client -> question of this round.
        """
        client, question = self._sent.pop(message_id)
        behind = asked.get(client, question) != question
        (self._behind if behind else self._at_work).add(client)
        (self._at_work if behind else self._behind).discard(client)

    def took(self, client: int, seconds: float) -> None:
        """Record how long the answer of a client took, in seconds."""
        self._took[client] = seconds
