"""A deployment over the years: certificates, keys and nodes that come and go."""

from __future__ import annotations

import http.server
import re
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from typer.testing import CliRunner

from fedlgm.errors import ConfigError, RunError
from fedlgm_nodes.deploy import certificates, process_record, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_commands import app
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower
from fedlgm_nodes.deploy.life import add, remove, renew, rotate_keys
from fedlgm_nodes.protocol.messages import public_text
from fedlgm_nodes.server.enrolment import Enrolment
from fedlgm_nodes.service.folder import NodeFolder
from simulations.config import recipe as recipes
from tests.support.nodes import NodeProcess, ask, make_node


def run(*words: Any) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.fixture
def folder(tmp_path: Path) -> DeploymentFolder:
    return create(tmp_path / "lab", 2, hosts=["fl.example.org"], port=8443)


def days(file: Path) -> int:
    return certificates.ending(file)[0]


def connects(server: Path, ca: bytes, tmp_path: Path) -> bool:
    """Whether a node with this ca.crt accepts the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "tls.crt", server / "tls.key")
    httpd = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
    threading.Thread(target=httpd.handle_request, daemon=True).start()
    trusted = tmp_path / "trusted.crt"
    trusted.write_bytes(ca)
    client = ssl.create_default_context(cafile=str(trusted))
    try:
        with socket.create_connection(("127.0.0.1", httpd.server_port)) as plain:
            client.wrap_socket(plain, server_hostname="127.0.0.1").close()
    except ssl.SSLCertVerificationError:
        return False
    finally:
        httpd.server_close()
    return True


def test_an_authority_outlives_two_certificates(folder):
    assert days(folder.server / "tls.crt") == 824
    assert days(folder.server / "ca.crt") == 1649
    key, before = (folder.server / "tls.key").read_bytes(), (folder.proxy / "tls.crt").read_bytes()
    assert len(renew(folder)) == 3
    assert (folder.server / "tls.key").read_bytes() == key
    renewed = (folder.proxy / "tls.crt").read_bytes()
    assert renewed != before
    names = [
        x509.load_pem_x509_certificate(text)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
        for text in (before, renewed)
    ]
    assert names[0] == names[1]
    assert len(certificates.authorities(folder.authority)) == 1


def test_nodes_need_no_new_file_on_the_day_of_a_new_authority(tmp_path, monkeypatch):
    """Neither those with the old file before the switch, nor those with the new file at any time."""
    monkeypatch.setattr(certificates, "_AUTHORITY_DAYS", 400)
    folder = create(tmp_path / "lab", 2)
    old = folder.node("node0").ca.read_bytes()
    said = " ".join(renew(folder))
    assert "a second authority was made" in said
    assert f"send {folder.server / 'ca.crt'} to the nodes on other machines before" in said
    new = folder.node("node1").ca.read_bytes()
    assert new == (folder.server / "ca.crt").read_bytes()
    assert len(x509.load_pem_x509_certificates(new)) == 2
    for ca in (old, new):
        assert connects(folder.server, ca, tmp_path)
    renew(folder)  # a repeated command makes no third authority
    assert len(certificates.authorities(folder.authority)) == 2
    assert connects(folder.server, old, tmp_path)
    assert "the second authority now issues" in run("renew", folder.path, "--switch")
    assert connects(folder.server, new, tmp_path)
    assert not connects(folder.server, old, tmp_path)
    assert Flower(folder).healthy() is False  # nothing runs, but the file is read


def test_the_switch_comes_by_itself_before_the_authority_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "_AUTHORITY_DAYS", 10)
    folder = create(tmp_path / "lab", 1)
    assert days(folder.server / "tls.crt") == 9  # no certificate outlives its authority
    monkeypatch.setattr(certificates, "_AUTHORITY_DAYS", 1650)
    assert "in 9 days; the server's operator renews it: fedlgm deploy renew" in " ".join(
        run("status", folder.path).split()
    )
    renew(folder)
    assert days(folder.server / "tls.crt") == 824
    assert len(certificates.authorities(folder.authority)) == 2
    (folder.authority / "ca.key").unlink()
    with pytest.raises(RunError, match=r"the authority in .* cannot be read"):
        renew(folder)


def test_a_key_is_rotated_in_two_steps(folder):
    before = public_text(folder.signer.key())
    with pytest.raises(RunError, match="first run fedlgm deploy rotate-keys without --switch"):
        rotate_keys(folder, switch=True)
    said = run("rotate-keys", folder.path)
    assert run("rotate-keys", folder.path) == said  # again after a kill
    (new,) = re.findall(r"new key: ([0-9a-f]{64})", said)
    policy = folder.node("node1").service.policy()
    assert policy.ask.server_keys == [before, new]
    assert public_text(folder.signer.key()) == before
    run("rotate-keys", folder.path, "--switch")
    assert public_text(folder.signer.key()) == new
    assert folder.node("node1").service.policy().ask.server_keys == [new]
    assert not folder.signer.next_key_file.exists()
    run("rotate-keys", folder.path)
    assert folder.node("node0").service.policy().ask.server_keys[0] == new


def test_a_service_answers_both_keys_during_a_rotation(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    old, new, other = (Ed25519PrivateKey.generate() for _ in range(3))
    folder = make_node(tmp_path / "node", server_key=public_text(old))
    text = folder.policy_file.read_text()
    line = f'server_key = "{public_text(old)}"'
    folder.policy_file.write_text(
        text.replace(line, f'{line}\nnext_server_key = "{public_text(new)}"')
    )
    with NodeProcess(folder):
        for round_, key in enumerate((old, new), start=1):
            said, _ = ask(folder, signer=key, round=round_)
            assert said["ok"], said
        assert ask(folder, signer=other, round=3)[0]["code"] == "unsigned"
    with folder.ledger(readonly=True) as ledger:
        rows = [row for row in folder.record(ledger.identity).rows if row["kind"] == "release"]
    assert [row["asked_by"] for row in rows] == [public_text(old), public_text(new)]


def test_nodes_come_and_go(folder, tmp_path):
    client = add(folder, "clinic", {"epsilon": 3.0})
    assert client == 2
    enrolled = Enrolment.load(folder.enrolment_file)
    service = folder.node("clinic").service
    assert enrolled[2].service_key == service.public()["service_key"]
    assert service.policy().ask.server_key == public_text(folder.signer.key())
    assert [node.name for node in folder.settings().nodes] == ["node0", "node1", "clinic"]
    unit = (folder.path / "systemd" / "fedlgm-clinic-service.service").read_text()
    assert str(folder.node("clinic").path / "start-service.sh") in unit
    assert oct(folder.node("clinic").path.stat().st_mode & 0o777) == "0o711"
    with pytest.raises(ConfigError, match="there is a node 'clinic' already"):
        add(folder, "clinic", {})
    with pytest.raises(ConfigError, match="at most 64 letters"):
        add(folder, "St Mary", {})
    with pytest.raises(ConfigError, match="there is no node 'other'"):
        remove(folder, "other")
    place = remove(folder, "clinic")
    assert NodeFolder.open(place / "service").ledger_file.exists()
    assert Enrolment.load(folder.enrolment_file).clients == [0, 1]
    assert sorted(entry.name for entry in (folder.path / "nodes").iterdir()) == [
        "clinic", "node0", "node1",
    ]  # fmt: skip
    with pytest.raises(RunError, match="exists already; move it away"):
        add(folder, "clinic", {})
    remove(folder, "node0")
    assert Enrolment.load(folder.enrolment_file).clients == [1]  # the policies state their numbers
    with pytest.raises(ConfigError, match="node1 is the only node"):
        remove(folder, "node1")
    secure = create(tmp_path / "secure", 3, policy={"trust": ["distributed"]})
    with pytest.raises(ConfigError, match="list their peers"):
        add(secure, "clinic", {})
    said = CliRunner().invoke(app, ["remove", str(secure.path), "node1"])
    assert "list their peers in every policy" in str(said.exception)
    assert Enrolment.load(secure.enrolment_file).clients == [0, 1, 2]


@pytest.mark.slow
def test_a_federation_that_lives_on(tmp_path, monkeypatch):
    """Real processes: a renewed authority, a rotated key and one more node, then a run."""
    monkeypatch.setattr(certificates, "_AUTHORITY_DAYS", 400)
    changes = ["model.hidden=[8]", "training.epochs=1", "federation.rounds=1"]
    folder = create(tmp_path / "lab", 1, example=recipes.load("nodes", changes))
    recipe = recipes.load(
        "nodes", [*changes, "privacy.epsilon=3"]
    )  # two runs fit into the policies
    try:
        processes.up(folder)
        renew(folder)
        renew(folder, switch=True)
        rotate_keys(folder)
        rotate_keys(folder, switch=True)
        with np.load(folder.node("node0").path / "data" / "examples.npz") as arrays:
            np.savez(tmp_path / "more.npz", **arrays)
        options = {"path": str(tmp_path / "more.npz"), "classes": 10}
        shape = list(folder.node("node0").service.policy().data.shape)
        assert add(folder, "clinic", options | {"shape": shape}) == 1
        processes.down(folder)
        processes.up(folder)
        lines: list[str] = []
        result = submit.run(folder, recipe, say=lines.append)
        assert result["rounds"] == 1
        assert any("round 1: 2 nodes asked" in line for line in lines), lines
        remove(folder, "node0")
        assert not [role for role in process_record.running(folder) if role.startswith("node0")]
        lines.clear()
        result = submit.run(folder, recipe, say=lines.append)  # client 1
        assert result["rounds"] == 1
        assert any("round 1: 1 nodes asked" in line for line in lines), lines
    finally:
        processes.down(folder)
