"""Three real release services behind a link that misbehaves in every way that matters, and a Grid
over them."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Error, Message, Metadata, RecordDict

from fedlgm import mechanisms, wire
from fedlgm.errors import RunError
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from fedlgm_nodes.protocol.frames import HEADER
from fedlgm_nodes.server.answers import AnswerCheck
from fedlgm_nodes.server.enrolment import Enrolment, key_digest
from fedlgm_nodes.server.node_grid import EnrolledNodes, NodeGrid
from fedlgm_nodes.server.questions import NodeQuestions
from fedlgm_nodes.server.round import Patience, RoundReport
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.relay import forward
from strategies import CohortSampler, LayerwiseFedAvg, Releaser, ServerOptimizer
from strategies.messages import NumberingGrid
from tests.support.nodes import LAYERS, MODEL, WORK, SharedProcess, make_node

CLIENTS = 3
QUICK = Patience(
    quorum=0.6, round_seconds=2.0, offline_seconds=0.5, give_up_seconds=5.0, poll_seconds=0.01
)


def pem() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Link(NumberingGrid):
    """Flower's side: takes messages to the nodes' services and brings their replies, as far as its
    faults allow."""

    def __init__(self, folders: list[NodeFolder], keys: list[bytes]) -> None:
        self.folders, self.keys = dict(enumerate(folders)), list(keys)
        self.offline: set[int] = set()
        self.node_of = {100 + client: client for client in self.folders}
        self.fault: Callable[[int, Message, RecordDict], RecordDict | Error | None] = (
            lambda client, message, reply: reply
        )
        self.sent: list[tuple[int, Message]] = []
        self.behind: dict[
            int, list[Message]
        ] = {}  # clients whose SuperNode sends a reply after the next message only
        self.work_seconds = 0.0  # that a question takes, and a greeting does not
        self._replies: dict[str, Message] = {}
        self._ready: dict[str, float] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: Any = None,
    ) -> Message:
        number = str(len(self.sent) + len(self._replies) + id(content))
        return Message(
            content=content,
            metadata=Metadata(1, number, 1, dst_node_id, "", group_id, 0.0, 9e9, message_type),
        )

    def get_node_ids(self) -> list[int]:
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(node_id=node, name=f"n{client}", public_key=self.keys[client])
            for node, client in self.node_of.items()
            if client not in self.offline
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            client = self.node_of[message.metadata.dst_node_id]
            self.sent.append((client, message))
            ids.append(message.metadata.message_id)
            try:
                reply: Any = forward(message.content, self.folders[client].socket, 30)
            except RunError as error:
                reply = Error(1, str(error))
            answer = self.fault(client, message, reply) if isinstance(reply, RecordDict) else reply
            ready = [] if answer is None else [Message(answer, reply_to=message)]
            if client in self.behind:
                ready, self.behind[client] = self.behind[client], ready
            self._replies |= {one.metadata.reply_to_message_id: one for one in ready}
            if message.metadata.group_id != "hello":
                self._ready[message.metadata.message_id] = time.monotonic() + self.work_seconds
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        now = time.monotonic()
        done = [one for one in ids if one in self._replies and self._ready.get(one, 0.0) <= now]
        return [self._replies.pop(one) for one in done]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        raise AssertionError("the nodes' Grid polls by itself")


class NodeFederation:
    """Three nodes, their link, and a Grid over them."""

    def __init__(
        self, tmp_path: Path, before: Callable[[], None] | None = None, **policy: Any
    ) -> None:
        self.folders = [
            make_node(tmp_path / f"n{client}", client=client, **policy) for client in range(CLIENTS)
        ]
        self.processes: list[Any] = SharedProcess(self.folders, before).services
        self.keys = [pem() for _ in range(CLIENTS)]
        self.link = Link(self.folders, self.keys)
        self.lines: list[str] = []
        self.reports: list[RoundReport] = []
        self.positions = tmp_path / "positions.json"
        self.ledger = tmp_path / "server.sqlite"

    def enrolment(self) -> Enrolment:
        return Enrolment.model_validate(
            {
                "node": [
                    {
                        "client": client,
                        "name": f"n{client}",
                        "flower_key": key_digest(self.keys[client]),
                        "service_key": self.folders[client].public()["service_key"],
                    }
                    for client in range(CLIENTS)
                ]
            }
        )

    def grid(self, patience: Patience = QUICK) -> NodeGrid:
        enrolment = self.enrolment()
        return NodeGrid(
            self.link, enrolment, NodeQuestions("run", WORK),
            AnswerCheck(enrolment, LAYERS, positions=self.positions),
            patience=patience, say=self.lines.append, on_round=self.reports.append,
        )  # fmt: skip

    def run(
        self,
        rounds: int = 1,
        grid: NodeGrid | None = None,
        trust: str = "local",
        cap: int | None = None,
    ) -> torch.Tensor:
        """The model after some rounds of a real strategy, which asks nobody more than `cap`
        times."""
        facts = RunFacts(4.0, Sampling("poisson", CLIENTS, 1.0), "replace-one", trust, 10)  # type: ignore[arg-type]
        facts = facts if cap is None else replace(facts, max_participations=cap)
        method, keys = (
            Method(mechanisms.get("snr-consistent"), LAYERS, facts),
            KeyRing(1, secret=True),
        )
        with Ledger(self.ledger, "run") as ledger:
            strategy = LayerwiseFedAvg(
                method,
                Transcript.start(MODEL),
                CohortSampler(facts.sampling, keys),
                ServerOptimizer("sgd", 1.0),
                Releaser(keys, ledger),
                EnrolledNodes(quorum=QUICK.quorum),
                continue_ledger=True,
            )
            strategy.start(grid or self.grid(), strategy.initial_arrays(), num_rounds=rounds)
        return strategy.transcript.models[-1]


def altered(content: RecordDict, **header: Any) -> RecordDict:
    said = json.loads(content.config_records[wire.CONFIG][HEADER]) | header
    content = copy.deepcopy(content)
    content.config_records[wire.CONFIG][HEADER] = json.dumps(said)
    return content
