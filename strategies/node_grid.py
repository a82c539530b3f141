"""Real nodes behind a Flower Grid: what they are asked, and whose answer counts.

`NodeGrid` wraps the Grid that Flower gives a ServerApp. To a strategy it looks like a federation in which every client
has a node that always answers; behind it nodes come and go, and every answer is checked against the enrolment.

* A client is the node whose registered Flower key the enrolment names, whatever the node says of itself.
* An answer counts once, if the node's release service has signed it as the answer to this very question.
* A client whose answer does not come is reported to the strategy as failed, with the reason: it counts as zero, and the
  public denominator stays. Below the quorum a round waits and asks again: the same question costs a node nothing, so no
  budget is wasted, which a void round would do.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedlgm import node_protocol as protocol
from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm.layers import LayerTable
from fedlgm.node_protocol import BODY, HEADER, MASK, TRANSIENT, Position, Question, printable
from fedlgm.plan import ReleasePlan
from strategies.enrolment import Enrolment, key_digest
from strategies.greetings import Greetings
from strategies.ledger_positions import LedgerPositions
from strategies.nodes import OneNodePerClient

_TTL = 12 * 3600.0
_LOST = 1  # code of an error reply; Flower's own say nothing that fits
_SERVER_NODE = 1
_FIRST_NODE = 2  # client c stands behind node id c + 2 of this grid


class EnrolledNodes(OneNodePerClient):
    """The nodes of a `NodeGrid`, as a strategy is told of them: one per client, each of which repeats its answers."""

    @property
    def repeats(self) -> bool:
        """A node that is asked again gives the answer that it kept."""
        return True


@dataclass(frozen=True)
class Patience:
    """How long a round waits, in seconds, and for how many.

    Attributes:
        quorum: share of the asked clients whose answers a round needs, in [0, 1]; at least one is needed.
        round_seconds: after which a round with its quorum goes on without those that are still busy.
        offline_seconds: for which a node that is not connected, or whose service is down, is waited for.
        give_up_seconds: after which a round below its quorum ends the run with an error; it can be resumed.
        poll_seconds: between looks for answers; up to five times as long in a long round.
        greet_seconds: after which a node that is connected and silent is sent a greeting, see `strategies.greetings`.
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
class _Asked:
    """One client's part of a round."""

    client: int
    message: Message
    question: str
    header: dict[str, Any]
    model: bytes
    keys: dict[str, int] = field(default_factory=dict)  # message id -> mask
    answer: dict[str, Any] | None = None
    body: bytes = b""
    lost: str = ""
    down_since: float | None = None
    why_down: str = "is not connected"
    next_try: float = 0.0
    asked_at: float = 0.0
    greeted: bool = False

    @property
    def open(self) -> bool:
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


