"""Checks of an answer's signature, its question, the bounds of the plan, and the position of the
node's ledger.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlgm.errors import PrivacyError, RunError
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Position, Question, record_of
from fedlgm_nodes.server.enrolment import Enrolment
from fedlgm_nodes.server.ledger_positions import LedgerPositions
from fedlgm_nodes.server.round import Problem
from strategies.replies import check_bounds

_UNSIGNED = Problem(
    "its answer was not signed by its enrolled service, or it answers another question"
)


class AnswerCheck:
    """Checks answers against the enrolment, the plan and each node's last ledger position.

    Args:
        enrolment: mapping of nodes to clients.
        layers: the mechanism's view of the model's layers.
        positions: JSON file with each node's ledger position. All runs use the same file, so that
            nodes with restored ledgers are detected. None if positions are kept only in this
            object.
        test: whether to accept only the answers of nodes made for tests, whose noise is known. If
            false, only the answers of other nodes are accepted.

    Raises:
        RunError: the file of positions is damaged.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        layers: LayerTable,
        *,
        positions: Path | None = None,
        test: bool = False,
    ) -> None:
        self._layers, self._test = layers, test
        self._keys = {node.client: protocol.public_key(node.service_key) for node in enrolment.node}
        self._positions = LedgerPositions(positions, self._keys)

    def position(self, client: int) -> Position | None:
        """The client's last signed ledger position; None if it has never answered."""
        return self._positions.get(client)

    def plan(self, question: Question) -> ReleasePlan:
        """The parsed plan of a question."""
        return ReleasePlan.from_json(self._layers, question.plan)

    def step_problem(
        self, step: str, question: Question, header: dict[str, Any], body: bytes
    ) -> Problem | None:
        """The problem of an answer to a step of a secure sum whose answers hold no numbers; None if
        the answer counts.
        """
        signature = str(header.pop("signature", ""))
        signed = protocol.verify(
            self._keys[question.client], signature, step, protocol.canonical(header)
        )
        if (
            not signed
            or header.get("question") != question.digest
            or not isinstance(header.get("said"), dict)
        ):
            return _UNSIGNED
        return None

    def problem(self, question: Question, header: dict[str, Any], body: bytes) -> Problem | None:
        """The problem of an answer with numbers; None if the answer counts. The ledger position is
        stored if it has no problem.

        Args:
            question: the question.
            header: header of the answer.
            body: its numbers.
        """
        key, seq, position = (
            self._keys[question.client],
            header.get("seq"),
            record_of(Position, header.get("position")),
        )
        if not body or type(seq) is not int or position is None:
            return Problem("its answer is incomplete")
        signature = str(header.get("signature"))
        fields = protocol.answer_fields(
            question.digest, question.client, seq, protocol.sha256(body), position
        )
        if not protocol.verify(key, signature, *fields):
            return _UNSIGNED
        if not position.valid(key):
            return Problem(
                "its ledger's position was not signed by its enrolled service", lasting=True
            )
        if position.seq < seq:
            why = (
                f"its ledger is older than its answer: it has {position.seq} releases, "
                f"but the answer is release {seq}"
            )
            return Problem(why, lasting=True)
        if position.test != self._test:
            why = (
                "it is a node for tests: its noise is known"
                if position.test
                else "it is not a node for tests"
            )
            return Problem(why)
        plan = self.plan(question)
        try:
            values = frames.vector(body, plan.facts.noised_by.numbers)
        except RunError as error:
            return Problem(f"its answer cannot be read: {error}")
        if values.shape != (plan.size,):
            return Problem(
                f"its answer has {values.size} numbers, but the plan releases {plan.size}"
            )
        if why := self._positions.problem(question.client, position):
            return Problem(why, lasting=True)
        self._positions.put(question.client, position)
        try:
            check_bounds(values, plan)
        except PrivacyError as error:
            return Problem(f"its answer was rejected: {error}")
        return None
