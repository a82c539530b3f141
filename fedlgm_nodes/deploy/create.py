"""Creation of a deployment: its keys, certificates, nodes' folders and start scripts."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import create_durably, draft_folder, explain_failure, is_used, write_durably
from fedlgm.planning.distributed_trust import least_threshold
from fedlgm.planning.trust import hides_answers
from fedlgm.wording import describe_problem
from fedlgm_nodes.deploy import certificates
from fedlgm_nodes.deploy.deployment_folder import (
    DeployedNode,
    DeployedNodeFolder,
    DeploymentFolder,
    Settings,
)
from fedlgm_nodes.deploy.supervision import write_units
from fedlgm_nodes.protocol.messages import public_text
from fedlgm_nodes.secagg.cohort import MOST_NODES
from fedlgm_nodes.server.enrolment import EnrolledNode, Enrolment, key_digest
from fedlgm_nodes.service.folder import NodeFolder
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.engines.flower_command import CONNECTION
from simulations.engines.flower_processes import free_ports

_LOCAL = ("localhost", "127.0.0.1", "::1")
_FLEET = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
"""The calls of Flower's fleet API that a SuperNode makes; other machines cannot make any other call
to a SuperLink."""
_QUIET = "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"


def create(
    path: Path,
    nodes: int,
    *,
    example: Recipe | None = None,
    own: Sequence[dict[str, Any]] = (),
    hosts: Sequence[str] = (),
    port: int | None = None,
    policy: dict[str, Any] | None = None,
    test_seed: int | None = None,
) -> DeploymentFolder:
    """Create a deployment's folder with everything in it.

    Args:
        path: folder to make.
        nodes: number of nodes, called node0, node1, ...
        example: give every node its share of this recipe's data; without it the operator must fill
            in the policies.
        own: for nodes with data of their own instead of an example's data: the values of each
            node's policy that describe its data (see `fedlgm_nodes.deploy.own_data`).
        hosts: names and addresses under which nodes on other machines reach this one; a proxy then
            forwards to the SuperLink, which listens only on this machine's own address.
        port: port to which nodes connect; default: a free one.
        policy: values for every node's policy (see `fedlgm_nodes.service.folder`).
        test_seed: make nodes for tests, which draw the same noise as a simulation with this seed.

    Raises:
        ConfigError: the number of nodes is invalid.
        RunError: `path` exists, or cannot be created.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes must be at least 1, got {nodes}")
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,64}|[0-9A-Fa-f:]*::[0-9A-Fa-f:]*", host):
            raise ConfigError(
                "--host takes a name or address, such as fl.example.org, without a port, got "
                f"{host!r}"
            )
    path = path.resolve()
    DeploymentFolder(path).node(f"node{nodes - 1}").service.check_length()
    if is_used(path):
        raise RunError(
            f"{path} already exists: choose another folder, or remove it (its nodes' ledgers too)"
        )
    before = os.umask(0o022)
    # no other user may write a file of the deployment, whatever the umask permits
    os.umask(before | 0o022)
    try:
        with draft_folder(path) as draft:
            folders = DeploymentFolder(draft), DeploymentFolder(path)
            shares = own or _shares(example, nodes)
            _fill(*folders, nodes, shares, hosts, port, policy or {}, test_seed)
    except OSError as error:
        said = explain_failure(f"cannot make the deployment {path}", error)
        raise RunError(said.replace(str(draft), str(path))) from error
    except ConfigError as error:
        # the error names a file of the draft, which is deleted
        said = re.sub(r"^\S+/policy\.toml: ", "the nodes' policy: ", str(error))
        raise ConfigError(said.replace(str(draft), str(path))) from error
    finally:
        os.umask(before)
    return DeploymentFolder(path)