class NodeGrid(Grid):
    """Grid over the enrolled nodes of a deployment; see the module's note.

    Args:
        runtime: the Grid that Flower gave the ServerApp.
        enrolment: which node is which client.
        layers: the mechanism's view of the model's layers.
        work: what nodes are asked to do, by names that are installed there; see `Question`.
        run: label of the run.
        patience: quorum and waiting times.
        signer: the server's key; nodes whose policy names it answer no other server.
        positions: JSON file of how far each node's ledger was; kept over runs, it shows nodes that were restored.
        test: accept answers of nodes made for tests, whose noise is known; refuse all others.
        say: receives lines for people.
        on_round: receives what became of every round.
    """

    def __init__(
        self,
        runtime: Grid,
        enrolment: Enrolment,
        layers: LayerTable,
        work: Mapping[str, Any],
        run: str,
        *,
        patience: Patience | None = None,
        signer: Ed25519PrivateKey | None = None,
        positions: Path | None = None,
        test: bool = False,
        say: Callable[[str], None] = print,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:
        self._runtime, self._enrolment, self._layers, self._work, self._run = runtime, enrolment, layers, work, run
        self._patience, self._signer, self._test = patience or Patience(), signer, test
        self._say, self._on_round = say, on_round
        self._clients = {node.flower_key: node.client for node in enrolment.node}
        self._keys = {node.client: protocol.public_key(node.service_key) for node in enrolment.node}
        self._positions = LedgerPositions(positions, self._keys)
        self._excluded: dict[int, str] = {}
        self._down: dict[int, float] = {}
        self._late: dict[str, int] = {}  # message id -> client
        self._greetings = Greetings(self._patience.greet_seconds)
        self._strangers: set[str] = set()
        self._numbers = itertools.count(1)
        self._ready: dict[str, Message] = {}

    # -- what a strategy sees ------------------------------------------------------------------------------------------

    def set_run(self, run: Any) -> None:
        """Pass on."""
        self._runtime.set_run(run)

    @property
    def run(self) -> Any:
        """The SuperLink's run."""
        return self._runtime.run

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

    def get_node_ids(self) -> list[int]:
        """One node per enrolled client, connected or not."""
        return [client + _FIRST_NODE for client in range(len(self._enrolment))]

    def get_nodes(self) -> list[Any]:
        """The registered nodes that are connected."""
        return list(self._runtime.get_nodes())  # type: ignore[attr-defined]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Ask and wait; the replies are kept for `pull_messages`."""
        batch = list(messages)
        for reply in self.send_and_receive(batch):
            self._ready[reply.metadata.reply_to_message_id] = reply
        return [message.metadata.message_id for message in batch]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies to pushed messages, each once."""
        return [self._ready.pop(one) for one in message_ids if one in self._ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Replies in the order of the messages: one per message, an error where a client's answer does not come.

        Raises:
            RunError: the quorum was not reached; the run can be resumed.
        """
        batch = list(messages)
        if not batch:
            return []
        if all(message.metadata.message_type == MessageType.QUERY for message in batch):
            return [self._introduce(message) for message in batch]
        return self._round(batch)

    def _introduce(self, message: Message) -> Message:
        answer: dict[str, Any] = {
            wire.PARTITION: message.metadata.dst_node_id - _FIRST_NODE, wire.PARTITIONS: len(self._enrolment),
        }  # fmt: skip
        return Message(content=RecordDict({wire.CONFIG: ConfigRecord(answer)}), reply_to=message)

    # -- a round -------------------------------------------------------------------------------------------------------

    def _round(self, batch: list[Message]) -> list[Message]:
        started = time.monotonic()
        models: dict[int, str] = {}
        asked = [self._question(message, models) for message in batch]
        late = self._wait(asked, started)
        round_ = int(batch[0].content.config_records[wire.CONFIG][wire.ROUND])  # type: ignore[arg-type]
        report = RoundReport(
            round_,
            [self._enrolment[one.client].name for one in asked if one.answer is not None],
            {self._enrolment[one.client].name: one.lost for one in asked if one.lost},
            late,
            time.monotonic() - started,
        )
        for name, why in report.lost.items():
            self._say(f"round {round_}: {name} counts as zero: {why}")
        if self._on_round is not None:
            self._on_round(report)
        return [self._reply(one) for one in asked]

    def _question(self, message: Message, models: dict[int, str]) -> _Asked:
        if message.metadata.message_type != MessageType.TRAIN:
            raise RunError(f"nodes answer no {message.metadata.message_type!r} questions: nothing raw leaves them")
        config = message.content.config_records[wire.CONFIG]
        arrays = message.content.array_records[wire.ARRAYS]
        client = message.metadata.dst_node_id - _FIRST_NODE
        model = arrays[wire.MODEL].data  # one object for all clients of a round
        if id(model) not in models:
            models[id(model)] = protocol.sha256(model)
        round_, plan = int(config[wire.ROUND]), str(config[wire.PLAN])  # type: ignore[arg-type]
        position = self._positions.get(client)
        question = Question(
            self._run, round_, client, plan, models[id(model)], self._work, secrets.token_hex(16),
            self._enrolment[client].service_key, None if position is None else position.values(),
        )  # fmt: skip
        one = _Asked(client, message, question.digest, question.header(self._signer), model)
        one.lost = self._excluded.get(client, "")
        return one

    def _wait(self, asked: list[_Asked], started: float) -> int:
        """Ask until everybody has answered or is lost; returns the number of late answers to earlier rounds."""
        patience = self._patience
        needed = max(1, math.ceil(patience.quorum * len(asked) - 1e-9))
        online, looked, told = dict[int, int](), -math.inf, started
        late = self._pull([], started)  # before anything new is sent, see `greetings`
        while True:
            now = time.monotonic()
            if now - looked > 2.0:
                online, looked = self._online(), now
            self._push([one for one in asked if one.open and not one.keys and now >= one.next_try], online, now)
            self._greet(asked, online, now)
            late += self._pull(asked, now)
            waiting = [one for one in asked if one.open]
            answered = sum(one.answer is not None for one in asked)
            for one in waiting:
                down = one.down_since is not None and not one.keys  # not with an answer still to come
                if down and now - (one.down_since or 0.0) > patience.offline_seconds:
                    possible = sum(not other.lost for other in asked)
                    if possible > needed:  # below the quorum it is waited for
                        one.lost = f"it {one.why_down}"
            waiting = [one for one in waiting if one.open]
            if not waiting or sum(not one.lost for one in asked) < needed:
                break
            if answered >= needed and now - started > patience.round_seconds:
                for one in waiting:
                    one.lost = f"no answer within {patience.round_seconds:g} s"
                break
            if now - started > patience.give_up_seconds:
                for one in waiting if answered >= needed else ():
                    one.lost = f"no answer within {patience.give_up_seconds:g} s"
                break
            if now - told > patience.tell_seconds:
                told = now
                names = ", ".join(self._enrolment[one.client].name for one in waiting[:5])
                more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
                self._say(f"waiting for {names}{more} ({answered} of {len(asked)} answered, {now - started:.0f} s)")
            shortest, longest = patience.poll_seconds, 5 * patience.poll_seconds
            time.sleep(protocol.pause_after(now - started, shortest, longest, share=0.02))
        for one in asked:
            self._late |= dict.fromkeys(one.keys if one.lost else (), one.client)
        answered = sum(one.answer is not None for one in asked)
        if answered < needed:
            reasons = "; ".join(
                f"{self._enrolment[one.client].name}: {one.missing}" for one in asked if one.answer is None
            )
            raise RunError(
                f"{answered} of {len(asked)} nodes answered, the quorum is {needed} (federation.quorum); {reasons}. "
                "The same command resumes the run"
            )
        return late

    def _online(self) -> dict[int, int]:
        """Client -> node id of those that are connected; strangers are told once."""
        found: dict[int, int] = {}
        for node in self.get_nodes():
            try:
                key = key_digest(node.public_key)
            except ValueError:
                key = ""
            if key in self._clients:
                found[self._clients[key]] = node.node_id
            elif key not in self._strangers:
                self._strangers.add(key)
                name = printable(str(node.name or node.node_id), 100)
                self._say(f"a node that is not enrolled is connected and not asked: {name}")
        return found

    def _push(self, asked: list[_Asked], online: dict[int, int], now: float) -> None:
        ready = []
        for one in asked:
            if one.client in online:
                ready.append(one)
            elif one.down_since is None:
                # Known from an earlier round: not waited for again.
                one.down_since = self._down.setdefault(one.client, now)
                one.why_down = "is not connected"
        if not ready:
            return
        messages, key = [], secrets.randbits(32)
        masked: dict[int, ArrayRecord] = {}  # nodes that are asked together share what is sent
        for one in ready:
            if id(one.model) not in masked:
                data = bytes(protocol.masked(one.model, key))
                array = Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)
                masked[id(one.model)] = ArrayRecord({BODY: array})
            config = ConfigRecord({HEADER: json.dumps(one.header), MASK: key})
            content = RecordDict({wire.CONFIG: config, wire.ARRAYS: masked[id(one.model)]})
            group = one.message.metadata.group_id
            messages.append(self._runtime.create_message(content, MessageType.TRAIN, online[one.client], group))
        for one, id_ in zip(ready, self._runtime.push_messages(messages), strict=True):
            one.next_try, one.asked_at, one.greeted = now + 2.0, now, False
            if id_:
                one.keys[id_] = key

    def _greet(self, asked: list[_Asked], online: dict[int, int], now: float) -> None:
        due = [
            one
            for one in asked
            if one.open and one.keys and not one.greeted and one.client in online
            and self._greetings.due(one.client, now - one.asked_at)
        ]  # fmt: skip
        messages = []
        for one in due:
            one.greeted = True
            content = self._greetings.content()
            messages.append(self._runtime.create_message(content, MessageType.TRAIN, online[one.client], "hello"))
        for one, id_ in zip(due, self._runtime.push_messages(messages) if messages else (), strict=True):
            if id_:
                self._greetings.was_sent(id_, one.client, one.question)

    def _pull(self, asked: list[_Asked], now: float) -> int:
        owner = {id_: one for one in asked if one.open for id_ in one.keys}
        wanted = [*owner, *self._late, *self._greetings.sent]
        late = 0
        for reply in self._runtime.pull_messages(wanted) if wanted else ():
            id_ = reply.metadata.reply_to_message_id
            if id_ in self._greetings.sent:
                self._greetings.answered(id_, {one.client: one.question for one in asked})
            elif id_ in self._late:
                late += 1
                name = self._enrolment[self._late.pop(id_)].name
                self._say(f"{name} has answered an earlier round too late: charged there, not counted here")
            elif id_ in owner:
                key = owner[id_].keys.pop(id_, None)
                if key is None:
                    late += 1
                    self._say(f"{self._enrolment[owner[id_].client].name} has answered twice: counted once")
                else:
                    self._take(owner[id_], reply, key, now)
        return late

    def _take(self, one: _Asked, reply: Message, key: int, now: float) -> None:
        """Check one client's reply."""
        if reply.has_error():
            self._retry(one, f"does not answer: {printable(str(reply.error.reason), 200)}", now)
            return
        try:
            header = protocol.parse_header(str(reply.content.config_records[wire.CONFIG][HEADER]).encode())
        except (KeyError, RunError):
            one.lost = "its answer is not one of a release service"
            return
        if header.get("ok") is not True:
            code, why = printable(str(header.get("code")), 40), printable(str(header.get("why")), 300)
            if code in TRANSIENT:
                self._retry(one, f"is busy: {why}", now)
                return
            one.lost = f"refused ({code}): {why}"
            if code in ("budget-spent", "rolled-back"):
                self._excluded[one.client] = one.lost
            return
        arrays = reply.content.array_records.get(wire.ARRAYS, ArrayRecord())
        try:
            body = bytes(protocol.masked(arrays[BODY].data, key)) if BODY in arrays else b""
        except RunError:
            body = b""
        problem = self._problem(one, header, body)
        if problem:
            one.lost = problem
            self._excluded |= {one.client: problem} if "ledger" in problem else {}
            return
        one.answer, one.body = header, body
        self._down.pop(one.client, None)
        self._greetings.took(one.client, now - one.asked_at)

    def _retry(self, one: _Asked, why: str, now: float) -> None:
        one.next_try, one.why_down = now + 2.0, why
        if one.down_since is None:
            one.down_since = self._down.setdefault(one.client, now)

    def _problem(self, one: _Asked, header: dict[str, Any], body: bytes) -> str:
        """Why an answer does not count; empty if it does."""
        key, seq, position = self._keys[one.client], header.get("seq"), Position.of(header.get("position"))
        if not body or type(seq) is not int or position is None:
            return "its answer is incomplete"
        signature = str(header.get("signature"))
        fields = protocol.answer_fields(one.question, one.client, seq, protocol.sha256(body), position)
        if not protocol.verify(key, signature, *fields):
            return "its answer was not signed by its enrolled service, or answers another question"
        if not position.valid(key):
            return "its ledger's position was not signed by its enrolled service"
        if position.seq < seq:
            return f"its ledger is older than its answer: {position.seq} releases, the answer is release {seq}"
        if position.test != self._test:
            return "it is a node for tests: its noise is known" if position.test else "it is no node for tests"
        try:
            values = protocol.vector(body, ("<f4", "<f8"))
        except RunError as error:
            return f"its answer cannot be read: {error}"
        expected = ReleasePlan.from_json(self._layers, str(one.header["plan"])).size
        if values.shape != (expected,):
            return f"its answer has {values.size} numbers where the plan releases {expected}"
        problem = self._positions.problem(one.client, position)
        if not problem:
            self._positions.put(one.client, position)
        return problem

    def _reply(self, one: _Asked) -> Message:
        if not one.body:
            reason = f"{self._enrolment[one.client].name}: {one.lost}"
            return Message(Error(code=_LOST, reason=reason), reply_to=one.message)
        values = protocol.vector(one.body, ("<f4", "<f8"))
        array = Array(dtype=str(values.dtype), shape=values.shape, stype="numpy.ndarray", data=one.body)
        metrics = MetricRecord({wire.CLIENT_COUNT: 1, wire.DISCARDED: 0})
        content = RecordDict({wire.ARRAYS: ArrayRecord({wire.SUM: array}), wire.METRICS: metrics})
        return Message(content=content, reply_to=one.message)
