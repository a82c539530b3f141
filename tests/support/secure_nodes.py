"""Nodes that answer only in secure sums: their services in this process, and a server that asks
them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm import mechanisms, wire
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.frames import HEADER
from fedlgm_nodes.protocol.messages import Question, public_text
from fedlgm_nodes.secagg.steps import STEPS, WORDS, terms_of
from fedlgm_nodes.server.answers import AnswerCheck
from fedlgm_nodes.server.enrolment import Enrolment, key_digest
from fedlgm_nodes.server.open_attempt import AttemptFile
from fedlgm_nodes.server.questions import NodeQuestions
from fedlgm_nodes.server.round import RoundReport
from fedlgm_nodes.server.secagg import SecureSum
from fedlgm_nodes.server.secure_grid import EnrolledSum, SecureGrid
from fedlgm_nodes.service.ask import Ask
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.service import Service
from strategies import CohortSampler, LayerwiseFedAvg, Releaser, ServerOptimizer
from tests.support.node_grids import QUICK, Link, pem
from tests.support.nodes import BODY, LAYERS, MODEL, WORK, make_node, rows
from tests.support.patience import LIMIT_S

NODES, THRESHOLD, COLLUDERS = 5, 4, 1
WHOLE = ("advertise", "share", "mask", "unmask")
"""Steps of a round for which nothing was prepared."""
SHORT = WHOLE[2:]
"""Steps of a prepared round."""


def of_round(number: int, *steps: str) -> list[tuple[int, str]]:
    """Questions of a round, by default one for each step of a whole round."""
    return [(number, step) for step in steps or WHOLE]


def facts(
    multiplier: float = 4.0,
    nodes: int = NODES,
    threshold: int = THRESHOLD,
    colluders: int = COLLUDERS,
    noise: str = "discrete-gaussian",
) -> RunFacts:
    return RunFacts(
        multiplier,
        Sampling("fixed", nodes, 1.0),
        "replace-one",
        "distributed",
        10,
        accountant="rdp",
        shares=Shares(threshold, colluders, noise),
    )


def plan(**options: Any) -> ReleasePlan:
    """A plan for the nodes' model."""
    method = Method(mechanisms.get("snr-consistent"), LAYERS, facts(**options))
    return method.plan(Transcript.start(MODEL))


def make_nodes(
    path: Path, nodes: int = NODES, test_seed: int | None = None, **values: Any
) -> list[NodeFolder]:
    """Folders of nodes that know each other's keys."""
    signers = [Ed25519PrivateKey.generate() for _ in range(nodes)]
    policy: dict[str, Any] = {
        "trust": ["distributed"],
        "min_cohort": nodes,
        "max_colluders": COLLUDERS,
        "population": nodes,
        "peers": [public_text(signer) for signer in signers],
    }
    return [
        make_node(
            path / f"n{client}",
            client=client,
            signer=signer,
            test_seed=test_seed,
            **(policy | values),
        )
        for client, signer in enumerate(signers)
    ]


_exchange = frames.exchange


class Served:
    """Services of some nodes in this process, by the paths of their sockets, behind
    `frames.exchange`."""

    def __init__(self, folders: list[NodeFolder]) -> None:
        self.folders = folders
        self.services: dict[str, Service] = {}
        for folder in folders:
            self.start(folder)

    def start(self, folder: NodeFolder) -> None:
        self.services[str(folder.socket)] = Service(folder)

    def stop(self, folder: NodeFolder) -> None:
        """As by `kill -9`: nothing but what is on disk is kept."""
        with contextlib.suppress(KeyError):
            self.services.pop(str(folder.socket)).close()

    def close(self) -> None:
        for folder in self.folders:
            self.stop(folder)

    def exchange(
        self, path: str, header: Any, body: Any, **_: Any
    ) -> tuple[dict[str, Any], memoryview]:
        """See `frames.exchange`."""
        if path not in self.services:  # in a process of its own, or nowhere
            return _exchange(path, header, body, timeout=LIMIT_S)
        text = header if isinstance(header, str) else json.dumps(header)
        try:
            ask = Ask.model_validate(frames.parse_header(text.encode()))
            answer = self.services[path].answer(ask, bytes(body))
        except Refusal as refusal:
            return refusal.header, memoryview(b"")
        return json.loads(json.dumps(answer.header)), memoryview(answer.body)