def _fill(
    draft: DeploymentFolder,
    final: DeploymentFolder,
    nodes: int,
    shares: Sequence[Any],
    hosts: Sequence[str],
    port: int | None,
    policy: dict[str, Any],
    test_seed: int | None,
) -> None:
    proxied = any(host not in _LOCAL for host in hosts)
    closed = [
        draft.server,
        draft.flower_home,
        draft.runs,
        draft.authority,
        draft.signer.path,
        draft.signer.runs,
    ]
    for folder in closed + [draft.proxy] * proxied:
        folder.mkdir(mode=0o700, parents=True)
    draft.logs.mkdir(mode=0o700)
    (draft.path / "nodes").mkdir()
    draft.signer.socket.parent.mkdir()
    for folder, mode in (
        (draft.path, 0o711), (draft.path / "nodes", 0o711), (draft.signer.path, 0o711),
        (draft.signer.socket.parent, 0o750),
    ):  # fmt: skip
        # the users of a deployment's processes need access, whatever the operator's umask
        folder.chmod(mode)
    ports = free_ports(nodes + 2)
    settings = Settings(
        host=hosts[0] if hosts else "127.0.0.1",
        port=port or ports[0],
        superlink=ports[-1] if proxied else None,
        test=test_seed is not None,
        nodes=[DeployedNode(name=f"node{i}", port=ports[i + 1]) for i in range(nodes)],
    )
    draft.write_settings(settings)
    authority = certificates.make_authority(draft.authority)
    certificates.make_server_certificate(draft.server, authority, _LOCAL)
    shutil.copyfile(draft.authority / "ca.crt", draft.server / "ca.crt")
    signer = Ed25519PrivateKey.generate()
    create_durably(draft.signer.key_file, signer.private_bytes_raw())
    _write_flower_configuration(draft, final, settings)
    _script(draft.server / "start-superlink.sh", _superlink(settings))
    _script(draft.signer.script, ['exec "$BIN/python" -m fedlgm_nodes.deploy.signer .'])
    if proxied:
        certificates.make_server_certificate(
            draft.proxy, authority, [*hosts, *(host for host in _LOCAL if host not in hosts)]
        )
        shutil.copyfile(draft.authority / "ca.crt", draft.proxy / "ca.crt")
        (draft.proxy / "Caddyfile").write_text(_caddyfile(settings), encoding="utf-8")
        _script(
            draft.proxy / "start-proxy.sh",
            ['exec "${CADDY:-caddy}" run --config Caddyfile --adapter caddyfile'],
        )
    keys = [Ed25519PrivateKey.generate() for _ in settings.nodes]
    if hides_answers(policy.get("trust", ())):
        policy = secure_sums(nodes) | {"peers": [public_text(key) for key in keys]} | policy
    enrolled = []
    for client, entry in enumerate(settings.nodes):
        node = draft.node(entry.name)
        node.path.mkdir()
        values: dict[str, Any] = {
            "name": entry.name,
            "client": client,
            "population": nodes,
            "server_key": public_text(signer),
            **policy,
        }
        if shares:
            share = shares[client]
            values |= share if isinstance(share, dict) else _write_share(node, *share)
        ca = draft.authority / "ca.crt"
        enrolled.append(make_node(node, settings, entry, values, ca, keys[client], test_seed))
    write_enrolment(draft.enrolment_file, enrolled)
    for file in (draft.settings_file, draft.enrolment_file):
        file.chmod(0o644)  # the signer's user also reads them
    write_units(draft, final, settings)


def make_node(
    node: DeployedNodeFolder,
    settings: Settings,
    entry: DeployedNode,
    values: dict[str, Any],
    ca: Path,
    key: Ed25519PrivateKey,
    test_seed: int | None = None,
) -> EnrolledNode:
    """Create the files in a node's folder and return the node's entry for the enrolment.

    Args:
        node: the folder, which exists.
        settings: the deployment's settings.
        entry: name and port of the node.
        values: values of its policy.
        ca: file with the certificates of the authorities that the node accepts.
        key: its service's key.
        test_seed: for tests only, see `create`.
    """
    node.path.chmod(0o711)
    service = NodeFolder.create(node.service.path, values, test_seed=test_seed, signer=key)
    pem = certificates.make_node_key(node.flower_key)
    node.flower_home.mkdir(mode=0o700)
    shared = secrets.token_hex(32).encode()
    for role in ("supernode", "executor"):  # the two users cannot read each other's files
        create_durably(node.secret(role), shared)
    shutil.copyfile(ca, node.ca)
    node.ca.chmod(0o644)
    for role, lines in _node_scripts(settings, entry).items():
        _script(node.script(role), lines)
    return EnrolledNode(
        client=values["client"],
        name=entry.name,
        flower_key=key_digest(pem),
        service_key=service.public()["service_key"],
    )


