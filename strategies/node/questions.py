"""What the nodes of a deployment are asked in one run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.node_protocol import Position, Question
from strategies.node.enrolment import EnrolledNode


@dataclass(frozen=True)
class NodeQuestions:
    """What one run asks of every node in every round.

    Attributes:
        run: label of the run.
        work: what nodes are asked to do, by names that are installed there; see `Question`.
        signer: the server's key; nodes whose policy names it answer no other server.
    """

    run: str
    work: Mapping[str, Any]
    signer: Ed25519PrivateKey | None = None

    def question(
        self, node: EnrolledNode, round: int, plan: str, model: str, position: Position | None = None
    ) -> Question:
        """A question unlike any other.

        Args:
            node: whom it is for.
            round: number, from 1.
            plan: JSON text of the round's plan.
            model: SHA-256 of the global model.
            position: of the node's ledger, as its service has signed it last.
        """
        expect = None if position is None else position.values()
        return Question(
            self.run, round, node.client, plan, model, self.work, secrets.token_hex(16), node.service_key, expect
        )

    def header(self, question: Question) -> dict[str, Any]:
        """The question as it travels, signed if there is a `signer`."""
        return question.header(self.signer)
