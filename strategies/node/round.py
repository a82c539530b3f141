"""A round over real nodes: how long it waits, where each client's part of it stands, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flwr.app import Message

from fedlgm.node_protocol import Question


@dataclass(frozen=True)
class Patience:
    """How long a round waits, in seconds, and for how many.

    Attributes:
        quorum: share of the asked clients whose answers a round needs, in [0, 1]; at least one is needed.
        round_seconds: after which a round with its quorum goes on without those that are still busy.
        offline_seconds: for which a node that is not connected, or whose service is down, is waited for.
        give_up_seconds: after which a round below its quorum ends the run with an error; it can be resumed.
        poll_seconds: between looks for answers; up to five times as long in a long round.
        greet_seconds: after which a node that is connected and silent is sent a greeting, see
            `strategies.node.greetings`.
        tell_seconds: between lines that say who is waited for.
    """

    quorum: float = 1.0
    round_seconds: float = 600.0
    offline_seconds: float = 30.0
    give_up_seconds: float = 3600.0
    poll_seconds: float = 0.2
    greet_seconds: float = 20.0
    tell_seconds: float = 10.0


@dataclass
class Asked:
    """One client's part of a round.

    Attributes:
        message: the strategy's.
        question: what its node is asked.
        header: the question's, signed.
        model: the question's body.
        keys: message id -> mask, of the messages that may still be answered.
        answer: header of the answer that counts.
        body: its numbers.
        lost: why there will be none.
        down_since: when it was found unable to answer.
        why_down: how.
        next_try, asked_at: times of the next message and of the last.
        greeted: whether it was, since the last message.
    """

    message: Message
    question: Question
    header: dict[str, Any]
    model: bytes
    keys: dict[str, int] = field(default_factory=dict)
    answer: dict[str, Any] | None = None
    body: bytes = b""
    lost: str = ""
    down_since: float | None = None
    why_down: str = "is not connected"
    next_try: float = 0.0
    asked_at: float = 0.0
    greeted: bool = False

    @property
    def client(self) -> int:
        """The client's number."""
        return self.question.client

    @cached_property
    def digest(self) -> str:
        """Name of the question."""
        return self.question.digest

    @property
    def open(self) -> bool:
        """Whether an answer may still come."""
        return self.answer is None and not self.lost

    @property
    def missing(self) -> str:
        """Why there is no answer."""
        return self.lost or (f"it {self.why_down}" if self.down_since is not None else "no answer")


@dataclass
class RoundReport:
    """What became of a round's questions.

    Attributes:
        round: number, from 1.
        answered: names of the nodes whose answers count.
        lost: name -> why its answer does not.
        late: answers to earlier rounds that arrived in this one; they were charged and do not count.
        seconds: until the last answer that counts.
    """

    round: int
    answered: list[str]
    lost: dict[str, str]
    late: int
    seconds: float