class SecureFederation:
    """A server over such nodes: a strategy, or a round step by step."""

    def __init__(self, tmp_path: Path, served: Served, nonce: str = "0" * 32) -> None:
        self.served, self.folders, self.nonce = served, served.folders, nonce
        self.keys = [pem() for _ in self.folders]
        self.link = Link(self.folders, self.keys)
        self.lines: list[str] = []
        self.reports: list[RoundReport] = []
        self.ledger, self.attempt = tmp_path / "server.sqlite", tmp_path / "private/attempt.json"
        self.positions = tmp_path / "positions.json"
        self.transcript = Transcript.start(MODEL)  # after the last round that `run` has recorded

    @property
    def services(self) -> dict[int, str]:
        return {
            client: folder.public()["service_key"] for client, folder in enumerate(self.folders)
        }

    def charges(self) -> list[int]:
        """Releases that each node has charged."""
        return [len(rows(folder)) for folder in self.folders]

    def asked(self) -> dict[int, list[tuple[int, str]]]:
        """Round and step of each question that the server has sent since the last call, by
        client."""
        asked: dict[int, list[tuple[int, str]]] = {client: [] for client in range(NODES)}
        for client, message in self.link.sent:
            header = frames.parse_header(
                str(message.content.config_records[wire.CONFIG][HEADER]).encode()
            )
            if header["ask"] in STEPS:
                asked[client].append((header["round"], header["ask"]))
        self.link.sent.clear()
        return asked

    def restart(self, client: int) -> None:
        """Stop a node's service as by `kill -9`, and start it again."""
        self.served.stop(self.folders[client])
        self.served.start(self.folders[client])

    def grid(self, patience: Any = QUICK, test: bool = False) -> SecureGrid:
        enrolled = [
            {
                "client": client,
                "name": f"n{client}",
                "flower_key": key_digest(key),
                "service_key": self.services[client],
            }
            for client, key in enumerate(self.keys)
        ]
        enrolment = Enrolment.model_validate({"node": enrolled})
        grid = SecureGrid(
            self.link, enrolment, NodeQuestions("run", WORK),
            AnswerCheck(enrolment, LAYERS, positions=self.positions, test=test),
            patience=patience, say=self.lines.append, on_round=self.reports.append,
        )  # fmt: skip
        grid.file = AttemptFile(self.attempt)
        return grid

    def run(
        self, rounds: int = 1, grid: SecureGrid | None = None, resume: bool = False, **options: Any
    ) -> torch.Tensor:
        """The model after some rounds of a real strategy, which begin after the last recorded round
        on `resume`."""
        method, keys = (
            Method(mechanisms.get("snr-consistent"), LAYERS, facts(**options)),
            KeyRing(1, secret=True),
        )
        self.transcript = self.transcript if resume else Transcript.start(MODEL)
        grid = grid or self.grid()
        file = grid.file
        assert file is not None

        def recorded(_: Any, transcript: Transcript) -> None:
            self.transcript = transcript
            file.close()

        with Ledger(self.ledger, "run") as ledger:
            strategy = LayerwiseFedAvg(
                method,
                self.transcript,
                CohortSampler(method.facts.sampling, keys),
                ServerOptimizer("sgd", 1.0),
                Releaser(keys, ledger, attempt=file.key),
                EnrolledSum(),
                on_round=recorded,
                continue_ledger=True,
            )
            strategy.start(
                grid, strategy.initial_arrays(), num_rounds=rounds - self.transcript.rounds
            )
        return strategy.transcript.models[-1]

    # -- one round, step by step ---------------------------------------------------------------------------------------

    def question(self, client: int, **values: Any) -> Question:
        usual: dict[str, Any] = {
            "run": "run",
            "round": 1,
            "plan": plan().to_json(),
            "model": protocol.sha256(BODY),
        }
        usual |= {"work": WORK, "nonce": self.nonce, "service": self.services[client]}
        return Question(**(usual | values), client=client)

    def ask(
        self, client: int, step: str, given: Any = None, signer: Any = None, **values: Any
    ) -> dict[str, Any]:
        """A node's answer; a refusal is one, too."""
        question = self.question(client, **values)
        header = question.header(signer) | {"ask": step, "given": given or {}}
        body = BODY if step == "mask" else b""
        header |= {} if body else {"model": question.model}
        answer, numbers = self.served.exchange(str(self.folders[client].socket), header, body)
        return answer | ({"words": frames.vector(bytes(numbers), WORDS)} if numbers else {})

    def steps(self, signer: Any = None, directly: bool = False, **values: Any) -> Any:
        """The calls of one round as (step, client, call), a generator that is sent the answers; it
        returns the sum.

        Nodes are asked to agree, unless they shall unmask `directly` because all have sent their
        vectors."""
        question = self.question(0, **values)
        server = SecureSum(
            terms_of(question, ReleasePlan.from_json(LAYERS, question.plan)), self.services
        )
        here = range(len(self.folders))

        def call(step: str, client: int, given: Any = None) -> Any:
            return step, client, lambda: self.ask(client, step, given, signer, **values)

        adverts = {}
        for client in here:
            adverts[client] = (yield call("advertise", client))["said"]
        cohort, shared = server.advertised(adverts), {}
        for client in here:
            said = (yield call("share", client, {"adverts": cohort}))["said"]
            shared[client] = (
                {int(to): text for to, text in said["sealed"].items()},
                said["commitment"],
            )
        for client, sealed in server.shared(shared).items():
            given = {
                "sealed": {str(by): text for by, text in sealed.items()},
                **server.sharing_field(),
            }
            answer = yield call("mask", client, given)
            server.add(client, answer["words"].astype(np.uint32), answer["sent"])
        answered, signed, revealed = server.answered(), {}, {}
        for client in () if directly else answered:
            signed[client] = (yield call("agree", client, {"answered": answered}))["said"][
                "signature"
            ]
        evidence = server.sent() if directly else server.signed(signed)
        signatures = {str(client): text for client, text in evidence.items()}
        for client in answered:
            said = (yield call("unmask", client, {"signatures": signatures}))["said"]
            revealed[client] = {int(peer): share for peer, share in said["shares"].items()}
        return server.total(revealed)

    def given_to(self, step: str) -> tuple[list[Any], Any]:
        """The contents that an honest server would send to every node at a step, and the answers
        until then."""
        answers = self.whole(until=step)
        return [self._given(answers, step, client) for client in range(NODES)], answers

    @staticmethod
    def _given(answers: Any, step: str, client: int) -> dict[str, Any]:
        everyone = range(NODES)
        if step == "share":
            return {"adverts": [answers["advertise", c]["said"] for c in everyone]}
        if step == "mask":
            sealed = {
                str(c): answers["share", c]["said"]["sealed"][str(client)]
                for c in everyone
                if c != client
            }
            return {"sealed": sealed}
        if step == "agree":
            return {"answered": list(everyone)}
        return {"signatures": {str(c): answers["agree", c]["said"]["signature"] for c in everyone}}

    def whole(self, until: str = "", **values: Any) -> Any:
        """The sum of a round without incident; with `until`, its answers before that step, by step
        and client."""
        run, answers = self.steps(**values), dict[tuple[str, int], Any]()
        step, client, call = next(run)
        while step != until:
            answers[step, client] = call()
            try:
                step, client, call = run.send(answers[step, client])
            except StopIteration as ended:
                return ended.value
        return answers
