"""The approval of new work, which is identified by a digest of what a question requests."""

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

# largest number of requests that may wait for an approval, because anyone may be able to send
# requests
_MOST_WAITING = 100
_STATES = {
    "waits": "waits for this node's operator; ask again after the approval",
    "denied": "was denied by this node's operator",
    "expired": "was approved until a date that has passed; it needs another approval",
    "used up": "has used up the epsilon of its approval; it needs another approval",
}


class Approval:
    """Checks before each new release that the operator permits it, and records the releases that
    were charged.

    Args:
        policy: the node's policy.
        record: the node's record.
        account: the node's account, in a process of its own.
        people: function that returns a keyed digest of the list of people who count at other nodes;
            empty if there is no list.
    """

    def __init__(
        self, policy: Policy, record: Record, account: AccountingProcess, people: Callable[[], str]
    ) -> None:
        self._policy, self._record, self._account = policy, record, account
        self._people = people

    def work(self, request: Request) -> dict[str, Any]:
        """The facts about a request that the operator approves. Requests with other facts have
        another digest.

        The model's numbers, the round, the run's label, and the distribution of bounds and noise
        over the layers are not included. They may change from round to round, and the cost of a
        release does not depend on them.
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
        """Refuse a question if the node is paused or the question's work is not approved. New work
        is recorded as a request.

        Args:
            request: the parsed question.
            charged: whether the release may have been charged before. An approval whose epsilon is
                used up still covers such a release. The charge itself checks again.

        Raises:
            Refusal: the node is paused, or the work waits for an approval, was denied, or has an
                approval that has ended.
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
        """Record a charged release, unless it has been recorded already.

        Args:
            request: the parsed question.
            row: the release's row in the ledger.
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
        """The server's public key with which a question was signed; empty if the policy requires no
        signature.
        """
        for key in self._policy.ask.server_keys:
            if verify(public_key(key), signature, "question", question):
                return key
        return ""


def work_digest(work: dict[str, Any]) -> str:
    """Digest of the facts that `Approval.work` returns, 64 hexadecimal digits."""
    return digest("fedlgm work", canonical(work))
