"""Rounds over real nodes in which the server sees only a sum, since each round is one secure sum.

A round takes four messages to each node. A round that the previous round has prepared takes two,
because the nodes exchange keys and shares for the next round in the messages in which they mask and
unmask. If a node drops out, the remaining nodes agree on the set of survivors in a further message.
Prepared keys and shares serve only the same nodes and the same plan. After the loss of a node, or
for another plan, the next round starts from its first step. It also does so if a node has lost its
keys in the meantime, which the server detects by asking for the shares once more.

A server that was killed and started again continues the round that it had begun to charge (see
`open_attempt`).

To a strategy the nodes are one worker that returns the sum of a block of clients, like a
simulation's worker. Both sum the same integers, so a round in which no node drops out gives the
same model bit for bit.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm.noise.integer import centred
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.secagg.steps import AHEAD, NO_MODEL, WORDS, terms_of, texts
from fedlgm_nodes.server.node_grid import FIRST_NODE, NodeGrid
from fedlgm_nodes.server.open_attempt import AttemptFile, LostAttempt, OpenAttempt
from fedlgm_nodes.server.round import Asked
from fedlgm_nodes.server.secagg import SecureSum, VoidRound, reasons
from strategies.nodes import Addresses, OneNodePerClient

_RESTART_S = 2.0
"""Number of seconds between the last shares and the next round after which a service may have
restarted and lost its keys.
"""
_NODE_BYTES = 480
"""Number of bytes that one node (its signature and its advert) adds to the header of an "unmask"
question that also asks for shares.
"""
_OTHER_BYTES = 2048
"""Number of bytes of the other fields of the further question, the largest of which is a signed
ledger position.
"""


@dataclass
class EnrolledSum(OneNodePerClient):
    """The nodes of a `SecureGrid` as a strategy sees them: one worker for all clients of a round.

    A repeated round is a new attempt, for which the nodes make new releases with new noise.
    """

    single = False
    repeats = False  # a repeated round has other noise

    def charge(self, grid: Grid, charge: Callable[[], None]) -> None:
        """Set the function that charges the next round to the run's ledger (see
        `SecureGrid.charge`).
        """
        assert isinstance(grid, SecureGrid)
        grid.charge = charge

    def addresses(self, blocks: Iterable[np.ndarray]) -> Addresses:
        """Address one message to all clients together; no message if there are no clients."""
        clients = [int(client) for block in blocks for client in block]
        return [(FIRST_NODE, clients)] if clients else []


class SecureGrid(NodeGrid):
    """Grid over the enrolled nodes of a deployment under trust "distributed". The arguments are
    those of `NodeGrid`.

    A node that is lost in a step takes no further part in the round. If fewer nodes than the
    threshold have answered a step, the step waits as long as the patience permits. After that, the
    run ends if no node has been charged, and otherwise the round is void. A round for fewer nodes
    than the threshold is void without a question to any node.

    Attributes:
        charge: function that charges the next round to the run's ledger. It is called before the
            nodes are asked for their vectors. Earlier steps release nothing, and a run that ends in
            one of them repeats the round when it is resumed.
        file: file of the open attempt; None if open attempts are not written to disk.
    """

    charge: Callable[[], None] = staticmethod(lambda: None)
    file: AttemptFile | None = None
    _prepared: _Attempt | None = None

    def _round(self, batch: list[Message]) -> list[Message]:
        if len(batch) != 1:
            raise RunError("a round of a secure sum is one message for all of its clients")
        message, started = batch[0], time.monotonic()
        config = message.content.config_records[wire.CONFIG]
        clients: list[int] = sorted(config[wire.CLIENTS])  # type: ignore[arg-type]
        asked = int(config[wire.ROUND]), str(config[wire.PLAN]), clients  # type: ignore[arg-type]
        attempt, self._prepared = self._prepared, None
        if self.file is not None and self.file.found is not None:
            attempt, self.file.found = (
                self._continue_attempt(self.file.found, message, *asked),
                None,
            )
        elif attempt is None or not attempt.serves(*asked) or not attempt.is_held(message):
            attempt = _Attempt(self, *asked)
        void = ""
        try:
            total = attempt.total(message)
            self._prepared = attempt.next
        except VoidRound as error:
            void, total = str(error), np.zeros(attempt.server.terms.size, np.uint32)
        answered = attempt.answered
        lost = {
            client: why
            for client, why in (attempt.lost | attempt.guilty).items()
            if client not in answered
        }
        for client, why in attempt.guilty.items():
            self.polling.exclude(client, why)
        self._report(attempt.round, answered, lost, attempt.late, started)
        if void:
            self._say(f"round {attempt.round} is void and leaves the model unchanged: {void}")
        values = centred(total).astype(np.float64)
        metrics = MetricRecord({wire.CLIENT_COUNT: len(answered), wire.DISCARDED: 0})
        arrays = ArrayRecord({wire.SUM: Array(**wire.fields(values))})
        return [Message(RecordDict({wire.ARRAYS: arrays, wire.METRICS: metrics}), reply_to=message)]

    def _continue_attempt(
        self, record: OpenAttempt, message: Message, round: int, plan: str, clients: list[int]
    ) -> _Attempt:
        """Resume and return the attempt that an earlier process has left open.

        Raises:
            LostAttempt: another round, plan, model or set of clients is requested, too few nodes
                answer, or too few still hold their keys.
            RunError: too few nodes answer; the run can be resumed.
        """
        model = protocol.sha256(message.content.array_records[wire.ARRAYS][wire.MODEL].data)
        if (record.round, record.plan, record.clients, record.model) != (
            round,
            plan,
            clients,
            model,
        ):
            why = "its round, plan, model or nodes are no longer those that it was begun with"
        else:
            attempt = _Attempt(self, round, plan, clients, record.nonce)
            why = attempt.resume(record, message)
            if not why:
                self._say(
                    f"round {round} continues where it was interrupted: no node is charged twice"
                )
                return attempt
        raise LostAttempt(
            f"round {round} cannot continue where it was interrupted: {why}; it begins again, and "
            "its nodes are charged once more"
        )


class _Attempt:
    """One attempt at one round.

    Args:
        grid: the nodes.
        round: number, from 1.
        plan: JSON text of its plan.
        clients: clients that are asked, ascending.
        nonce: the nonce of all questions of the attempt; drawn if not given.

    Attributes:
        round: the round's number.
        server: the server's side of the sum.
        answered: clients whose vectors are in the sum.
        lost: client -> why it takes no further part.
        guilty: client -> why it is left out of later rounds.
        late: number of answers to earlier questions that arrived during the attempt.
        next: the next round's attempt, for which shares have been exchanged; None if it is not
            prepared.
    """

    def __init__(
        self, grid: SecureGrid, round: int, plan: str, clients: list[int], nonce: str = ""
    ) -> None:
        self._grid, self.round, self._plan, self._clients = grid, round, plan, clients
        self._nonce = nonce or secrets.token_hex(16)
        self._ask(NO_MODEL)
        question = self._questions[clients[0]]
        parsed = grid.answers.plan(question)
        self.server, self._rounds = (
            SecureSum(terms_of(question, parsed), grid.services),
            parsed.facts.rounds,
        )
        self._early: dict[int, Any] = {}  # client -> its answer to a step that was asked ahead
        self._adverts: list[dict[str, Any]] = []
        self._shares: dict[int, tuple[dict[int, str], str]] = {}  # client -> its answer to "share"
        self._delivered: dict[int, dict[int, str]] = {}
        self._shared_at = 0.0
        self._kept: OpenAttempt | None = None  # the attempt as it is on disk
        self.lost, self.late, self.answered = dict[int, str](), 0, list[int]()
        self.guilty = dict[int, str]()
        self.next: _Attempt | None = None

    def serves(self, round: int, plan: str, clients: list[int]) -> bool:
        """Whether the attempt is for this round, plan and set of clients, and all of these clients
        have shared their secrets.
        """
        return (
            (round, plan, clients)
            == (self.round, self._plan, self._clients)
            == (round, plan, list(self._delivered))
        )

    def is_held(self, message: Message) -> bool:
        """Whether every node still holds the secrets that it has shared. If a node may have lost
        its secrets since, all nodes are asked for their shares again.

        Nothing has been charged yet, so all nodes can still exchange new keys. A node repeats its
        earlier answer, or gives new shares if an older copy of its session store was restored. The
        argument is that of `total`.
        """
        if time.monotonic() - self._shared_at < _RESTART_S:
            return True
        self._message = message
        with suppress(RunError):
            self._share(self._clients)
            if len(self._delivered) == len(self._clients):
                return True
        self._grid._say(
            f"round {self.round}: not every node still holds the keys that were exchanged ahead: "
            "all nodes exchange new keys, and nothing has yet been charged for this "
            f"round{reasons(self.lost)}"
        )
        return False

    def resume(self, record: OpenAttempt, message: Message) -> str:
        """Take over the attempt of an earlier process, and return the reason why the attempt cannot
        be continued; empty if it can.

        The nodes are asked for their adverts once more. A node that has lost its keys makes a new
        advert, which is not used. No data are read, and nothing is charged. Only signed adverts
        show whether a node has its keys, because relays can forge refusals.

        Raises:
            RunError: too few nodes answer.
        """
        server = self.server
        self._message, self._kept, self.lost = message, record, dict(record.lost)
        try:
            self._adverts, self._shares = server.advertised(record.adverts), record.shared
            if self._adverts != list(record.adverts.values()):
                return f"its cohort is no longer complete{reasons(server.lost)}"
            self._delivered = server.shared(record.shared)
            if record.sent:
                server.resume(record.sent, record.total)
        except RunError as error:
            return str(error)
        asked: list[int] = list(record.sent or self._delivered)
        said = self._answers("advertise", {client: {} for client in asked})
        gone = {
            client: "it has made other keys"
            for client, advert in said
            if advert != record.adverts[client]
        }
        if len(asked) - len(gone) >= server.terms.threshold:
            return ""
        return f"too few nodes still have its keys{reasons(gone)}"

    def _ask(self, model: str) -> None:
        """Make the questions of this attempt for the model with this SHA-256."""
        question_to = partial(
            self._grid.question, round=self.round, plan=self._plan, nonce=self._nonce, model=model
        )
        self._questions: dict[int, Question] = {
            client: question_to(client) for client in self._clients
        }
        self._headers = {
            client: self._grid.questions.header(question)
            for client, question in self._questions.items()
        }

    def total(self, message: Message) -> np.ndarray:
        """Carry out the attempt and return the sum of the nodes' words, uint32 [size].

        Args:
            message: the strategy's message, with the model.

        Raises:
            RunError: too few nodes answered before anything was charged; the run can be resumed.
            VoidRound: too few nodes answered after the charge, or fewer nodes than the threshold
                are asked.
        """
        self._message, server = message, self.server
        # caps on participation leave too few nodes, and a resumed run would ask the same nodes
        if len(self._clients) < server.terms.threshold:
            raise VoidRound(
                f"it asks {len(self._clients)} nodes, and {server.terms.threshold} must answer"
            )
        self._model = message.content.array_records[wire.ARRAYS][wire.MODEL].data
        if not self._delivered:
            try:
                self._adverts = server.advertised(
                    dict(self._answers("advertise", {client: {} for client in self._clients}))
                )
                self._share(advert["client"] for advert in self._adverts)
            except VoidRound as error:
                raise RunError(
                    f"{error}. No node has been charged; the same command, without --fresh, "
                    "resumes the run"
                ) from error
        digest, file = protocol.sha256(self._model), self._grid.file
        self._ask(digest)
        if file is not None and self._kept is None:
            self._kept = OpenAttempt(
                key=file.key.hex(),
                round=self.round,
                plan=self._plan,
                model=digest,
                nonce=self._nonce,
                clients=self._clients,
                lost=self.lost | server.lost,
                adverts={advert["client"]: advert for advert in self._adverts},
                shared={client: self._shares[client] for client in self._delivered},
            )
            file.write(self._kept)
        fixed = self._kept is not None and bool(self._kept.sent)
        self._grid.charge()
        named = server.sharing_field()
        given: dict[int, Any] = {
            client: {"sealed": texts(sealed), **named} for client, sealed in self._delivered.items()
        }
        try:
            following = self._following()
            for part in self._trip("mask", given, following) if not fixed else ():
                assert part.answer is not None
                words = frames.vector(part.body, WORDS).astype(np.uint32)
                server.add(part.client, words, str(part.answer.get("sent")))
            answered = server.answered()
            if file is not None and self._kept is not None and not fixed:
                sent, masked = server.summed
                file.write(self._kept.model_copy(update={"sent": sent, "total": masked}))
            signed = server.sent() or self._agree(answered)
            further = (
                following
                if following and answered == self._clients and following.complete()
                else None
            )
            given = {client: {"signatures": texts(signed)} for client in signed}
            revealed = self._answers("unmask", given, further)
            total = server.total(
                {client: _texts_by_client(said.get("shares")) for client, said in revealed}
            )
            if further:
                with suppress(VoidRound):
                    further._take_shares(further._early.items())
                    self.next = further
        except VoidRound:
            raise
        except RunError as error:
            raise VoidRound(str(error)) from error
        finally:
            self.lost |= server.lost
        self.answered = answered
        return total

    def _agree(self, answered: list[int]) -> dict[int, str]:
        """Ask the survivors to sign their set, and return the valid signatures by client."""
        said = self._answers("agree", {client: {"answered": answered} for client in answered})
        return self.server.signed({client: str(answer.get("signature")) for client, answer in said})

    def _share(self, clients: Iterable[int]) -> None:
        """Ask these clients to share their secrets."""
        self._take_shares(
            self._answers("share", {client: {"adverts": self._adverts} for client in clients})
        )

    def _take_shares(self, answers: Iterable[tuple[int, Any]]) -> None:
        self._shares = {
            client: (_texts_by_client(said.get("sealed")), str(said.get("commitment")))
            for client, said in answers
        }
        self._delivered = self.server.shared(self._shares)
        self._shared_at = time.monotonic()

    def _following(self) -> _Attempt | None:
        """The next round's attempt, which this round can prepare. None if this is the last round, a
        node is missing, the questions would be too long, or the attempt's question cannot be
        signed.
        """
        if self.round >= self._rounds or list(self._delivered) != self._clients:
            return None
        # The shortest header is measured. Headers differ in the position of a node's ledger, and a
        # hostile node may state a very long position.
        header = min(len(json.dumps(fields)) for fields in self._headers.values())
        if header + _NODE_BYTES * len(self._clients) + _OTHER_BYTES > frames.HEADER_BYTES:
            return None  # a refusal of the size would void this round
        # the signer may refuse to sign this plan for the next round; this round continues
        with suppress(RunError):
            return _Attempt(self._grid, self.round + 1, self._plan, self._clients)
        return None

    def complete(self) -> bool:
        """Whether all clients have given the adverts for which they were asked ahead of the round."""
        with suppress(VoidRound):
            self._adverts = self.server.advertised(self._early)
        return len(self._adverts) == len(self._clients)

    def _answers(
        self, step: str, given: Mapping[int, Any], further: _Attempt | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Ask a step whose answers hold no numbers, and yield (client, answer). The arguments are
        those of `_trip`.
        """
        for part in self._trip(step, given, further):
            assert part.answer is not None
            yield part.client, part.answer["said"]

    def _take(self, step: str, client: int, header: Any) -> None:
        """Store a node's answer to a step that was asked ahead of its round, if the answer is
        valid.
        """
        if not isinstance(header, dict) or header.get("ok") is not True:
            return
        if not self._grid.answers.step_problem(step, self._questions[client], header, b""):
            self._early[client] = header["said"]

    def _ahead(self, client: int) -> dict[str, Any]:
        """Header fields of a step that is asked ahead of its round, without the fields that are the
        same in the question that carries them.
        """
        given = {"adverts": self._adverts} if self._adverts else {}
        header = self._headers[client]
        return {
            "round": self.round, "nonce": self._nonce, "model": NO_MODEL, "given": given,
            "expect": header.get("expect"), "signature": header.get("signature", ""),
        }  # fmt: skip

    def _trip(
        self, step: str, given: Mapping[int, Any], further: _Attempt | None = None
    ) -> list[Asked]:
        """Put the question of one step to these clients, wait, and return the entries of those that
        answered.

        If `further` is given, the same messages ask every node for a step of that attempt, which
        stores the answers.

        Raises:
            RunError: fewer clients than the threshold answered.
        """
        grid, asked = self._grid, []
        for client, part in given.items():
            question, header = (
                self._questions[client],
                self._headers[client] | {"ask": step, "given": part},
            )
            body = self._model if step == "mask" else b""
            if not body:
                header["model"] = question.model
            if further:
                header["ahead"] = further._ahead(client)
            check = grid.answers.problem if body else partial(grid.answers.step_problem, step)
            asked.append(
                Asked(self._message, question, header, body, partial(check, question), step)
            )
        threshold = self.server.terms.threshold
        try:
            self.late += grid.polling.wait(
                asked, time.monotonic(), threshold, "distributed.threshold"
            )
        finally:
            self.lost |= {entry.client: entry.lost for entry in asked if entry.lost}
            self._count(entry.accused for entry in asked)
        answered = [entry for entry in asked if entry.answer is not None]
        if further:
            further._early = {}
            for entry in answered:
                further._take(AHEAD[step], entry.client, (entry.answer or {}).get("ahead"))
        return answered

    def _count(self, accused: Iterable[int | None]) -> None:
        """Mark each node as guilty that more neighbours accuse than can be colluders."""
        for client, count in Counter(accused).items():
            if client in self._questions and count > self.server.crowd:
                self.guilty[client] = (
                    f"the shares that it sealed for {count} nodes are not authentic"
                )


def _texts_by_client(raw: Any) -> dict[int, str]:
    """Texts by client number from a node's answer; empty if the answer is malformed."""
    try:
        return {int(client): str(text) for client, text in raw.items()}
    except (AttributeError, ValueError):
        return {}
