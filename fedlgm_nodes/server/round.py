"""The waiting times of a round over real nodes, the state of its question to each client, and its
report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from flwr.app import Message

from fedlgm_nodes.protocol.messages import Question

Reason = TypeVar("Reason")


@dataclass(frozen=True)
class Patience:
    """A round's waiting times, in seconds, and its quorum.

    Attributes:
        quorum: share of the asked clients whose answers a round needs, in [0, 1]; at least one
            answer is needed.
        round_seconds: time after which a round that has reached its quorum continues without the
            nodes that have not answered.
        offline_seconds: time to wait for a node that is not connected or whose service is down.
        give_up_seconds: time after which a round below its quorum ends the run with an error. The
            run can be resumed.
        poll_seconds: time between polls for answers, which grows to five times this value in a long
            round.
        greet_seconds: time of silence after which a connected node is sent a greeting (see
            `fedlgm_nodes.server.greetings`).
        tell_seconds: time between progress messages that name the missing nodes.
    """

    quorum: float = 1.0
    round_seconds: float = 600.0
    offline_seconds: float = 30.0
    give_up_seconds: float = 3600.0
    poll_seconds: float = 0.2
    greet_seconds: float = 20.0
    tell_seconds: float = 10.0

    def answers_needed(self, nodes: int) -> int:
        """Number of answers that a round with this many nodes needs."""
        return max(1, math.ceil(self.quorum * nodes - 1e-9))


class Problem(NamedTuple):
    """The reason why an answer does not count.

    Attributes:
        why: the reason, in words.
        lasting: whether the node's ledger is at fault, so that its later answers in this run do not
            count either.
    """

    why: str
    lasting: bool = False


@dataclass
class Asked:
    """The state of a round's question to one client.

    Attributes:
        message: the strategy's message.
        question: the question to the client's node.
        header: the question's signed header.
        model: the question's body.
        check: function of an answer's header and body that returns the answer's problem; None if
            the answer counts.
        step: the step of a secure sum that the question asks for; empty if there is none.
        keys: message id -> mask of the body, for messages that may still be answered.
        answer: header of the accepted answer.
        body: numbers of the accepted answer.
        lost: reason why there will be no answer.
        refused: whether the node has refused the question and would refuse it again.
        accused: client of the node that, according to this node, caused its refusal.
        down_since: time since which the node has been unable to answer.
        why_down: reason why the node is unable to answer.
        next_try, asked_at: earliest time of the next message, and time of the last message.
        greeted: whether the node was greeted since the last message.
    """

    message: Message
    question: Question
    header: dict[str, Any]
    model: bytes
    check: Callable[[dict[str, Any], bytes], Problem | None]
    step: str = ""
    keys: dict[str, int] = field(default_factory=dict)
    answer: dict[str, Any] | None = None
    body: bytes = b""
    lost: str = ""
    refused: bool = False
    accused: int | None = None
    down_since: float | None = None
    why_down: str = "not connected"
    next_try: float = 0.0
    asked_at: float = 0.0
    greeted: bool = False

    @property
    def client(self) -> int:
        """The client's number."""
        return self.question.client

    @cached_property
    def digest(self) -> str:
        """Digest of the question, followed by the step of a secure sum if there is one."""
        return self.question.digest + self.step

    @property
    def open(self) -> bool:
        """Whether an answer may still come."""
        return self.answer is None and not self.lost

    @property
    def missing(self) -> str:
        """The reason why there is no answer."""
        return self.lost or (self.why_down if self.down_since is not None else "no answer")


@dataclass
class RoundReport:
    """Report of a round over real nodes.

    Attributes:
        round: number, from 1.
        answered: names of the nodes whose answers count.
        lost: names of the nodes without an answer that counts -> the reason.
        late: number of answers that arrived in this round and do not count, because they answer an
            earlier round or repeat an answer.
        seconds: duration of the round.
    """

    round: int
    answered: list[str]
    lost: dict[str, str]
    late: int
    seconds: float


def group_by_reason(reasons: Iterable[tuple[str, Reason]]) -> list[tuple[list[str], Reason]]:
    """Group names by reason, in the order of each group's first name.

    Args:
        reasons: (name, reason) pairs.

    Example:
        >>> group_by_reason([("n0", "is busy"), ("n1", "is down"), ("n2", "is busy")])
        [(['n0', 'n2'], 'is busy'), (['n1'], 'is down')]
    """
    groups: dict[Reason, list[str]] = {}
    for name, reason in reasons:
        groups.setdefault(reason, []).append(name)
    return [(names, reason) for reason, names in groups.items()]


def join_names(names: list[str]) -> str:
    """Join names by commas and a final "and", for use in a sentence.

    Example:
        >>> join_names(["n0", "n1", "n2"])
        'n0, n1 and n2'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
