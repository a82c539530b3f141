"""An app that whoever can submit one to a SuperLink may write, and what it asks nodes in the
server's own hand.

The questions are signed with the key that the nodes have enrolled and each names the client that it
is sent to, so that the node examines what stands in them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.planning.layers import LayerTable
from fedlgm.training import models
from fedlgm_nodes.deploy import submit
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question
from tests.support import nodes

SERVER = '''
"""Sends what it is given, wave after wave, and writes down what comes back."""
import hashlib, json, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from fedlgm import frames
from fedlgm_nodes.server.enrolment import key_digest

app = ServerApp()

@app.main()
def main(grid, context):
    given = json.loads(open(context.run_config["attack"]).read())
    nodes = {given["clients"][key_digest(node.public_key)]: node.node_id for node in grid.get_nodes()}
    answers, missing = [], []
    for wave in given["waves"]:
        messages = []
        for number, case in enumerate(wave):
            body = bytes.fromhex(case["body"])
            content = RecordDict({"config": ConfigRecord({frames.HEADER: case["header"], "number": number}),
                                  frames.BODY + ".0": ConfigRecord({frames.BODY: body})})
            messages.append(Message(content, nodes[case["client"]], case["type"], group_id="x"))
        sent = {id_: case for id_, case in zip(grid.push_messages(messages), wave) if id_}
        deadline = time.monotonic() + given["seconds"]
        while sent and time.monotonic() < deadline:
            for reply in grid.pull_messages(list(sent)):
                case = sent.pop(reply.metadata.reply_to_message_id)
                said, held = "error", ""
                if not reply.has_error():
                    header = json.loads(reply.content.config_records["config"][frames.HEADER])
                    said = "ok" if header.get("ok") else header["code"]
                    body = bytes(frames.body_of(reply.content.config_records, 0))
                    held = hashlib.sha256(body).hexdigest() if body else ""
                answers.append([case["name"], case["client"], said, held])
            time.sleep(0.1)
        missing += [case["name"] for case in sent.values()]
    open(given["out"], "w").write(json.dumps({"answers": answers, "missing": missing}))
'''
CLIENT = '''
"""An app that would take what it finds, if the node ran it."""
import pathlib
pathlib.Path("{marker}").write_text("run on the node")
from flwr.clientapp import ClientApp
app = ClientApp()
'''


def write(folder: Path, marker: Path) -> None:
    """The app's files; its client side makes `marker`."""
    shutil.copytree(submit.APP, folder)
    (folder / "server_app.py").write_text(SERVER)
    (folder / "client_app.py").write_text(CLIENT.replace("{marker}", str(marker)))
    text = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(
        text.replace('deployment = ""', 'attack = ""').replace("fedlgm-nodes", "evil")
    )


@dataclass(frozen=True)
class Case:
    """One message.

    Attributes:
        name: of what is tried.
        client: who gets it.
        header: of the frame, as text.
        codes: what may come back.
        body: of the frame.
        type: Flower's message type.
    """

    name: str
    client: int
    header: str
    codes: frozenset[str]
    body: bytes
    type: str = "train"

    def values(self) -> dict[str, Any]:
        """For the app."""
        return {
            "name": self.name,
            "client": self.client,
            "header": self.header,
            "body": self.body.hex(),
            "type": self.type,
        }


_MODULE = models.build("logistic", in_shape=(1, 8, 8), classes=10)
MODEL = LayerTable.from_module(_MODULE).flatten(_MODULE).numpy()
BODY = frames.npy(MODEL)
MODELS = {
    "NaN": frames.npy(np.full_like(MODEL, np.nan)),
    "Inf": frames.npy(np.full_like(MODEL, np.inf)),
    "float64": frames.npy(MODEL.astype(np.float64)),
    "too short": frames.npy(MODEL[:-1]),
    "too long": frames.npy(np.zeros(len(MODEL) + 1, np.float32)),
    "two dimensions": frames.npy(MODEL[None]),
    "truncated": BODY[:-4],
    "not whole numbers": BODY[:-1],
    "with a tail": BODY + b"tail",
    "empty": b"",
}


