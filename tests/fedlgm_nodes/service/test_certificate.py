"""A node's statement of its ledger, as others check it, and edits that they must refuse."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlgm.errors import RunError
from fedlgm.privacy import events
from fedlgm.privacy.signed import envelope_of
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused
from fedlgm_lab.certificate.verifier.node import describe_node, is_node_statement, verify_node
from fedlgm_nodes.service.certificate import certify_node
from fedlgm_nodes.service.folder import NodeFolder
from simulations import cli
from tests.support.nodes import NodeProcess, ask, make_node

app = cli.app


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> NodeFolder:
    """A node that has made three releases for two runs."""
    folder = make_node(tmp_path_factory.mktemp("certified") / "n", epsilon=20.0)
    process = NodeProcess(folder)
    try:
        for run, round_ in (("first", 1), ("first", 2), ("second", 3)):
            assert ask(folder, run=run, round=round_)[0]["ok"]
    finally:
        process.stop()
    return folder


@pytest.fixture(scope="module")
def certificate(node: NodeFolder) -> bytes:
    return certify_node(node)


def key_of(node: NodeFolder) -> str:
    return str(node.public()["service_key"])


def statement(certificate: bytes) -> dict[str, Any]:
    payload = base64.b64decode(json.loads(certificate)["payload"])
    value: dict[str, Any] = json.loads(payload)
    return value


def test_the_honest_statement_holds(node: NodeFolder, certificate: bytes) -> None:
    assert is_node_statement(certificate)
    told = verify_node(certificate, key_of(node))
    with node.ledger(readonly=True) as ledger:
        spent = ledger.epsilon(told["delta"], "client, replace-one")
    assert spent <= told["epsilon"] <= spent + 2e-6
    assert told["releases"] == 3
    assert {charge["run"]: charge["count"] for charge in told["charges"]} == {
        "first": 2,
        "second": 1,
    }
    lines = describe_node(told)
    assert "does not prove that the ledger names every release" in lines[0]
    assert "an attacker who accepts 1 % false alarms finds at most" in lines[1]
    assert "data" not in told["node"]
    assert "private" not in json.dumps(told)


def _cheaper(value: dict[str, Any]) -> None:
    """Less cost, with the hash written again."""
    told = value["predicate"]
    text = json.dumps(events.encode(events.gaussian_event(100.0)))
    fresh = hashlib.sha256(text.encode()).hexdigest()
    told["events"] = {fresh: text}
    for charge in told["charges"]:
        charge["event"] = fresh


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *parents, name, new = path

    def edit(value: dict[str, Any]) -> None:
        for part in parents:
            value = value[part]
        value[name] = new

    return edit


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "epsilon lowered": (_set("predicate", "epsilon", 0.1), "check 11"),
    "epsilon raised": (_set("predicate", "epsilon", 19.0), "check 11"),
    "delta raised": (_set("predicate", "delta", 0.1), "check 11"),
    "delta lowered": (_set("predicate", "delta", 1e-12), "check 11"),
    "events with less cost": (_cheaper, "check 11"),
    "another unit": (_set("predicate", "unit", "user"), "check 3"),
    "another relation": (_set("predicate", "relation", "add-remove"), "check 3"),
    "a weaker release": (
        _set("predicate", "charges", 0, "protects", "example, add-remove"),
        "check 3",
    ),
    "fewer charges": (_set("predicate", "charges", 0, "count", 0), "check 4"),
    "fewer releases": (_set("predicate", "releases", 2), "check 4"),
    "another node": (_set("predicate", "node", "service_key", "ab" * 32), "check 3"),
    "an unknown field": (_set("predicate", "certified_by", "somebody"), "check 2"),
    "a number as text": (_set("predicate", "epsilon", "8"), "check 2"),
    "an event without its text": (_set("predicate", "events", {}), "check 4"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_the_node_signs_is_refused(
    node: NodeFolder, certificate: bytes, name: str
) -> None:
    edit, check = EDITS[name]
    value = statement(certificate)
    edit(value)
    with pytest.raises(Refused, match=check):
        verify_node(envelope_of(value, node.signer()), key_of(node))


def test_who_signs_matters(node: NodeFolder, certificate: bytes, tmp_path: Path) -> None:
    other = make_node(tmp_path / "other")
    with pytest.raises(Refused, match="not by the named key"):
        verify_node(certificate, key_of(other))
    with pytest.raises(Refused, match="check 3"):
        verify_node(envelope_of(statement(certificate), other.signer()), None)
    with pytest.raises(NotCheckable, match="who signed"):
        verify_node(certificate, None)
    flipped = certificate.replace(b'"sig":"', b'"sig":"A', 1)
    with pytest.raises(Refused, match="check 1"):
        verify_node(flipped, key_of(node))


def test_a_node_without_releases_states_none(tmp_path: Path) -> None:
    fresh = make_node(tmp_path / "fresh")
    told = verify_node(certify_node(fresh), key_of(fresh))
    assert (told["epsilon"], told["releases"], told["attack_rates"]["advantage"]) == (0.0, 0, 0.0)


def test_a_node_for_tests_has_no_certificate(tmp_path: Path) -> None:
    folder = NodeFolder.create(
        tmp_path / "test", {"name": "t", "client": 0, "population": 1}, test_seed=7
    )
    with pytest.raises(RunError, match="have no certificate"):
        certify_node(folder)


def test_the_commands(node: NodeFolder, tmp_path: Path) -> None:
    file, runner = tmp_path / "node.json", CliRunner()
    made = runner.invoke(app, ["node", "certify", str(node.path), "--out", str(file)])
    assert made.exit_code == 0, made.output
    checked = runner.invoke(app, ["verify", str(file), "--key", key_of(node)])
    assert checked.exit_code == 0, checked.output
    assert "3 releases for 2 runs" in checked.output
    assert runner.invoke(app, ["verify", str(file)]).exit_code == 3
    file.write_bytes(file.read_bytes().replace(b"payload", b"payloax", 1))
    assert runner.invoke(app, ["verify", str(file), "--key", key_of(node)]).exit_code == 2
