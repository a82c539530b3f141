"""Changes of a running deployment: its certificates, the key that signs its questions, and its
nodes.

During each replacement of a certificate or key, there is a time in which both the old one and the
new one are accepted. The nodes' operators therefore need not all replace a file on the same day.
Each step replaces one file. If a command is killed, the same command continues the change.
"""

from __future__ import annotations

import os
import re
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import create_durably, draft_folder, write_durably
from fedlgm_nodes.deploy import certificates, processes
from fedlgm_nodes.deploy.create import make_node, write_enrolment
from fedlgm_nodes.deploy.deployment_folder import DeployedNode, DeploymentFolder
from fedlgm_nodes.deploy.supervision import write_units
from fedlgm_nodes.protocol.messages import public_text
from fedlgm_nodes.server.enrolment import Enrolment
from simulations.engines.flower_processes import free_ports

# days before an authority expires from which on its successor issues the server's certificate
_SWITCH_DAYS = 14


def renew(folder: DeploymentFolder, *, switch: bool = False) -> list[str]:
    """Renew the server's certificates. If their authority would expire too soon, also create its
    successor. Return lines for the operator.

    An authority that would expire before a certificate of full length gets a successor. From then
    on `ca.crt` holds the certificates of both authorities, and nodes accept both.

    Args:
        folder: the deployment.
        switch: let the successor issue the certificates now. By default the successor does so from
            14 days before the authority in use expires.

    Raises:
        RunError: the authority's files cannot be read.
    """
    now = datetime.now(UTC)
    issuers = certificates.authorities(folder.authority)
    current = certificates.issuer_of(folder.server / "tls.crt", issuers)
    lines = []
    if current is issuers[-1] and certificates.is_short(current):
        issuers.append(certificates.make_authority(folder.authority, len(issuers) + 1))
        lines.append("a second authority was made")
    newest, end = issuers[-1], current[0].not_valid_after_utc
    if newest is not current and (switch or end - now <= timedelta(days=_SWITCH_DAYS)):
        current = newest
        lines.append("the second authority now issues the certificates")
    bundle = certificates.bundle([certificate for certificate, _ in issuers])
    nodes = [folder.node(node.name) for node in folder.settings().nodes]
    present = [node.ca for node in nodes if node.path.is_dir()]
    places = [folder.server / "ca.crt", *present]
    servers = [folder.server, *([folder.proxy] if folder.proxy.is_dir() else [])]
    for file in dict.fromkeys([*places, *(server / "ca.crt" for server in servers)]):
        _replace(file, bundle)
    for server in servers:
        _replace(server / "tls.crt", certificates.renewed(server / "tls.crt", current))
        lines.append(certificates.ending(server / "tls.crt")[2].partition(";")[0])
    if newest is not current:
        last = end - timedelta(days=_SWITCH_DAYS)
        lines.append(
            f"send {folder.server / 'ca.crt'} to the nodes on other machines before {last:%Y-%m-%d}; "
            "it replaces their ca.crt. When all nodes have the file: fedlgm deploy renew DIR --switch"
        )
    lines.append(
        "restart the SuperLink and the proxy: fedlgm deploy down DIR, fedlgm deploy up DIR"
    )
    return lines


def rotate_keys(folder: DeploymentFolder, *, switch: bool = False) -> list[str]:
    """Replace the key that signs questions, in two steps, and return lines for the operator.

    Args:
        folder: the deployment.
        switch: take the second step, after which the new key signs questions. The first step,
            without `switch`, creates the new key and edits the policies of nodes on this machine so
            that they accept both keys.

    Raises:
        RunError: the key cannot be read, or there is no new key to switch to.
    """
    signer = folder.signer
    if not switch:
        if not signer.next_key_file.exists():
            create_durably(signer.next_key_file, Ed25519PrivateKey.generate().private_bytes_raw())
        public = public_text(signer.key(signer.next_key_file))
        edited = _edit_policies(folder, public_text(signer.key()), public, switch=False)
        return [
            f"new key: {public}",
            f"the policies of {edited} nodes on this machine accept both keys after fedlgm node reload",
            (
                "send it to the operators of the other nodes, who add it to [ask]: "
                f'next_server_key = "{public}"'
            ),
            "when all nodes have the key: fedlgm deploy rotate-keys DIR --switch",
        ]
    if not signer.next_key_file.exists():
        raise RunError("there is no new key: first run fedlgm deploy rotate-keys without --switch")
    public = public_text(signer.key(signer.next_key_file))
    _edit_policies(folder, public_text(signer.key()), public, switch=True)
    signer.next_key_file.replace(signer.key_file)
    return [
        f"the signer signs with {public}; restart all: fedlgm deploy down DIR, fedlgm deploy up DIR",
        (
            "on other machines, operators may now set server_key to it and remove next_server_key; "
            "approvals name the key, so work then waits for another approval"
        ),
    ]