class Asker:
    """Writes questions in the hand of the server whose key is `signer`.

    Args:
        signer: the enrolled server's key.
        services: public key of each client's service.
    """

    def __init__(self, signer: Ed25519PrivateKey, services: Mapping[int, str]) -> None:
        self._signer, self._services = signer, services

    def header(
        self, client: int, *, plan: str = "", body: bytes = BODY, work: Mapping[str, Any] = nodes.WORK,
        run: str = "mine", round: int = 1, nonce: str = "00", signer: Ed25519PrivateKey | None = None,
        service: int | None = None, expect: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A signed header; `service` is the client whose service is meant, if it is not this
        one's."""
        text, key = (
            plan or nodes.plan().to_json(),
            self._services[client if service is None else service],
        )
        question = Question(
            run, round, client, text, protocol.sha256(body), work, nonce, key, expect
        )
        return question.header(signer or self._signer)

    def hostile(
        self, plans: Mapping[str, str], works: Mapping[str, Any], objects: bytes
    ) -> list[Case]:
        """What a node must refuse: plans, models and work to one node each, the rest to every
        node."""
        clients = sorted(self._services)
        found: list[Case] = []

        def add(name: str, codes: str, body: bytes = BODY, **parts: Any) -> None:
            client = clients[len(found) % len(clients)]
            text = json.dumps(self.header(client, body=body, **parts))
            found.append(Case(name, client, text, frozenset(codes.split()), body))

        for name, plan in plans.items():
            add(f"plan: {name}", "privacy plan budget-spent", plan=plan)
        for name, body in (MODELS | {"objects": objects}).items():
            # What is no row of four-byte numbers does not come past the relay.
            add(f"model: {name}", "error" if len(body) % 4 else "model", body=body)
        for name, work in works.items():
            add(f"work: {name}", "work model malformed", work=nodes.WORK | work)
        stranger = Ed25519PrivateKey.generate()
        for client in clients:
            good, other = self.header(client), clients[(client + 1) % len(clients)]
            others = {
                "unsigned": {name: value for name, value in good.items() if name != "signature"},
                "unsigned, another's signature": self.header(client, signer=stranger),
                "unsigned, changed after it was signed": good | {"round": 2},
                "unsigned, another run than was signed for": good | {"run": "other"},
                "unsigned, for another service": self.header(client, service=other),
                "unsigned, more was expected than was signed for": good | {"expect": {}},
                "client": self.header(other),
                "expect": self.header(client, expect={}),
                "malformed, no such question": good | {"ask": "norms"},
                "malformed, more than is asked": good | {"raw": True},
                "malformed, round nought": self.header(client, round=0),
                "protocol": good | {"protocol": 99},
            }
            found += [
                Case(name, client, json.dumps(header), frozenset({name.partition(",")[0]}), BODY)
                for name, header in others.items()
            ]
            found.append(Case("not JSON", client, "not json", frozenset({"frame"}), BODY))
        return found

    def repeated(self) -> tuple[list[Case], list[Case]]:
        """One allowed question per node, in many copies: those that are sent together, and those
        sent afterwards."""
        waves: tuple[list[Case], list[Case]] = [], []
        for client in sorted(self._services):
            copies = [(self.header(client), kind) for kind in ("train", "train", "evaluate")]
            runs = [
                (self.header(client, run=f"run {i}", nonce=f"{i:02x}"), "train") for i in range(5)
            ]
            for wave, those in zip(waves, (copies + runs[:4], copies[1:] + runs[4:]), strict=True):
                wave += [
                    Case("again", client, json.dumps(header), frozenset({"ok"}), BODY, kind)
                    for header, kind in those
                ]
        return waves


__all__ = ["BODY", "MODELS", "Asker", "Case", "write"]
