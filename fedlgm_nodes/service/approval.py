"""The approval of new work: a digest of what a question asks for, and whether this work may run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.protocol.messages import canonical, digest, public_key, sha256, verify
from fedlgm_nodes.service.accounting_process import AccountingProcess
from fedlgm_nodes.service.record import Record
from fedlgm_nodes.service.request import Request
from fedlgm_nodes.service.row import Row

# largest number of waiting requests that are kept, because strangers may send requests
_MOST_WAITING = 100
_STATES = {
    "waits": "waits for this node's operator; ask again after the approval",
    "denied": "was denied by this node's operator",
    "expired": "was approved until a date that has passed; it needs another approval",
    "used up": "has used up the epsilon of its approval; it needs another approval",
}


class Approval:
    """The check before each new release, and the record of releases that passed it.

    Args:
        policy: the node's policy.
        record: the node's record.
        account: the node's account, in its process.
        people: returns a keyed digest of the people who count at other nodes; empty if the policy
            does not list them.
    """

    def __init__(
        self, policy: Policy, record: Record, account: AccountingProcess, people: Callable[[], str]
    ) -> None:
        self._policy, self._record, self._account = policy, record, account
        self._people = people

    def work(self, request: Request) -> dict[str, Any]:
        """The content of a work; any other content has another digest.

        The model's numbers, the round, the run's label, and the spread of bounds and noise over the
        layers are not part of it. They change from round to round, and the cost of a release does
        not depend on them.
        """
        plan = json.loads(request.plan.to_json())
        layers = request.plan.layers
        return {
            "asked_by": self._policy.ask.server_key,
            "data": self._policy.data.model_dump(
                mode="json", include={"name", "labels", "features", "shape", "classes"}
            ),
            "unit": self._policy.privacy.unit,
            "work": request.work.values(),
            "layers": dict(zip(layers.names, map(int, layers.sizes), strict=True)),
            "facts": plan["facts"],
            "family": plan["family"],
            "bounded_by": plan["bounded_by"],
            "queries": [noisy.query.name for noisy in request.plan.queries],
            "event": self._account.event(request),
        } | ({"people": people} if (people := self._people()) else {})

    def check(self, request: Request, *, charged: bool = False) -> None:
        """Let a question pass if its work is approved and the node is not paused.

        Args:
            request: the question's content.
            charged: whether the release may have been charged before. An approval whose epsilon is
                used up still covers such a release. The charge itself checks again.

        Raises:
            Refusal: the node is paused, or the work waits, was denied, or its approval has ended.
        """
        record = self._record
        record.refresh()
        if record.paused is not None:
            raise Refusal("paused", "this node's operator has paused it; ask again later")
        if self._policy.ask.approval == "policy":
            return
        work = self.work(request)
        name = work_digest(work)
        state = record.state(name)
        if state == "approved" or (charged and state == "used up"):
            return
        if name not in record.requests:
            waiting = [name for name in record.requests if record.state(name) == "waits"]
            if len(waiting) >= _MOST_WAITING:
                raise Refusal("approval", f"{len(waiting)} other requests wait for an approval")
            cost = self._account.cost(request)
            record.append("request", **{**work, "content": work["work"], "work": name}, cost=cost)
        raise Refusal("approval", f"the work {name[:16]} {_STATES[state]}")

    def record_release(self, request: Request, row: Row, question: str, signature: str) -> None:
        """Record a charged release, once.

        Args:
            request: the question's content.
            row: its row in the ledger.
            question: digest of the question.
            signature: the server's signature of this digest; empty if none is required.
        """
        if self._record.recorded(row.seq):
            return
        work = self.work(request)
        content = request.work
        self._record.append(
            "release", release=row.seq, ledger_head=row.head, work=work_digest(work),
            model=content.model, task=content.task, mechanism=content.mechanism,
            layers=work["layers"], plan=sha256(request.text.encode()), run=row.run,
            round=row.round, trust=row.trust, event=json.loads(row.event), protects=row.protects,
            asked_by=self._signer_of(question, signature), question=question, signature=signature,
        )  # fmt: skip

    def _signer_of(self, question: str, signature: str) -> str:
        """The server's key that signed a question; empty if none is required."""
        for key in self._policy.ask.server_keys:
            if verify(public_key(key), signature, "question", question):
                return key
        return ""


def work_digest(work: dict[str, Any]) -> str:
    """Digest of a work, 64 hexadecimal digits."""
    return digest("fedlgm work", canonical(work))
