"""Real nodes behind a Flower Grid whose server sees only the sum of a round: each round is one secure sum.

To a strategy the nodes are one worker that returns the sum of a block, as a simulation's worker does: the integers are
the same, so that a round without drops gives the same model bit by bit.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedlgm import node_protocol as protocol
from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm.integer import centred
from fedlgm.node_protocol import Question
from fedlgm.secagg.steps import WORDS, terms_of
from strategies.node.grid import FIRST_NODE, NodeGrid
from strategies.node.round import Asked
from strategies.node.secagg import SecureSum, VoidRound
from strategies.nodes import OneNodePerClient


@dataclass
class EnrolledSum(OneNodePerClient):
    """The nodes of a `SecureGrid`, as a strategy sees them: one worker for all clients of a round.

    A repeated round is another attempt: another release of its nodes, with other noise.
    """

    single = False

    @property
    def repeats(self) -> bool:
        """False."""
        return False

    def addresses(self, blocks: Iterable[np.ndarray]) -> list[tuple[int | None, list[int]]]:
        """One message for all clients."""
        clients = [int(client) for block in blocks for client in block]
        return [(FIRST_NODE, clients)] if clients else []


class SecureGrid(NodeGrid):
    """Grid over the enrolled nodes of a deployment under trust "distributed"; arguments as for `NodeGrid`.

    A node that is lost in a step takes no further part in the round. Below the threshold a step waits, as long as the
    patience allows; then the run ends if nothing has been charged yet, and the round is void otherwise.
    """

    def _round(self, batch: list[Message]) -> list[Message]:
        if len(batch) != 1:
            raise RunError("a round of a secure sum is one message for all of its clients")
        message, started = batch[0], time.monotonic()
        attempt = _Attempt(self, message)
        void = ""
        try:
            total = attempt.total()
        except VoidRound as error:
            void, total = str(error), np.zeros(attempt.server.terms.size, np.uint32)
        answered = attempt.answered if not void else []
        lost = {client: why for client, why in attempt.lost.items() if client not in answered}
        self._report(attempt.round, answered, lost, attempt.late, started)
        if void:
            self._say(f"round {attempt.round} is void and moves nothing: {void}")
        values = centred(total).astype(np.float64)
        metrics = MetricRecord({wire.CLIENT_COUNT: len(answered), wire.DISCARDED: 0})
        arrays = ArrayRecord({wire.SUM: Array(**wire.fields(values))})
        return [Message(RecordDict({wire.ARRAYS: arrays, wire.METRICS: metrics}), reply_to=message)]


class _Attempt:
    """One attempt at one round.

    Attributes:
        round: its number.
        server: the sum.
        answered: clients whose vectors are in it.
        lost: client -> why it takes no further part.
        late: answers to earlier questions that came meanwhile.
    """

    def __init__(self, grid: SecureGrid, message: Message) -> None:
        self._grid, self._message = grid, message
        config = message.content.config_records[wire.CONFIG]
        clients: list[int] = list(config[wire.CLIENTS])  # type: ignore[arg-type]
        self.round = int(config[wire.ROUND])  # type: ignore[arg-type]
        self._model = message.content.array_records[wire.ARRAYS][wire.MODEL].data
        made = partial(grid.question, round=self.round, plan=str(config[wire.PLAN]), nonce=secrets.token_hex(16))
        digest = protocol.sha256(self._model)
        self._questions: dict[int, Question] = {client: made(client, model=digest) for client in clients}
        self._headers = {client: grid.header(question) for client, question in self._questions.items()}
        one = next(iter(self._questions.values()))
        self.server = SecureSum(terms_of(one, grid.answers.plan(one)), grid.services)
        self.lost, self.late, self.answered = dict[int, str](), 0, list[int]()

    def total(self) -> np.ndarray:
        """Sum of the nodes' words, uint32 [size].

        Raises:
            RunError: too few nodes before anything was charged; the run can be resumed.
            VoidRound: too few nodes after that.
        """
        server = self.server
        try:
            adverts = dict(self._said("advertise", {client: {} for client in self._questions}))
            cohort = server.advertised(adverts)
            given = {advert["client"]: {"adverts": cohort} for advert in cohort}
            shared = {client: _shares(said) for client, said in self._said("share", given)}
            delivered = server.shared(shared)
        except VoidRound as error:
            raise RunError(f"{error}. Nothing has been charged; the same command resumes the run") from error
        try:
            for one in self._trip("mask", {client: {"sealed": _texts(sealed)} for client, sealed in delivered.items()}):
                server.add(one.client, protocol.vector(one.body, WORDS).astype(np.uint32))
            answered = server.answered()
            agreed = self._said("agree", {client: {"answered": answered} for client in answered})
            signed = server.signed({client: str(said.get("signature")) for client, said in agreed})
            revealed = self._said("unmask", {client: {"signatures": _texts(signed)} for client in signed})
            total = server.total({client: _numbered(said.get("shares")) for client, said in revealed})
        except VoidRound:
            raise
        except RunError as error:
            raise VoidRound(str(error)) from error
        finally:
            self.lost |= server.lost
        self.answered = answered
        return total

    def _said(self, step: str, given: Mapping[int, dict[str, Any]]) -> Iterator[tuple[int, Any]]:
        for one in self._trip(step, given):
            assert one.answer is not None
            yield one.client, one.answer["said"]

    def _trip(self, step: str, given: Mapping[int, dict[str, Any]]) -> list[Asked]:
        """Ask these clients one step, and wait; those that answered.

        Raises:
            RunError: fewer than the threshold.
        """
        grid, asked = self._grid, []
        for client, part in given.items():
            question, header = self._questions[client], self._headers[client] | {"ask": step, "given": part}
            body = self._model if step == "mask" else b""
            if not body:
                header["model"] = question.model
            check = grid.answers.problem if body else partial(grid.answers.said, step)
            asked.append(Asked(self._message, question, header, body, partial(check, question), step))
        threshold = self.server.terms.threshold
        self.late += grid.polling.wait(asked, time.monotonic(), threshold, "distributed.threshold")
        self.lost |= {one.client: one.lost for one in asked if one.lost}
        return [one for one in asked if one.answer is not None]


def _texts(values: Mapping[int, str]) -> dict[str, str]:
    return {str(client): text for client, text in values.items()}


def _numbered(raw: Any) -> dict[int, str]:
    """Texts by client number from a node's answer; empty if they have another form."""
    try:
        return {int(client): str(text) for client, text in raw.items()}
    except (AttributeError, ValueError):
        return {}


def _shares(said: Any) -> tuple[dict[int, str], str]:
    return (_numbered(said.get("sealed")), str(said.get("commitment"))) if isinstance(said, dict) else ({}, "")