def secure_sums(nodes: int) -> dict[str, int]:
    """The [distributed] section for the policies of nodes that are created together. The section
    does not list the peers yet, because their keys do not exist.

    Raises:
        ConfigError: there are too few nodes to hide one of them, or no round could ask as many
            nodes as each node would require.
    """
    if nodes < 3:
        raise ConfigError(
            f"--trust distributed hides a node among others: it needs 3 nodes or more, got {nodes}"
        )
    colluders = nodes // 10
    least = max(least_threshold(nodes, colluders), colluders + 2)
    if least > MOST_NODES:
        raise ConfigError(
            f"each of {nodes} nodes would require rounds of {least} nodes or more (min_cohort), "
            f"and at most {MOST_NODES} can make a secure sum"
        )
    return {"min_cohort": least, "max_colluders": colluders}


def enrol(
    folder: DeploymentFolder, public: Path, key: Path, *, replace: bool = False
) -> EnrolledNode:
    """Add a node to the enrolment and return its entry.

    Args:
        folder: the deployment's folder.
        public: the node's `public.toml`.
        key: public key of its SuperNode, OpenSSH form.
        replace: replace another node that is enrolled as this client.

    Raises:
        ConfigError: a file cannot be used, the new entry contradicts another entry, or another node
            is already enrolled as this client.
    """
    try:
        given = tomllib.loads(public.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            explain_failure(f"{public} is not the public.toml of a node", error)
        ) from error
    try:
        flower_key = key_digest(certificates.public_pem(key.read_bytes()))
    except (OSError, ValueError) as error:
        what = f"{key} is not the public key (.pub) of a SuperNode"
        raise ConfigError(explain_failure(what, error)) from error
    written = {name: given[name] for name in ("client", "name", "service_key") if name in given}
    try:
        entry = EnrolledNode(flower_key=flower_key, **written)
    except ValidationError as error:
        raise ConfigError(f"{public}: {describe_problem(error.errors()[0])}") from error
    enrolled = Enrolment.load(folder.enrolment_file).node
    free = max(node.client for node in enrolled) + 1
    if entry.client > free:
        raise ConfigError(f"{public}: client {entry.client}; the next new client is {free}")
    before = next((node for node in enrolled if node.client == entry.client), None)
    if before not in (None, entry) and not replace:
        raise ConfigError(
            f"client {before.client} is {before.name} already, with other keys or under another "
            f"name; pass --replace to put the node of {public} in its place"
        )
    others = [node for node in enrolled if node.client != entry.client]
    try:
        write_enrolment(folder.enrolment_file, [*others, entry])
    except ConfigError as error:
        raise ConfigError(f"{public} and {key} do not fit the enrolled nodes: {error}") from error
    return entry


def write_enrolment(file: Path, nodes: Sequence[EnrolledNode]) -> None:
    """Write the enrolment of these nodes. If their entries contradict each other, the file is not
    changed.

    Raises:
        ConfigError: the entries contradict each other.
    """
    head = (
        "# Which registered node is which client. "
        "Another one: fedlgm deploy enrol DIR public.toml supernode.key.pub\n"
    )
    in_order = sorted(nodes, key=lambda node: node.client)
    text = head + tomli_w.dumps({"node": [node.model_dump() for node in in_order]})
    draft = file.with_suffix(".draft")
    try:
        write_durably(draft, text.encode(), 0o644)
        Enrolment.load(draft)
        draft.replace(file)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{draft}: ")) from error
    finally:
        draft.unlink(missing_ok=True)


