"""The release service: answers questions about the node's data, by policy and on account; `listener` has the process.

    parse -> policy -> price -> trial -> charge, on disk -> train, bound, noise -> keep the answer -> send it

One release at a time. Whoever connects is believed nothing: not the run, not the round, not who asks; the kernel's word
for the user is the only fact. There is no question that is answered with figures that were not noised, but for the
bounded update of central trust, where the policy allows it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from clients.node import data as node_data
from clients.node.folder import NodeFolder
from clients.node.ledger import Row
from clients.node.policy import Refusal
from clients.node.release import Releaser, Request
from fedlgm import node_protocol as protocol
from fedlgm import privacy
from fedlgm.errors import LedgerError
from fedlgm.files import write_durably
from fedlgm.node_protocol import FrameError, Position, Question

_log = logging.getLogger("fedlgm.node")
EXAMPLES = ", examples"  # after a row's trust: the release protects single examples, not all of the node's data


class Ask(BaseModel):
    """Header of a question, as it may arrive from anybody."""

    model_config = ConfigDict(extra="forbid", strict=True)
    protocol: int
    ask: str
    nonce: str = Field(default="", pattern="^[0-9a-f]{0,64}$")
    run: str = Field(default="", max_length=200)
    round: int = Field(default=0, ge=0, lt=2**31)
    client: int = Field(default=-1, ge=-1, lt=2**31)
    plan: str = ""
    work: dict[str, Any] = {}
    expect: dict[str, Any] | None = None
    signature: str = Field(default="", pattern="^[0-9a-f]{0,128}$")


@dataclass
class Answer:
    """What goes back: a header, and the released numbers."""

    header: dict[str, Any]
    body: bytes = b""


class Service:
    """The service of one node's folder.

    Args:
        folder: the node's folder.

    Raises:
        FedlgmError: policy, keys, data or ledger cannot be used; nothing has been changed.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self.folder, self.policy = folder, folder.policy()
        self._signer = folder.signer()
        self._ledger = folder.ledger()
        try:
            seed = folder.test_seed()
            if (seed is not None) != self._ledger.test:
                raise LedgerError("a ledger of private releases cannot be used in a test, nor one of tests afterwards")
            if self.policy.privacy.unit == "client" and any(
                row.trust.endswith(EXAMPLES) for row in self._ledger.rows()
            ):
                raise LedgerError(
                    "this ledger holds releases that protect single examples, so its epsilon cannot be one for all "
                    "of the data: privacy.unit stays 'example' for this data set"
                )
            data = node_data.read(self.policy.data, folder.path)
            self._examples = len(data)
            self._releaser = Releaser(self.policy, data, node_data.digest(data), folder.secret(), seed)
        except BaseException:
            self._ledger.close()
            raise
        self._server_key = protocol.public_key(self.policy.ask.server_key) if self.policy.ask.server_key else None
        self._failed: str | None = None

    def warm(self) -> None:
        """Load what the first release needs, which takes seconds, and throw its result away."""
        self._ledger.epsilon(self.policy.privacy.delta, privacy.events.gaussian_event(1.0))
        self._releaser.warm()

    # -- questions -----------------------------------------------------------------------------------------------------

    def hello(self, ask: Ask) -> Answer:
        """Who this node is and what is left.

        Raises:
            Refusal: what was released costs more than can be said.
        """
        budget, ask_limits = self.policy.privacy, self.policy.ask
        spent = self._ledger.epsilon(budget.delta)
        if not math.isfinite(spent):  # JSON has no word for it
            raise Refusal("budget-spent", f"what was released has no finite epsilon at delta {budget.delta:g}")
        header = {
            "ok": True, "protocol": protocol.PROTOCOL, "name": self.policy.node.name,
            "client": self.policy.node.client, "population": self.policy.node.population,
            "service_key": protocol.public_text(self._signer), "test": self._ledger.test,
            "unit": budget.unit, "trust": list(budget.trust),
            "releases_left": max(0, ask_limits.releases - self._ledger.count()),
            "epsilon": budget.epsilon, "delta": budget.delta, "epsilon_spent": spent,
            "position": self._position().values(),
        }  # fmt: skip
        facts = protocol.canonical(header)
        return Answer(header | {"signature": protocol.sign(self._signer, "hello", ask.nonce, facts)})

    def admit(self, ask: Ask, body: bytes) -> tuple[Request, str]:
        """The request of a question and the question's digest; nothing is charged yet.

        Raises:
            Refusal: the question is malformed, not allowed, or not the server's.
        """
        node, limits = self.policy.node, self.policy.ask
        if ask.round < 1:
            raise Refusal("malformed", "rounds are numbered from 1")
        if ask.client != node.client:
            raise Refusal("client", f"this node is client {node.client}: it does not answer for {ask.client}")
        service = protocol.public_text(self._signer)
        question = Question(
            ask.run, ask.round, ask.client, ask.plan, protocol.sha256(body), ask.work, ask.nonce, service, ask.expect
        ).digest
        if self._server_key and not protocol.verify(self._server_key, ask.signature, "question", question):
            raise Refusal("unsigned", "this node answers its enrolled server only, which has not signed this question")
        if limits.runs and ask.run not in limits.runs:
            raise Refusal(
                "run", f"the run {protocol.printable(ask.run, 80)!r} is not among those that this node takes part in"
            )
        self._check_expectation(ask.expect)
        try:
            model = protocol.vector(body, ("<f4",))
        except FrameError as error:
            raise Refusal("model", str(error)) from error
        return self._releaser.understand(ask.round, ask.plan, ask.work, model), question

    def release(self, ask: Ask, request: Request, question: str) -> Answer:
        """Charge, make, keep and sign one release; the same question again gives the kept answer.

        Raises:
            Refusal: the budget is spent, a cap is reached, nothing can be trained, the question was answered by another
                release, or the answer has left already and is no longer kept.
        """
        name = self._releaser.name(request, ask.run)
        row = self._ledger.find(name)
        replayed = row is not None
        if self._server_key and self._ledger.asked(question) not in (None, name):
            # Else whoever recorded it could have it charged again after every change of the data or of this software.
            raise Refusal("replayed", "this very question was answered by another release: ask anew")
        if row is None:
            self._afford(ask, request)
            self._releaser.prepare(request)
            row = self._ledger.charge(
                name, request.event, trust=request.plan.facts.trust + EXAMPLES * (request.unit == "example"),
                run=ask.run, round=ask.round, data=self._releaser.data_digest,
                question=question if self._server_key else "",
            )  # fmt: skip
        elif self._server_key:
            self._ledger.remember(question, name)
        body = self._kept(row)
        if body is None:
            body = protocol.npy(self._releaser.make(request, name))
            digest = self._keep(row, body)
        else:
            digest = protocol.sha256(body)
        _log.info(
            "round %d of run %r: %s release %d, epsilon %.4g of %g spent",
            ask.round, protocol.printable(ask.run, 80), "again" if replayed else "new", row.seq,
            self._ledger.epsilon(self.policy.privacy.delta), self.policy.privacy.epsilon,
        )  # fmt: skip
        position = self._position()
        header = {
            "ok": True, "protocol": protocol.PROTOCOL, "client": self.policy.node.client, "question": question,
            "seq": row.seq, "replayed": replayed, "test": self._ledger.test, "position": position.values(),
        }  # fmt: skip
        signed = protocol.answer_fields(question, self.policy.node.client, row.seq, digest, position)
        return Answer(header | {"signature": protocol.sign(self._signer, *signed)}, body)

    def _afford(self, ask: Ask, request: Request) -> None:
        limits, budget, ledger = self.policy.ask, self.policy.privacy, self._ledger
        today = datetime.now(UTC).date().isoformat()
        for count, most, per in (
            (ledger.count(), limits.releases, "over its data set's life"),
            (ledger.count(run=ask.run), limits.releases_per_run, "per run"),
            (ledger.count(since=today), limits.releases_per_day, "per day"),
        ):
            if count >= most:
                raise Refusal("budget-spent", f"this node makes {most} releases {per}, and has made them")
        self._check_separation(ask, request)
        alone = request.least_epsilon(budget.delta)
        if not alone <= budget.epsilon * (1 + 1e-6):  # composing such losses takes time and memory in proportion
            raise Refusal(
                "budget-spent",
                f"this release alone has an epsilon of {alone:.4g} or more; the policy of this node allows "
                f"{budget.epsilon:g} at delta {budget.delta:g} over its data set's life",
            )
        after = ledger.epsilon(budget.delta, request.event)
        if not after <= budget.epsilon * (1 + 1e-6):
            raise Refusal(
                "budget-spent",
                f"the release would bring this node's epsilon to {after:.4g}; its policy allows {budget.epsilon:g} at "
                f"delta {budget.delta:g} over its data set's life",
            )

    def _check_separation(self, ask: Ask, request: Request) -> None:
        """Refuse a round nearer to an answered one of its run than policy or plan allow.

        Where noise is correlated over rounds, a participation too soon costs more than the plan says.
        """
        apart = max(self.policy.ask.min_separation, request.plan.facts.sampling.separation or 1)
        near = self._ledger.nearest(ask.run, ask.round) if apart > 1 else None
        if near is not None and abs(ask.round - near) < apart:
            raise Refusal(
                "separation",
                f"round {ask.round} is {abs(ask.round - near)} rounds from round {near} of its run, in which this node "
                f"took part; at least {apart} must lie between",
            )

    def _check_expectation(self, raw: dict[str, Any] | None) -> None:
        """Refuse to go on with a ledger that is older than one this service has signed for."""
        if raw is None:
            return
        expected = Position.of(raw)
        if expected is None or not expected.valid(self._signer.public_key()):
            raise Refusal("expect", "the expected position of the ledger was not signed by this service")
        if expected.ledger != self._ledger.identity or self._ledger.head_at(expected.seq) != expected.head:
            self._failed = "its ledger was rolled back: this service has signed for a later one"
            self._ledger.rolled_back(expected)
            _log.error("REFUSING EVERYTHING: %s", self._failed)
            raise Refusal("rolled-back", self._failed)

    def _position(self) -> Position:
        return Position.signed(self._ledger.identity, self._ledger.seq, self._ledger.head, self._signer)

    def _kept(self, row: Row) -> bytes | None:
        """The answer that release `row` left with; None if nothing can have left and it must be made."""
        digest = self._ledger.answered(row.seq)
        if digest is None:
            return None
        with contextlib.suppress(OSError):
            body = self._reply_file(row).read_bytes()
            if protocol.sha256(body) == digest:
                return body
        # Made again it could differ in a last bit, with the same noise.
        raise Refusal("gone", f"release {row.seq} was answered before, and its answer is no longer kept")

    def _keep(self, row: Row, body: bytes) -> str:
        """Keep an answer, which may leave only when the ledger says so, on disk; returns its digest."""
        digest = protocol.sha256(body)
        kept = self.policy.limits.kept_replies
        if kept:
            write_durably(self._reply_file(row), body)  # the ledger may not say that it left and the disk have lost it
        self._ledger.answer(row.seq, digest)
        for old in sorted(self.folder.replies.glob("*.npy"))[: -kept or None]:
            if not kept or old != self._reply_file(row):  # a release that was charged before a crash is an old one
                old.unlink(missing_ok=True)
        return digest

    def _reply_file(self, row: Row) -> Path:
        return self.folder.replies / f"{row.seq:09d}.npy"

    # -- all of them ---------------------------------------------------------------------------------------------------

    def answer(self, ask: Ask, body: bytes) -> Answer:
        """Answer one question; the caller sees to it that there is only one at a time.

        Raises:
            Refusal: what becomes of it instead.
        """
        if self._failed is not None:  # perhaps by the question before this one
            raise Refusal("rolled-back", self._failed)
        if ask.ask not in ("hello", "release"):
            raise Refusal("malformed", "a service is asked for hello or release; there is nothing else")
        if ask.ask == "hello":
            return self.hello(ask)
        try:
            return self.release(ask, *self.admit(ask, body))
        except LedgerError as error:
            self._failed = "its ledger cannot be used; its operator's log says why"
            _log.error("REFUSING EVERYTHING: %s", error)
            raise Refusal("ledger", self._failed) from error

    def describe(self) -> None:
        """Write into the log who is served from here, and what is spent."""
        node, budget = self.policy.node, self.policy.privacy
        _log.info(
            "client %d of %d, %d examples, epsilon %.4g of %g spent, listening on %s", node.client, node.population,
            self._examples, self._ledger.epsilon(budget.delta), budget.epsilon, self.folder.socket,
        )  # fmt: skip
        if self._ledger.test:
            _log.warning("TEST: the noise of this node is known to whoever knows its seed. NOT PRIVATE.")

    def close(self) -> None:
        """Let go of the ledger."""
        self._ledger.close()
