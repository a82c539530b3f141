"""The release service, which answers questions about the node's data as far as the policy permits,
and charges every release to the ledger.

    admit -> understand -> price -> trial -> charge, on disk -> train, bound, noise -> keep the answer
    -> send it

A release in a secure sum takes five steps (`fedlgm_nodes.secagg.steps`), which pass the same
checks. Only "mask" reads data and is charged.

The service makes one release at a time. `listener` runs the service. About the sender of a
question, the service trusts only the user that the kernel reports and the server's signature, and
not what the sending process claims. No answer holds numbers without noise, except for bounded
updates under central trust, if the policy permits it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm.errors import LedgerError, RunError
from fedlgm.files import write_durably
from fedlgm.privacy.guarantee import at_nodes
from fedlgm.wire import printable
from fedlgm_nodes.policy import LIVE, Policy, Refusal
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.frames import FrameError
from fedlgm_nodes.protocol.messages import Position, Question
from fedlgm_nodes.secagg.cohort import Terms
from fedlgm_nodes.secagg.steps import AHEAD, STEPS, terms_of
from fedlgm_nodes.service.accounting_process import AccountingProcess
from fedlgm_nodes.service.anchors import AnchorRecord
from fedlgm_nodes.service.approval import Approval
from fedlgm_nodes.service.ask import Answer, Ask
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.request import Request
from fedlgm_nodes.service.row import Row
from fedlgm_nodes.service.secagg.service import SecureSteps
from fedlgm_nodes.service.training_process import TrainingProcess

_log = logging.getLogger("fedlgm.node")


class Service:
    """The release service of one node.

    Args:
        folder: the node's folder.

    Raises:
        FedlgmError: the policy, the keys, the data or the ledger cannot be used. Nothing has been
            charged.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self.folder, self.policy = folder, folder.policy()
        self._signer = folder.signer()
        self._anchors = AnchorRecord(folder.anchors_file, self._signer)
        self._ledger = folder.ledger()
        self._account = AccountingProcess(folder, self.policy, self._ledger)
        self._releaser = TrainingProcess(folder, self.policy, lambda: self._ledger.seq > 0)
        self._secure: SecureSteps | None = None
        try:
            if self.policy.distributed is not None:
                self._secure = SecureSteps(
                    self.policy, self._signer, self._ledger, folder.rounds_file
                )
            seed = folder.test_seed()
            if (seed is not None) != self._ledger.test:
                raise LedgerError(
                    "a ledger of private releases cannot be used in a test, and a ledger of tests "
                    "can be used only in tests"
                )
            secret = folder.secret(self._ledger)
            self._record = folder.record(self._ledger.identity)
            self._enforce(self.policy)
            self._releaser.open(secret, seed)
            folder.note_policy(self._record, self.policy)
            self._reloaded = self._record.policy["seq"]
        except BaseException:
            self.close()
            raise
        self._failed: Refusal | None = None
        self.broken: LedgerError | None = (
            None  # why the ledger cannot be used until it is opened and verified again
        )

    def _enforce(self, policy: Policy) -> None:
        """Apply this policy to all later questions."""
        self._account.close()
        self._account = AccountingProcess(self.folder, policy, self._ledger)
        self._account.epsilon()  # refused if rows protect less than the budget does
        self._approval = Approval(policy, self._record, self._account, self._people)
        self._server_keys = [protocol.public_key(key) for key in policy.ask.server_keys]
        self._releaser.enforce(policy)
        self.policy = policy

    def _follow_operator(self) -> None:
        """Apply the policy that `fedlgm node reload` has recorded, if it is newer than the one in
        use.

        The policy is taken from the record's row, so a file that is being edited is never read.
        """
        self._record.refresh()
        row = self._record.policy
        if row["seq"] != self._reloaded:
            read = Policy.model_validate(row["values"])
            self._enforce(
                self.policy.model_copy(update={name: getattr(read, name) for name in LIVE})
            )
            self._reloaded = row["seq"]
            _log.info("the policy was reloaded: epsilon %g", self.policy.privacy.epsilon)

    @property
    def data_reads(self) -> int:
        """Number of times that the data were read. An answer for which the data must be read again
        takes longer if there are more examples.
        """
        return self._releaser.starts

    # -- questions -----------------------------------------------------------------------------------------------------

    def hello(self, ask: Ask) -> Answer:
        """Answer with signed facts about the node, such as its name, its keys and its remaining
        budget.

        Raises:
            Refusal: the releases so far have no finite epsilon.
        """
        budget, ask_limits = self.policy.privacy, self.policy.ask
        spent = self._account.epsilon()
        if not math.isfinite(spent):  # JSON has no word for it
            raise Refusal(
                "budget-spent", f"what was released has no finite epsilon at delta {budget.delta:g}"
            )
        return self._sign_facts(
            ask,
            {
                "name": self.policy.node.name,
                "client": self.policy.node.client,
                "population": self.policy.node.population,
                "service_key": protocol.public_text(self._signer),
                "test": self._ledger.test,
                "unit": budget.unit,
                "trust": list(budget.trust),
                "releases_left": max(0, ask_limits.releases - self._ledger.count()),
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "epsilon_spent": spent,
                "position": self._position().values(),
            },
        )

    def anchor(self, ask: Ask) -> Answer:
        """Sign the head of a run's releases as a witness. The question's nonce holds the head.

        Raises:
            Refusal: see `AnchorRecord.sign`.
        """
        signed = self._anchors.sign(ask.run, ask.round, ask.nonce)
        return self._sign_facts(ask, {"client": self.policy.node.client, "anchor": signed})

    def admit(self, ask: Ask, body: bytes) -> tuple[Question, np.ndarray | None]:
        """Check who asks, and for which run, before anything is built, computed or charged.

        Returns:
            The question, and the global model [D]. The model is None if the question holds only its
            digest.

        Raises:
            Refusal: the question is malformed, not allowed, or not signed by the enrolled server.
        """
        node, limits = self.policy.node, self.policy.ask
        if ask.round < 1:
            raise Refusal("malformed", "rounds are numbered from 1")
        if ask.client != node.client:
            raise Refusal(
                "client", f"this node is client {node.client}: it does not answer for {ask.client}"
            )
        service, model_digest = (
            protocol.public_text(self._signer),
            ask.model or protocol.sha256(body),
        )
        if ask.model and (ask.trains or body):
            raise Refusal(
                "malformed", "a question names its model's digest or brings the model, not both"
            )
        question = Question(
            ask.run,
            ask.round,
            ask.client,
            ask.plan,
            model_digest,
            ask.work,
            ask.nonce,
            service,
            ask.expect,
            ask.protocol,
        )
        if self._server_keys and not any(
            protocol.verify(key, ask.signature, "question", question.digest)
            for key in self._server_keys
        ):
            raise Refusal(
                "unsigned",
                "this node answers only its enrolled server, which has not signed this question",
            )
        if limits.runs and ask.run not in limits.runs:
            raise Refusal(
                "run",
                f"the run {printable(ask.run, 80)!r} is not one in which this node takes part",
            )
        self._check_expectation(ask.expect)
        try:
            model = None if ask.model else frames.vector(body, ("<f4",))
        except FrameError as error:
            raise Refusal("model", str(error)) from error
        return question, model

    def _respond(self, ask: Ask, body: bytes) -> Answer:
        """Admit a question, build the objects that its work needs, and answer it."""
        question, model = self.admit(ask, body)
        request = self._releaser.understand(ask.round, ask.plan, ask.work, model)
        # these steps end a sum whose vectors have already left the nodes
        if ask.ask not in ("agree", "unmask"):
            self._approval.check(request, charged=ask.trains)
        return (self.step if ask.ask in STEPS else self.release)(ask, request, question)

    def release(self, ask: Ask, request: Request, question: Question) -> Answer:
        """Charge, make, store and sign one release. A repeated question gets the stored answer.

        Raises:
            Refusal: the budget is spent, a cap is reached, nothing can be trained, another release
                has answered the question, or the answer may have been sent before and is no longer
                stored.
        """
        if not request.plan.facts.noised_by.alone:
            raise Refusal(
                "privacy",
                "the plan protects a sum of several nodes: this node does not release its part "
                "separately",
            )
        name, lasting = self._names(request, ask.run)
        row, replayed = self._charge(ask, request, question.digest, name, lasting)
        body = self._earlier_answer(row)
        if body is None:
            body = frames.npy(self._releaser.make(request, name))
            digest = self._keep(row, body)
        else:
            digest = protocol.sha256(body)
        return self._release_answer(ask, question, row, replayed, body, digest)

    def step(self, ask: Ask, request: Request, question: Question) -> Answer:
        """Answer one step of a secure sum. A repeated step gets the same answer.

        Raises:
            Refusal: the cases of `release`, or the step is not allowed (see
                `fedlgm_nodes.service.secagg`).
        """
        if self._secure is None or request.plan.facts.noised_by.alone:
            raise Refusal(
                "privacy", "this node takes part in secure sums only under trust 'distributed'"
            )
        try:
            terms = terms_of(question, request.plan)
        except RunError as error:
            raise Refusal("malformed", str(error)) from error
        if ask.ask == "mask":
            return self._answer_mask(self._secure, ask, request, question, terms)
        header = {
            "ok": True,
            "protocol": protocol.PROTOCOL,
            "client": ask.client,
            "question": question.digest,
            "said": self._secure.answer(ask.ask, terms, ask.given),
            **self._ahead(ask),
        }
        return Answer(
            header | {"signature": protocol.sign(self._signer, ask.ask, protocol.canonical(header))}
        )

    def _ahead(self, ask: Ask) -> dict[str, Any]:
        """The header field with the answer to a step of the next round; empty if no such step was
        requested.

        The further step passes the same checks as any other. If it is refused, the answer for this
        round is the same.
        """
        if ask.ahead is None:
            return {}
        try:
            return {"ahead": self._respond(ask.further(), b"").header}
        except Refusal as refusal:
            return {"ahead": refusal.header}

    def _answer_mask(
        self, secure: SecureSteps, ask: Ask, request: Request, question: Question, terms: Terms
    ) -> Answer:
        """Charge, make and mask this node's vector of a secure sum, and answer with it."""
        charged: list[tuple[Row, bool]] = []

        def name(cohort: str) -> str:
            return self._names(request, ask.run, cohort)[0]

        def charge(cohort: str) -> None:
            named, lasting = self._names(request, ask.run, cohort)
            if self._ledger.release_for(cohort) not in (None, named):
                # Two vectors for one cohort would have the same masks, so the server could compute
                # the difference of the two vectors without masks.
                raise Refusal(
                    "gone", "this node has been charged for another vector of this cohort"
                )
            row, replayed = self._charge(ask, request, question.digest, named, lasting, cohort)
            if self._ledger.answer_digest(row.seq) is not None:
                raise Refusal(
                    "gone",
                    "a vector has left this node in this attempt, and its sessions were restored",
                )
            charged.append((row, replayed))

        body = frames.npy(
            secure.mask(
                terms, ask.given, charge, lambda cohort: self._releaser.words(request, name(cohort))
            )
        )
        row, replayed = (
            charged[0] if charged else (self._ledger.find(name(secure.cohort(terms))), True)
        )
        digest = protocol.sha256(body)
        left = None if row is None else self._ledger.answer_digest(row.seq)
        if row is None or left not in (None, digest):
            # The data or the software has changed since the vector was made, or an older store was
            # restored.
            raise Refusal(
                "gone",
                "another vector has left this node in this attempt: it takes no further part in it",
            )
        if left is None:
            self._ledger.answer(row.seq, digest)
        answer = self._release_answer(ask, question, row, replayed, body, digest)
        answer.header |= {"sent": secure.sent(terms)} | self._ahead(ask)
        return answer

    def _names(self, request: Request, run: str, cohort: str = "") -> tuple[str, str]:
        """The release's name, and its lasting name, which finds an earlier charge of the same
        release with other software. If there is such a charge, the release keeps the name under
        which it was charged.
        """
        name, lasting = self._releaser.names(request, run, cohort)
        return self._ledger.release_for(lasting) or name, lasting

    def _charge(
        self, ask: Ask, request: Request, question: str, name: str, lasting: str, cohort: str = ""
    ) -> tuple[Row, bool]:
        """Charge a release unless it was charged before. Returns its row, which is on disk, and
        whether it was charged before.

        Raises:
            Refusal: see `release`.
        """
        row = self._ledger.find(name)
        replayed = row is not None
        if self._server_keys and self._ledger.release_for(question) not in (None, name):
            # Otherwise anyone who recorded the question could make the node charge it again after a
            # change of the data or of this software.
            raise Refusal("replayed", "another release has answered this question: send a new one")
        if row is None or not self._record.recorded(row.seq):  # a charge before a crash
            self._approval.check(request)
        if row is None:
            price = self._account.price(ask.run, ask.round, request)
            self._releaser.prepare(request)
            row = self._ledger.charge(
                name, price, trust=request.plan.facts.trust,
                protects=at_nodes(request.cost.protects, self.policy.privacy.nodes),
                run=ask.run, round=ask.round, data=request.data,
                only_for=filter(None, (question if self._server_keys else "", cohort, lasting)),
            )  # fmt: skip
        else:
            self._ledger.remember(lasting, name)
            if self._server_keys:
                self._ledger.remember(question, name)
        self._approval.record_release(request, row, question, ask.signature)
        return row, replayed

    def _release_answer(
        self, ask: Ask, question: Question, row: Row, replayed: bool, body: bytes, digest: str
    ) -> Answer:
        """The signed answer that holds a release's numbers."""
        _log.info(
            "round %d of run %r: %s release %d, epsilon %.4g of %g spent",
            ask.round, printable(ask.run, 80), "again" if replayed else "new", row.seq,
            self._account.epsilon(), self.policy.privacy.epsilon,
        )  # fmt: skip
        position = self._position()
        header = {
            "ok": True,
            "protocol": protocol.PROTOCOL,
            "client": self.policy.node.client,
            "question": question.digest,
            "seq": row.seq,
            "replayed": replayed,
            "test": self._ledger.test,
            "position": position.values(),
        }
        signed = protocol.answer_fields(
            question.digest, self.policy.node.client, row.seq, digest, position
        )
        return Answer(header | {"signature": protocol.sign(self._signer, *signed)}, body)

    def _check_expectation(self, raw: dict[str, Any] | None) -> None:
        """Refuse everything from now on if the question brings a position that this service has
        signed and its ledger does not have.
        """
        if raw is None:
            return
        expected = protocol.record_of(Position, raw)
        if expected is None or not expected.valid(self._signer.public_key()):
            raise Refusal(
                "expect", "the expected position of the ledger was not signed by this service"
            )
        if (
            expected.ledger != self._ledger.identity
            or self._ledger.head_at(expected.seq) != expected.head
        ):
            self._failed = Refusal(
                "rolled-back", "its ledger was rolled back: this service has signed for a later one"
            )
            self._ledger.rolled_back(expected)
            self._record.forget(expected.ledger)
            _log.error("REFUSING EVERYTHING: %s", self._failed.why)
            raise self._failed

    def _position(self) -> Position:
        return Position.make(
            self._ledger.identity, self._ledger.seq, self._ledger.head, self._signer
        )

    def _earlier_answer(self, row: Row) -> bytes | None:
        """The stored numbers of the release in `row`; None if they cannot have been sent and must
        be made.
        """
        digest = self._ledger.answer_digest(row.seq)
        if digest is None:
            return None
        with contextlib.suppress(OSError):
            body = self._reply_file(row).read_bytes()
            if protocol.sha256(body) == digest:
                return body
        # If the answer were made again, its last bits could differ although the noise is the same.
        raise Refusal(
            "gone",
            f"release {row.seq} was answered before, and its answer is no longer kept; a run with "
            "another initial model (model.seed) makes a new release",
        )

    def _keep(self, row: Row, body: bytes) -> str:
        """Store an answer on disk, record its digest in the ledger, and return the digest. The
        answer may be sent after that. Stored answers beyond the policy's number are deleted.
        """
        digest = protocol.sha256(body)
        limit = self.policy.limits.kept_replies
        if limit:
            # the answer is written first, so that every answer in the ledger was on disk
            write_durably(self._reply_file(row), body)
        self._ledger.answer(row.seq, digest)
        for old in sorted(self.folder.replies.glob("*.npy"))[: -limit or None]:
            # a release that was charged before a crash can be among the old ones
            if not limit or old != self._reply_file(row):
                old.unlink(missing_ok=True)
        return digest

    def _reply_file(self, row: Row) -> Path:
        return self.folder.replies / f"{row.seq:09d}.npy"

    def afford(self, ask: Ask) -> Answer:
        """Answer how many further releases like the requested one this node's budget and caps
        allow. Nothing is charged.

        The cap on releases per run is applied to the run with the question's label. The question's
        `round` is the number of requested releases. The answer is never larger, so it does not
        reveal how many more the node could make.

        Raises:
            Refusal: this node does not make such releases, or its budget or a cap does not allow
                even one.
        """
        if ask.client != self.policy.node.client:
            raise Refusal(
                "client", f"this node is client {self.policy.node.client}, not {ask.client}"
            )
        request = self._releaser.understand(1, ask.plan, ask.work, None)
        self._approval.check(request)
        self._releaser.prepare(request)
        left = self._account.affordable_releases(ask.run, request, ask.round)
        return self._sign_facts(ask, {"client": ask.client, "releases": left})

    def _sign_facts(self, ask: Ask, facts: dict[str, Any]) -> Answer:
        """An answer without numbers, whose facts are signed for this question."""
        header = {"ok": True, "protocol": protocol.PROTOCOL, **facts}
        signature = protocol.sign(self._signer, ask.ask, ask.nonce, protocol.canonical(header))
        return Answer(header | {"signature": signature})

    # -- all of them ---------------------------------------------------------------------------------------------------

    def answer(self, ask: Ask, body: bytes) -> Answer:
        """Answer one question. The caller must ensure that only one question is answered at a time.

        Raises:
            Refusal: the question is refused.
        """
        if self._failed is not None:  # the previous question may have caused this failure
            raise self._failed
        if ask.ask not in ("hello", "afford", "anchor", "release", *STEPS):
            raise Refusal(
                "malformed",
                "a service answers only hello, afford, anchor, release and the steps of a secure sum",
            )
        if ask.ahead is not None and ask.ask not in AHEAD:
            raise Refusal("malformed", f"no further question can be sent with {ask.ask!r}")
        try:
            self._follow_operator()
            if ask.ask == "hello":
                return self.hello(ask)
            if ask.ask == "anchor":
                return self.anchor(ask)
            try:
                return self.afford(ask) if ask.ask == "afford" else self._respond(ask, body)
            except Refusal as refusal:
                asked_by = "" if refusal.code == "unsigned" else self.policy.ask.server_key
                if self._failed is None:  # otherwise this record may belong to another ledger
                    self._record.refuse(refusal.code, refusal.why, asked_by, printable(ask.run, 80))
                raise
        except LedgerError as error:
            self._failed = Refusal(
                "ledger", "its ledger cannot be used: the service ends, see its log"
            )
            self.broken = error
            _log.error("ENDING, so that the next start opens and verifies the ledger: %s", error)
            raise self._failed from error

    def _people(self) -> str:
        """Keyed digest of the list of people who count at other nodes; empty if there is no list.
        The digest is keyed because the server learns it. Otherwise the server could compare it with
        the digests of lists with and without a person.
        """
        return self._releaser.people and self.folder.keyed_digest(self._releaser.people)

    def describe(self) -> None:
        """Log which node is served, its spent budget and its socket."""
        node, budget = self.policy.node, self.policy.privacy
        _log.info(
            "client %d of %d, %d examples, epsilon %.4g of %g spent, listening on %s",
            node.client,
            node.population,
            self._releaser.examples,
            self._account.epsilon(),
            budget.epsilon,
            self.folder.socket,
        )
        if self._ledger.test:
            _log.warning(
                "TEST: anyone who knows the seed of this node knows its noise. NOT PRIVATE."
            )

    def close(self) -> None:
        """End the training and accounting processes, and close the ledger and the session store of
        secure sums.
        """
        self._releaser.close()
        self._account.close()
        if self._secure is not None:
            self._secure.close()
        self._ledger.close()