def _edit_policies(folder: DeploymentFolder, old: str, new: str, *, switch: bool) -> int:
    """Edit the policies on this machine that name the old key: with `switch` they accept the new
    key instead of the old key, otherwise both keys. Return the number of these policies.
    """
    edited = 0
    for node in folder.settings().nodes:
        file = folder.node(node.name).service.policy_file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        ask = tomllib.loads(text).get("ask", {})
        if ask.get("server_key") != old:
            continue
        text = re.sub(r"(?m)^next_server_key *=.*\n", "", text)
        line = rf'(?m)^(server_key *= *)"{old}"(.*)$'
        both = rf'\g<1>"{old}"\g<2>\nnext_server_key = "{new}"'
        _replace(file, re.sub(line, rf'\g<1>"{new}"\g<2>' if switch else both, text).encode())
        edited += 1
    return edited


def add(folder: DeploymentFolder, name: str, values: dict[str, Any]) -> int:
    """Create another node with the next client number, and return this number.

    Args:
        folder: the deployment.
        name: name of the node.
        values: values of its policy.

    Raises:
        ConfigError: a value is wrong, a node already has this name, or the nodes take part in
            secure sums, for which every node's policy lists all peers.
        RunError: the node's folder exists.
    """
    settings, enrolled = folder.settings(), Enrolment.load(folder.enrolment_file).node
    client = max(node.client for node in enrolled) + 1
    if name in {*(node.name for node in settings.nodes), *(node.name for node in enrolled)}:
        raise ConfigError(f"--name: there is a node {name!r} already; give another name")
    _refuse_peers(folder, "with more nodes")
    final = folder.node(name)
    final.service.check_length()
    if final.path.exists():
        raise RunError(f"{final.path} exists already; move it away, or give another name")
    policy = {"name": name, "client": client, "population": client + 1} | values
    policy["server_key"] = public_text(folder.signer.key())
    entry = DeployedNode(name=name, port=free_ports(1)[0])
    signer = Ed25519PrivateKey.generate()
    with draft_folder(final.path) as draft:
        draft.mkdir()
        made = make_node(
            type(final)(draft), settings, entry, policy, folder.server / "ca.crt", signer
        )
    write_enrolment(folder.enrolment_file, [*enrolled, made])
    settings = settings.model_copy(update={"nodes": [*settings.nodes, entry]})
    folder.write_settings(settings)
    write_units(folder, folder, settings.model_copy(update={"nodes": [entry]}))
    return client


def remove(folder: DeploymentFolder, name: str) -> Path:
    """Take a node out of the federation and stop its processes. The node's folder and ledger are
    not deleted; the folder's path is returned. The client numbers of the other nodes do not change.

    Raises:
        ConfigError: there is no such node, it is the only node, or the nodes take part in secure
            sums.
    """
    settings, enrolled = folder.settings(), Enrolment.load(folder.enrolment_file).node
    present = [node.name for node in enrolled]
    if name not in present:
        raise ConfigError(f"there is no node {name!r}; the nodes are {', '.join(present)}")
    if len(enrolled) == 1:
        raise ConfigError(f"{name} is the only node: stop it, fedlgm deploy down {folder.path}")
    _refuse_peers(folder, f"without {name}, or stop it: it then counts as zero")
    others = [node for node in enrolled if node.name != name]
    write_enrolment(folder.enrolment_file, others)
    processes.stop_node(folder, name)
    folder.write_settings(
        settings.model_copy(
            update={"nodes": [node for node in settings.nodes if node.name != name]}
        )
    )
    if folder.registered_file.is_file():
        names = set(folder.registered_file.read_text().split()) - {name}
        folder.registered_file.write_text("\n".join(sorted(names)))
    return folder.node(name).path


def _refuse_peers(folder: DeploymentFolder, remedy: str) -> None:
    """Refuse to change the set of nodes if a policy on this machine states that the nodes take part
    in secure sums.

    Raises:
        ConfigError: the nodes take part in secure sums.
    """
    for node in folder.settings().nodes:
        service = folder.node(node.name).service
        if service.policy_file.is_file() and service.policy().distributed is not None:
            raise ConfigError(
                "nodes under distributed trust list their peers in every policy, and the number "
                f"of nodes decides each node's noise: create another deployment {remedy}"
            )


def _replace(file: Path, content: bytes) -> None:
    """Replace a file by a new file with the same owner and permissions."""
    before = file.stat() if file.exists() else None
    write_durably(file, content, 0o644 if before is None else before.st_mode & 0o777)
    if before is not None:
        try:
            os.chown(file, before.st_uid, before.st_gid)
        except PermissionError as error:
            raise RunError(f"{file} belongs to another user: run this as root") from error
