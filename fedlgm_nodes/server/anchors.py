"""Anchors of a run's releases, which are the nodes' signatures, as witnesses, of the head of the
chain of releases.

All connected nodes are asked, whether or not they take part in the round, so the anchors do not
show who took part.
"""

from __future__ import annotations

import json
from typing import Any

from cryptography.exceptions import InvalidSignature

from fedlgm.privacy.signed import ANCHOR_EVERY, anchor_text
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.server.enrolment import Enrolment
from fedlgm_nodes.server.inquiries import inquire
from fedlgm_nodes.server.link import NodeLink
from simulations.runs.folder import RunFolder

_SECONDS = 15.0


class Anchors:
    """Collects the anchors of one run, every few rounds and after the last round.

    Args:
        link: link to the nodes.
        enrolment: mapping of nodes to clients.
        folder: folder of the run.
    """

    def __init__(self, link: NodeLink, enrolment: Enrolment, folder: RunFolder) -> None:
        self._link, self._enrolment, self._folder = link, enrolment, folder
        self._rounds = folder.recipe().federation.rounds

    def collect(self, round: int) -> int:
        """Ask for anchors if they are due after this round, store the valid ones in the run's
        folder, and return their number.

        Args:
            round: a round whose release is in the run's folder.
        """
        if round % ANCHOR_EVERY and round != self._rounds:
            return 0
        head = self._head(round)

        def question(client: int) -> dict[str, Any]:
            return {
                "protocol": protocol.PROTOCOL,
                "ask": "anchor",
                "run": self._folder.path.name,
                "round": round,
                "client": client,
                "nonce": head,
            }

        answers = inquire(self._link, question, _SECONDS)
        anchors = []
        for client, answer in sorted(answers.items()):
            key, signature = self._enrolment[client].service_key, str(answer.get("anchor", ""))
            if _is_signed(key, signature, anchor_text(round, head)):
                anchors.append({"round": round, "head": head, "by": key, "signature": signature})
        with (self._folder.path / "releases" / "anchors.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(anchor) + "\n" for anchor in anchors)
        return len(anchors)

    def _head(self, round: int) -> str:
        chain = (self._folder.path / "releases" / "chain.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in chain.splitlines()]
        return next(str(row["head"]) for row in reversed(rows) if row["round"] == round)


def _is_signed(key: str, signature: str, text: bytes) -> bool:
    try:
        protocol.public_key(key).verify(bytes.fromhex(signature), text)
    except (InvalidSignature, ValueError):
        return False
    return True
