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
from fedlgm_nodes.server.round import Asked, Patience, grouped, listed

_LOOK_S = 2.0  # between looks for who is connected, and between two messages to a node that is down


class Polling:
    """Rounds of questions, with state for later rounds: nodes that are down, late, or no longer
    asked.

    Args:
        link: link to the nodes.
        enrolment: their names.
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
        """Ask until every client has answered or is lost, and return the number of late answers to
        earlier rounds.

        Args:
            asked: the clients' parts.
            started: time at which the round, or its step, began.
            needed: number of answers below which the round waits.
            key: the recipe's key for this number.

        Raises:
            RunError: too few nodes have answered.
        """
        patience = self._patience
        for one in asked:
            one.lost = self._excluded.get(one.client, "")
        looked, told = -math.inf, started
        late = self._pull([], started)  # before anything new is sent, see `greetings`
        while True:
            now = time.monotonic()
            if now - looked > _LOOK_S:
                self._link.look()
                looked = now
            self._ask(
                [one for one in asked if one.open and not one.keys and now >= one.next_try], now
            )
            self._greet(asked, now)
            late += self._pull(asked, now)
            self._leave(asked, needed, started, now)
            waiting = [one for one in asked if one.open]
            if not waiting or sum(not one.lost for one in asked) < needed:
                break
            if now - started > patience.give_up_seconds:
                break
            if now - told > patience.tell_seconds:
                told = now
                self._tell(asked, waiting, now - started)
            shortest, longest = patience.poll_seconds, 5 * patience.poll_seconds
            time.sleep(protocol.pause_after(now - started, shortest, longest, share=0.02))
        for one in asked:
            self._late |= dict.fromkeys(one.keys if one.lost else (), one.client)
        self._require(asked, needed, key)
        return late

    def exclude(self, client: int, why: str) -> None:
        """Ask this client no more in this run."""
        self._excluded[client] = why

    def _leave(self, asked: list[Asked], needed: int, started: float, now: float) -> None:
        """Continue without clients that have used up their waiting time, as far as the quorum
        allows.
        """
        patience = self._patience
        for one in asked:
            down = (
                one.open and one.down_since is not None and not one.keys
            )  # not with an answer still to come
            if down and now - (one.down_since or 0.0) > patience.offline_seconds:
                possible = sum(not other.lost for other in asked)
                if possible > needed:  # below the quorum it is waited for
                    one.lost = one.why_down
        if sum(one.answer is not None for one in asked) < needed:
            return
        for seconds in (patience.round_seconds, patience.give_up_seconds):
            if now - started > seconds:
                for one in asked:
                    one.lost = one.lost or (f"no answer within {seconds:g} s" if one.open else "")

    def _require(self, asked: list[Asked], needed: int, key: str) -> None:
        answered = sum(one.answer is not None for one in asked)
        if answered < needed:
            missing = [
                (self._enrolment[one.client].name, one.missing)
                for one in asked
                if one.answer is None
            ]
            reasons = "; ".join(f"{listed(names)}: {why}" for names, why in grouped(missing))
            again = (
                "The same command, without --fresh, resumes the run"
                if sum(not one.refused for one in asked) >= needed
                else "The same command meets the same refusals until the nodes' policies or "
                "budgets change"
            )
            raise RunError(
                f"{answered} of {len(asked)} nodes answered, but the quorum is {needed} ({key}); "
                f"{reasons}. {again}"
            )

    def _tell(self, asked: list[Asked], waiting: list[Asked], seconds: float) -> None:
        names = ", ".join(self._enrolment[one.client].name for one in waiting[:5])
        more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
        answered = sum(one.answer is not None for one in asked)
        self._say(
            f"waiting for {names}{more} ({answered} of {len(asked)} answered, {seconds:.0f} s)"
        )

    # -- messages ------------------------------------------------------------------------------------------------------

    def _ask(self, due: list[Asked], now: float) -> None:
        ready = []
        for one in due:
            if one.client in self._link.online:
                ready.append(one)
            elif one.down_since is None:
                self._is_down(one, "not connected", now)
        if not ready:
            return
        for one, keys in zip(ready, self._link.ask(ready), strict=True):
            one.next_try, one.asked_at, one.greeted = now + _LOOK_S, now, False
            one.keys |= keys

    def _greet(self, asked: list[Asked], now: float) -> None:
        due = [
            one
            for one in asked
            if one.open and one.keys and not one.greeted and one.client in self._link.online
            and self._greetings.due(one.client, now - one.asked_at)
        ]  # fmt: skip
        for one in due:
            one.greeted = True
        sent = self._link.greet([one.client for one in due], self._greetings.content)
        for one, id_ in zip(due, sent, strict=True):
            if id_:
                self._greetings.was_sent(id_, one.client, one.digest)

    def _pull(self, asked: list[Asked], now: float) -> int:
        """Process the replies that have arrived; returns the number of late answers."""
        owner = {id_: one for one in asked if one.open for id_ in one.keys}
        late = 0
        for reply in self._link.replies([*owner, *self._late, *self._greetings.sent]):
            id_ = reply.metadata.reply_to_message_id
            if id_ in self._greetings.sent:
                self._greetings.answered(id_, {one.client: one.digest for one in asked})
            elif id_ in self._late:
                late += 1
                name = self._enrolment[self._late.pop(id_)].name
                self._say(
                    f"{name} has answered an earlier round too late: charged there, not counted "
                    "here"
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

    def _take(self, one: Asked, reply: Message, key: int, now: float) -> None:
        """Check one client's reply."""
        if reply.has_error():
            one.next_try = now + _LOOK_S
            self._is_down(one, f"does not answer: {printable(str(reply.error.reason), 200)}", now)
            return
        header = header_of(reply)
        if header is None:
            one.lost = "its answer is not one of a release service"
            return
        if header.get("ok") is not True:
            self._refused(one, header, now)
            return
        body = body_of(reply, key)
        problem = one.check(header, body)
        if problem is not None:
            one.lost = problem.why
            if problem.lasting:
                self.exclude(one.client, problem.why)
            return
        one.answer, one.body = header, body
        self._down.pop(one.client, None)
        self._named.discard(one.client)
        self._greetings.took(one.client, now - one.asked_at)

    def _refused(self, one: Asked, header: dict[str, Any], now: float) -> None:
        code, why = printable(str(header.get("code")), 40), printable(str(header.get("why")), 300)
        if code in TRANSIENT:
            one.next_try = now + _LOOK_S
            self._is_down(one, f"busy: {why}", now, told=False)
            return
        one.lost, about, one.refused = f"refused ({code}): {why}", header.get("about"), True
        one.accused = about if type(about) is int else None
        if code in LASTING:
            self.exclude(one.client, one.lost)

    def _is_down(self, one: Asked, why: str, now: float, *, told: bool = True) -> None:
        """Wait for a client, but not again if it was so in an earlier round; the first time is told
        at once.
        """
        one.why_down = why
        if told and one.client not in self._named:
            self._named.add(one.client)
            self._say(
                f"{self._enrolment[one.client].name}: {why}; its operator should look at its "
                "processes"
            )
        if one.down_since is None:
            one.down_since = self._down.setdefault(one.client, now)