def _shares(example: Recipe | None, nodes: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Each node's share of the data of an example recipe, as (inputs, labels, number of classes)."""
    if example is None:
        return []
    assembly = Assembly(
        example.with_values(federation={"clients": nodes, "rate": 1.0, "cohort": None})
    )
    data = assembly.data.dataset
    if data.classes is None or not isinstance(data.train_x, np.ndarray):
        raise ConfigError("--example takes a recipe whose model has one input and predicts classes")
    x, y, classes = data.train_x, data.train_y, data.classes
    return [
        (x[rows], y[rows], classes)
        for rows in (assembly.data.partition[client] for client in range(nodes))
    ]


def _write_share(
    node: DeployedNodeFolder, x: np.ndarray, y: np.ndarray, classes: int
) -> dict[str, Any]:
    (node.path / "data").mkdir(mode=0o700)
    file = node.path / "data" / "examples.npz"
    np.savez(file, x=x, y=y)
    file.chmod(0o600)
    return {
        "path": "../data/examples.npz",
        "shape": list(x.shape[1:]),
        "classes": classes,
        "data_name": "example",
    }


def _write_flower_configuration(
    draft: DeploymentFolder, final: DeploymentFolder, settings: Settings
) -> None:
    connection = {"address": settings.local, "root-certificates": str(final.server / "ca.crt")}
    text = tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}})
    (draft.flower_home / "config.toml").write_text(text, encoding="utf-8")


def _superlink(settings: Settings) -> list[str]:
    """The lines of the script that starts the SuperLink.

    The SuperLink's control API has no password, so it always listens on 127.0.0.1.
    """
    return [
        'export FLWR_HOME="$PWD/flower"',
        (
            f'exec "$BIN/flower-superlink" --host 127.0.0.1 --port {settings.local_port} '
            "--database superlink.db \\"
        ),
        (
            "    --ssl-certfile tls.crt --ssl-keyfile tls.key --ssl-ca-certfile ca.crt "
            "--enable-supernode-auth"
        ),
    ]


def _caddyfile(settings: Settings) -> str:
    """Configuration of a Caddy proxy that exposes only the SuperLink's API for SuperNodes to other
    machines.
    """
    paths = " ".join(f"/v1/fleet/{name}" for name in _FLEET)
    return f"""\
# Before the SuperLink, whose control and runtime APIs run code for anyone who reaches them. Any other proxy has to do
# the same: pass on POST to these paths, written exactly so, and refuse everything else.
{{
    admin off
    auto_https off
    persist_config off
    storage file_system state
    servers {{
        protocols h1 h2
    }}
}}
https://:{settings.port} {{
    tls tls.crt tls.key
    @fleet {{
        method POST
        expression `{{http.request.orig_uri}} in {list(paths.split())}`
    }}
    handle @fleet {{
        request_body {{
            max_size 64MB
        }}
        reverse_proxy https://{settings.local} {{
            transport http {{
                tls_trust_pool file ca.crt
            }}
        }}
    }}
    handle {{
        respond 403
    }}
}}
"""


def _node_scripts(settings: Settings, node: DeployedNode) -> dict[str, list[str]]:
    return {
        "service": ['exec "$BIN/python" -m simulations.cli node serve service'],
        "supernode": [
            'export FLWR_HOME="$PWD/flower"',
            'exec "$BIN/python" -m fedlgm_nodes.service.supernode --root-certificates ca.crt \\',
            "    --auth-supernode-private-key supernode.key \\",
            (
                f"    --superlink {settings.host}:{settings.port} --host 127.0.0.1 --port "
                f"{node.port} \\"
            ),
            "    --isolation process --superexec-auth-secret-file supernode.secret",
        ],
        "executor": [
            (
                'exec "$BIN/python" -m fedlgm_nodes.service.executor --supernode '
                f"127.0.0.1:{node.port} \\"
            ),
            "    --secret-file executor.secret --socket service/run/release.sock",
        ],
    }


def _script(path: Path, lines: Sequence[str]) -> None:
    head = [
        "#!/usr/bin/env bash",
        "set -eu",
        'cd "$(dirname "$0")"',
        f'BIN="${{FEDLGM_BIN:-{Path(sys.executable).parent}}}"',
    ]
    path.write_text(
        "\n".join([*head, 'export PATH="$BIN:$PATH"', _QUIET, *lines]) + "\n", encoding="utf-8"
    )
    path.chmod(0o755)
