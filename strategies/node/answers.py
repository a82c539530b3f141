"""Whose answer counts: it is signed by the enrolled service, is of this question, and its ledger goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlgm import node_protocol as protocol
from fedlgm.errors import RunError
from fedlgm.layers import LayerTable
from fedlgm.node_protocol import Position, Question
from fedlgm.plan import ReleasePlan
from strategies.node.enrolment import Enrolment
from strategies.node.ledger_positions import LedgerPositions

KINDS = ("<f4", "<f8")
"""Types that the numbers of an answer may have."""


class AnswerCheck:
    """Checks answers against the enrolment and what each node's ledger was before.

    Args:
        enrolment: which node is which client.
        layers: the mechanism's view of the model's layers.
        positions: JSON file of how far each node's ledger was; kept over runs, it shows nodes that were restored.
        test: accept answers of nodes made for tests, whose noise is known; refuse all others.

    Raises:
        RunError: the file of positions is damaged.
    """

    def __init__(
        self, enrolment: Enrolment, layers: LayerTable, *, positions: Path | None = None, test: bool = False
    ) -> None:
        self._layers, self._test = layers, test
        self._keys = {node.client: protocol.public_key(node.service_key) for node in enrolment.node}
        self._positions = LedgerPositions(positions, self._keys)

    def position(self, client: int) -> Position | None:
        """How far the client's ledger was when its service last signed; None if it has never answered."""
        return self._positions.get(client)

    def problem(self, question: Question, header: dict[str, Any], body: bytes) -> str:
        """Why an answer does not count; empty if it does, and its ledger's position is then remembered.

        Args:
            question: what was asked.
            header: of the answer.
            body: its numbers.
        """
        key, seq, position = self._keys[question.client], header.get("seq"), Position.of(header.get("position"))
        if not body or type(seq) is not int or position is None:
            return "its answer is incomplete"
        signature = str(header.get("signature"))
        fields = protocol.answer_fields(question.digest, question.client, seq, protocol.sha256(body), position)
        if not protocol.verify(key, signature, *fields):
            return "its answer was not signed by its enrolled service, or answers another question"
        if not position.valid(key):
            return "its ledger's position was not signed by its enrolled service"
        if position.seq < seq:
            return f"its ledger is older than its answer: {position.seq} releases, the answer is release {seq}"
        if position.test != self._test:
            return "it is a node for tests: its noise is known" if position.test else "it is no node for tests"
        try:
            values = protocol.vector(body, KINDS)
        except RunError as error:
            return f"its answer cannot be read: {error}"
        expected = ReleasePlan.from_json(self._layers, question.plan).size
        if values.shape != (expected,):
            return f"its answer has {values.size} numbers where the plan releases {expected}"
        problem = self._positions.problem(question.client, position)
        if not problem:
            self._positions.put(question.client, position)
        return problem
