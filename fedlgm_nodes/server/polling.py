"""Asks the enrolled nodes and waits until each has answered or is lost, or until the round's
patience ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Message

from fedlgm.errors import RunError
from fedlgm.wire import printable
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import LASTING, TRANSIENT
from fedlgm_nodes.server.enrolment import Enrolment
from fedlgm_nodes.server.greetings import Greetings
from fedlgm_nodes.server.link import NodeLink, body_of, header_of
from fedlgm_nodes.server.round import Asked, Patience, group_by_reason, join_names

# seconds between looks for connected nodes, and between two messages to a node that is down
_LOOK_S = 2.0


class Polling:
    """Asks the questions of each round, and remembers for later rounds which nodes are down, late
    or no longer asked.

    Args:
        link: link to the nodes.
        enrolment: names of the nodes.
        patience: quorum and waiting times.
        say: called with each line of progress.
    """

    def __init__(
        self, link: NodeLink, enrolment: Enrolment, patience: Patience, say: Callable[[str], None]
    ) -> None:
        self._link, self._enrolment, self._patience, self._say = link, enrolment, patience, say
        self._greetings = Greetings(patience.greet_seconds)
        self._excluded: dict[int, str] = {}
        self._down: dict[int, float] = {}
        self._named: set[int] = set()  # clients that have been down since their last answer
        self._late: dict[str, int] = {}  # message id -> client

    def wait(self, asked: list[Asked], started: float, needed: int, key: str) -> int:
        """Ask until every client has answered or is lost, or the waiting times of the patience have
        passed. Returns the number of answers that arrived too late, or twice.

        Args:
            asked: the questions to the clients.
            started: time at which the round, or its step, began.
            needed: number of answers below which the round waits.
            key: the key that sets this number, for the error.

        Raises:
            RunError: too few nodes have answered.
        """
        patience = self._patience
        for part in asked:
            part.lost = self._excluded.get(part.client, "")
        looked, told = -math.inf, started
        late = self._pull([], started)  # before anything new is sent, see `greetings`
        while True:
            now = time.monotonic()
            if now - looked > _LOOK_S:
                self._link.look()
                looked = now
            self._ask(
                [part for part in asked if part.open and not part.keys and now >= part.next_try],
                now,
            )
            self._greet(asked, now)
            late += self._pull(asked, now)
            self._leave(asked, needed, started, now)
            waiting = [part for part in asked if part.open]
            if not waiting or sum(not part.lost for part in asked) < needed:
                break
            if now - started > patience.give_up_seconds:
                break
            if now - told > patience.tell_seconds:
                told = now
                self._tell(asked, waiting, now - started)
            shortest, longest = patience.poll_seconds, 5 * patience.poll_seconds
            time.sleep(protocol.pause_after(now - started, shortest, longest, share=0.02))
        for part in asked:
            self._late |= dict.fromkeys(part.keys if part.lost else (), part.client)
        self._require(asked, needed, key)
        return late

    def exclude(self, client: int, why: str) -> None:
        """Stop asking this client in this run."""
        self._excluded[client] = why

    def _leave(self, asked: list[Asked], needed: int, started: float, now: float) -> None:
        """Give up clients that have not answered within their waiting time, as far as the quorum
        allows.
        """
        patience = self._patience
        for part in asked:
            # a node that may still answer an earlier message is not down
            down = part.open and part.down_since is not None and not part.keys
            if down and now - (part.down_since or 0.0) > patience.offline_seconds:
                possible = sum(not other.lost for other in asked)
                if possible > needed:  # below the quorum the round waits for the node
                    part.lost = part.why_down
        if sum(part.answer is not None for part in asked) < needed:
            return
        for seconds in (patience.round_seconds, patience.give_up_seconds):
            if now - started > seconds:
                for part in asked:
                    part.lost = part.lost or (
                        f"no answer within {seconds:g} s" if part.open else ""
                    )

    def _require(self, asked: list[Asked], needed: int, key: str) -> None:
        answered = sum(part.answer is not None for part in asked)
        if answered < needed:
            missing = [
                (self._enrolment[part.client].name, part.missing)
                for part in asked
                if part.answer is None
            ]
            reasons = "; ".join(
                f"{join_names(names)}: {why}" for names, why in group_by_reason(missing)
            )
            again = (
                "The same command, without --fresh, resumes the run"
                if sum(not part.refused for part in asked) >= needed
                else "The same command meets the same refusals until the nodes' policies or "
                "budgets change"
            )
            raise RunError(
                f"{answered} of {len(asked)} nodes answered, but the quorum is {needed} ({key}); "
                f"{reasons}. {again}"
            )

    def _tell(self, asked: list[Asked], waiting: list[Asked], seconds: float) -> None:
        names = ", ".join(self._enrolment[part.client].name for part in waiting[:5])
        more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
        answered = sum(part.answer is not None for part in asked)
        self._say(
            f"waiting for {names}{more} ({answered} of {len(asked)} answered, {seconds:.0f} s)"
        )

    # -- messages ------------------------------------------------------------------------------------------------------

    def _ask(self, due: list[Asked], now: float) -> None:
        ready = []
        for part in due:
            if part.client in self._link.online:
                ready.append(part)
            elif part.down_since is None:
                self._is_down(part, "not connected", now)
        if not ready:
            return
        for part, keys in zip(ready, self._link.ask(ready), strict=True):
            part.next_try, part.asked_at, part.greeted = now + _LOOK_S, now, False
            part.keys |= keys

    def _greet(self, asked: list[Asked], now: float) -> None:
        due = [
            part
            for part in asked
            if part.open and part.keys and not part.greeted and part.client in self._link.online
            and self._greetings.due(part.client, now - part.asked_at)
        ]  # fmt: skip
        for part in due:
            part.greeted = True
        sent = self._link.greet([part.client for part in due], self._greetings.content)
        for part, id_ in zip(due, sent, strict=True):
            if id_:
                self._greetings.was_sent(id_, part.client, part.digest)

    def _pull(self, asked: list[Asked], now: float) -> int:
        """Process the replies that have arrived, and return how many of them came too late or
        twice.
        """
        owner = {id_: part for part in asked if part.open for id_ in part.keys}
        late = 0
        for reply in self._link.replies([*owner, *self._late, *self._greetings.sent]):
            id_ = reply.metadata.reply_to_message_id
            if id_ in self._greetings.sent:
                self._greetings.record_answer(id_, {part.client: part.digest for part in asked})
            elif id_ in self._late:
                late += 1
                name = self._enrolment[self._late.pop(id_)].name
                self._say(
                    f"{name} has answered an earlier round too late: it was charged, and its "
                    "answer does not count"
                )
            elif id_ in owner:
                key = owner[id_].keys.pop(id_, None)
                if key is None:
                    late += 1
                    self._say(
                        f"{self._enrolment[owner[id_].client].name} has answered twice: counted "
                        "once"
                    )
                else:
                    self._take(owner[id_], reply, key, now)
        return late

    def _take(self, part: Asked, reply: Message, key: int, now: float) -> None:
        """Accept a client's reply, or record why it does not count."""
        if reply.has_error():
            part.next_try = now + _LOOK_S
            self._is_down(part, f"does not answer: {printable(str(reply.error.reason), 200)}", now)
            return
        header = header_of(reply)
        if header is None:
            part.lost = "its answer is not one of a release service"
            return
        if header.get("ok") is not True:
            self._take_refusal(part, header, now)
            return
        body = body_of(reply, key)
        problem = part.check(header, body)
        if problem is not None:
            part.lost = problem.why
            if problem.lasting:
                self.exclude(part.client, problem.why)
            return
        part.answer, part.body = header, body
        self._down.pop(part.client, None)
        self._named.discard(part.client)
        self._greetings.took(part.client, now - part.asked_at)

    def _take_refusal(self, part: Asked, header: dict[str, Any], now: float) -> None:
        code, why = printable(str(header.get("code")), 40), printable(str(header.get("why")), 300)
        if code in TRANSIENT:
            part.next_try = now + _LOOK_S
            self._is_down(part, f"busy: {why}", now, told=False)
            return
        self._link.learn(part.client, header)  # its next question is asked in this protocol
        part.lost, about, part.refused = f"refused ({code}): {why}", header.get("about"), True
        part.accused = about if type(about) is int else None
        if code in LASTING:
            self.exclude(part.client, part.lost)

    def _is_down(self, part: Asked, why: str, now: float, *, told: bool = True) -> None:
        """Record that a client is down. Its waiting time starts when it was first down, even in an
        earlier round. The first failure since its last answer is reported.
        """
        part.why_down = why
        if told and part.client not in self._named:
            self._named.add(part.client)
            self._say(
                f"{self._enrolment[part.client].name}: {why}; its operator should check its "
                "processes"
            )
        if part.down_since is None:
            part.down_since = self._down.setdefault(part.client, now)
