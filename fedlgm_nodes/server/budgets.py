"""The check, before a run's first round, that the nodes' budgets suffice for the run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedlgm.errors import ConfigError
from fedlgm.wire import printable
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.server.enrolment import Enrolment
from fedlgm_nodes.server.inquiries import inquire
from fedlgm_nodes.server.link import NodeLink
from fedlgm_nodes.server.round import group_by_reason, join_names


@dataclass(frozen=True)
class Need:
    """The releases that a run may request from each node.

    Attributes:
        run: label of the run.
        work: the requested work.
        plan: JSON text of a round's plan.
        releases: largest number of releases that the run may request from one node.
    """

    run: str
    work: Mapping[str, Any]
    plan: str
    releases: int

    def header(self, client: int, nonce: str) -> dict[str, Any]:
        """Header of the question how many of the releases a client's node can make; the question
        costs nothing.
        """
        return {
            "protocol": protocol.PROTOCOL,
            "ask": "afford",
            "run": self.run,
            "round": self.releases,
            "client": client,
            "plan": self.plan,
            "work": dict(self.work),
            "nonce": nonce,
        }


def affordable_releases(
    link: NodeLink, enrolment: Enrolment, need: Need, seconds: float
) -> dict[int, tuple[int, str]]:
    """Ask each connected node how many of the releases it can make. Returns client -> (number,
    reason); the reason is empty unless the node refuses the run.

    Nodes are omitted if they are not connected, or do not give a valid answer in time.

    Args:
        link: link to the nodes.
        enrolment: mapping of nodes to clients.
        need: the requested releases.
        seconds: time to wait for answers.
    """
    nonces = {node.client: secrets.token_hex(16) for node in enrolment.node}
    headers = inquire(link, lambda client: need.header(client, nonces[client]), seconds)
    answers = {
        client: _answer(header, enrolment[client].service_key, nonces[client])
        for client, header in headers.items()
    }
    return {client: answer for client, answer in answers.items() if answer is not None}


def require(
    enrolment: Enrolment, need: Need, found: Mapping[int, tuple[int, str]], needed: int
) -> list[str]:
    """Refuse a run that too few nodes can complete.

    Args:
        enrolment: names of the nodes.
        need: the requested releases.
        found: result of `affordable_releases`.
        needed: number of nodes that every round needs.

    Returns:
        One line for each node that will drop out, if enough other nodes remain.

    Raises:
        ConfigError: fewer nodes than the quorum can complete the run; the message gives the number
            of rounds that fit.
    """
    short = {client: fits for client, (fits, _) in found.items() if fits < need.releases}
    lines, dropped = [], []
    for names, (fits, why) in group_by_reason(
        (enrolment[client].name, found[client]) for client in sorted(short)
    ):
        refuses, it, it_is = (
            ("refuses", "it", "it is") if len(names) == 1 else ("refuse", "them", "they are")
        )
        can = f"can make {fits} of the {need.releases} releases that this run may ask {it} for"
        lines.append(f"{join_names(names)} " + (f"{refuses} it ({why})" if why else can))
        dropped.append(
            f"{lines[-1]}; until that changes, the run goes on without {it}"
            if why
            else f"{lines[-1]}: {it_is} left out from then on"
        )
    most = sorted((short.get(client, need.releases) for client in enrolment.clients), reverse=True)[
        needed - 1
    ]
    if most < need.releases:
        if most == 0 and any(why for _, why in found.values()):
            raise ConfigError(
                f"too few nodes accept this run: {'; '.join(lines)}. Nothing has been spent; "
                "change the recipe, or ask the nodes' operators to approve it or to change their "
                "policies"
            )
        raise ConfigError(
            f"the nodes' budgets do not suffice for this run: {'; '.join(lines)}. {most} rounds "
            "would fit, and nothing has been spent; shorten the run (federation.rounds, "
            "privacy.max_participations), or give it more noise"
        )
    return dropped


def _answer(header: dict[str, Any], service_key: str, nonce: str) -> tuple[int, str] | None:
    """(releases, reason of a refusal) of a node's answer; None if the answer is invalid."""
    if header.get("ok") is not True:
        codes = ("privacy", "plan", "work", "budget-spent", "run", "approval")
        refused = header.get("code") in codes
        return (0, printable(str(header.get("why")), 300)) if refused else None
    signature, fits = str(header.pop("signature", "")), header.get("releases")
    signed = protocol.verify(
        protocol.public_key(service_key), signature, "afford", nonce, protocol.canonical(header)
    )
    return (fits, "") if signed and type(fits) is int and fits >= 0 else None
