"""The Grid of a deployment, which sends questions to real nodes and accepts valid answers.

`NodeGrid` wraps the Grid that Flower gives a ServerApp. A strategy sees a federation in which every
client has a node that is always connected. In fact nodes connect and disconnect, and every answer
is checked against the enrolment.

* A client is the node whose registered Flower key the enrolment names, whatever the node claims.
* An answer counts only once, and only if the node's release service has signed it as the answer to
  this very question.
* A client without an answer is reported to the strategy as failed, with the reason. It counts as
  zero, and the public denominator is unchanged. Below the quorum a round waits and asks the same
  question again, which costs a node nothing, whereas a void round would waste budget.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm.planning.trust import NUMBERS
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.server.anchors import Anchors
from fedlgm_nodes.server.answers import AnswerCheck
from fedlgm_nodes.server.budgets import Need, affordable_releases, require
from fedlgm_nodes.server.enrolment import Enrolment
from fedlgm_nodes.server.link import NodeLink
from fedlgm_nodes.server.polling import Polling
from fedlgm_nodes.server.questions import NodeQuestions
from fedlgm_nodes.server.round import Asked, Patience, RoundReport, group_by_reason, join_names
from simulations.runs.folder import RunFolder
from strategies.messages import NumberingGrid
from strategies.nodes import OneNodePerClient

_LOST = 1  # code of an error reply, because none of Flower's own codes fits
FIRST_NODE = 2  # client c stands behind node id c + 2 of this grid


class EnrolledNodes(OneNodePerClient):
    """The nodes of a `NodeGrid` as a strategy sees them. There is one node per client, and a node
    that is asked again repeats its answer.
    """

    repeats = True  # a node that is asked again repeats its stored answer


class NodeGrid(NumberingGrid):
    """Grid over the enrolled nodes of a deployment (see the docstring of this module).

    Args:
        runtime: the Grid that Flower gave the ServerApp.
        enrolment: mapping of nodes to clients.
        questions: the run's questions.
        answers: checker of the nodes' answers.
        patience: quorum and waiting times.
        say: called with each line of progress.
        on_round: called with the report of every round.
    """

    def __init__(
        self,
        runtime: Grid,
        enrolment: Enrolment,
        questions: NodeQuestions,
        answers: AnswerCheck,
        *,
        patience: Patience | None = None,
        say: Callable[[str], None] = print,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:
        super().__init__()
        self._runtime, self._enrolment, self.questions, self.answers = (
            runtime,
            enrolment,
            questions,
            answers,
        )
        self._say, self._on_round = say, on_round
        self._link = NodeLink(runtime, enrolment, say)
        self._patience = patience or Patience()
        self.polling = Polling(self._link, enrolment, self._patience, say)

    def set_run(self, run: Any) -> None:
        """Set the run of Flower's Grid."""
        self._runtime.set_run(run)

    @property
    def run(self) -> Any:
        """The SuperLink's run."""
        return self._runtime.run

    def get_node_ids(self) -> list[int]:
        """The ids of one node per enrolled client, whether or not it is connected."""
        return [client + FIRST_NODE for client in self._enrolment.clients]

    def get_nodes(self) -> list[Any]:
        """All registered nodes that are connected, enrolled or not."""
        return self._link.nodes()

    def require(self, need: Need, seconds: float = 60.0) -> None:
        """Ask the nodes whether their budgets suffice for a run, before its first round.

        Raises:
            ConfigError: the budgets do not suffice; nothing has been spent.
        """
        releases = affordable_releases(self._link, self._enrolment, need, seconds)
        for line in require(
            self._enrolment, need, releases, self._patience.answers_needed(len(self._enrolment))
        ):
            self._say(line)

    def anchors(self, folder: RunFolder) -> Anchors:
        """The collector of the nodes' anchors for the run with this folder."""
        return Anchors(self._link, self._enrolment, folder)

    @property
    def services(self) -> dict[int, str]:
        """Client -> public key of its enrolled service."""
        return {node.client: node.service_key for node in self._enrolment.node}

    def question(self, client: int, round: int, plan: str, model: str, nonce: str = "") -> Question:
        """A question to a client's node. It is unique unless a nonce is given.

        Args:
            client: number of the client.
            round: number, from 1.
            plan: JSON text of the round's plan.
            model: SHA-256 of the global model.
            nonce: nonce of an attempt at a secure sum, the same for all of its nodes; drawn if not
                given.
        """
        run, position = self.questions, self.answers.position(client)
        return Question(
            run.run, round, client, plan, model, run.work, nonce or secrets.token_hex(16),
            self._enrolment[client].service_key, None if position is None else position.values(),
            self._link.protocol(client),
        )  # fmt: skip

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Ask the messages' nodes, and return one reply per message, in the order of the messages.
        The reply of a client that does not answer is an error.

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
        client = message.metadata.dst_node_id - FIRST_NODE
        answer: dict[str, Any] = {
            wire.PARTITION: self._enrolment.clients.index(client),  # a strategy knows no gaps
            wire.PARTITIONS: len(self._enrolment),
        }
        return Message(content=RecordDict({wire.CONFIG: ConfigRecord(answer)}), reply_to=message)

    def _round(self, batch: list[Message]) -> list[Message]:
        started = time.monotonic()
        models: dict[int, str] = {}
        asked = [self._part_of(message, models) for message in batch]
        late = self.polling.wait(
            asked, started, self._patience.answers_needed(len(asked)), "federation.quorum"
        )
        answered = [part.client for part in asked if part.answer is not None]
        self._report(
            asked[0].question.round,
            answered,
            {part.client: part.lost for part in asked if part.lost},
            late,
            started,
        )
        return [self._reply(part) for part in asked]

    def _report(
        self,
        round: int,
        answered: Iterable[int],
        lost: Mapping[int, str],
        late: int,
        started: float,
    ) -> None:
        """Report which clients' answers count in a round, and why others count as zero."""
        names = {client: self._enrolment[client].name for client in (*answered, *lost)}
        told = {names[client]: why for client, why in lost.items()}
        for those, why in group_by_reason(told.items()):
            count = "counts" if len(those) == 1 else "count"
            self._say(f"round {round}: {join_names(those)} {count} as zero: {why}")
        if self._on_round is not None:
            self._on_round(
                RoundReport(
                    round,
                    [names[client] for client in answered],
                    told,
                    late,
                    time.monotonic() - started,
                )
            )

    def _part_of(self, message: Message, models: dict[int, str]) -> Asked:
        """Make the question to a node from the strategy's message. During a round, `models` caches
        the hashes of models by the identity of their objects.
        """
        if message.metadata.message_type != MessageType.TRAIN:
            raise RunError(
                f"nodes answer no {message.metadata.message_type!r} questions: nothing raw leaves "
                "them"
            )
        config = message.content.config_records[wire.CONFIG]
        arrays = message.content.array_records[wire.ARRAYS]
        client = message.metadata.dst_node_id - FIRST_NODE
        model = arrays[wire.MODEL].data  # one object for all clients of a round
        if id(model) not in models:
            models[id(model)] = protocol.sha256(model)
        round_, plan = int(config[wire.ROUND]), str(config[wire.PLAN])  # type: ignore[arg-type]
        question = self.question(client, round_, plan, models[id(model)])
        return Asked(
            message,
            question,
            self.questions.header(question),
            model,
            partial(self.answers.problem, question),
        )

    def _reply(self, part: Asked) -> Message:
        if not part.body:
            reason = f"{self._enrolment[part.client].name}: {part.lost}"
            return Message(Error(code=_LOST, reason=reason), reply_to=part.message)
        values = frames.vector(part.body, NUMBERS)
        array = Array(
            dtype=str(values.dtype), shape=values.shape, stype="numpy.ndarray", data=part.body
        )
        metrics = MetricRecord({wire.CLIENT_COUNT: 1, wire.DISCARDED: 0})
        content = RecordDict({wire.ARRAYS: ArrayRecord({wire.SUM: array}), wire.METRICS: metrics})
        return Message(content=content, reply_to=part.message)
