"""The nodes of a run sign the heads of its releases, whoever takes part in a round."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from fedlgm import wire
from fedlgm.privacy.signed import anchor_text
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.frames import HEADER
from tests.support.node_grids import NodeFederation
from tests.support.nodes import rows

HEADS = {round_: f"{round_:064x}" for round_ in range(8)}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = NodeFederation(tmp_path_factory.mktemp("anchors"))
    yield made
    for process in made.processes:
        process.stop()


def run_folder(path, name: str) -> Any:
    """The parts of a run's folder from which anchors are made."""
    releases = path / name / "releases"
    releases.mkdir(parents=True)
    chain = [json.dumps({"round": round_, "head": head}) for round_, head in HEADS.items()]
    (releases / "chain.jsonl").write_text("\n".join(chain) + "\n")
    recipe = SimpleNamespace(federation=SimpleNamespace(rounds=7))
    return SimpleNamespace(path=path / name, recipe=lambda: recipe)


def collected(folder) -> list[dict[str, Any]]:
    lines = (folder.path / "releases" / "anchors.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_all_nodes_sign_every_fifth_head_and_the_last(federation, tmp_path) -> None:
    folder = run_folder(tmp_path, "run")
    anchors = federation.grid().anchors(folder)
    assert [anchors.collect(round_) for round_ in range(1, 8)] == [0, 0, 0, 0, 3, 0, 3]
    found = collected(folder)
    assert [anchor["round"] for anchor in found] == [5] * 3 + [7] * 3
    keys = {node.public()["service_key"] for node in federation.folders}
    assert {anchor["by"] for anchor in found} == keys
    for anchor in found:
        protocol.public_key(anchor["by"]).verify(
            bytes.fromhex(anchor["signature"]), anchor_text(anchor["round"], anchor["head"])
        )
    assert [len(rows(node)) for node in federation.folders] == [0, 0, 0]  # it costs nothing


def test_a_node_that_is_away_or_lies_gives_no_anchor(federation, tmp_path) -> None:
    folder = run_folder(tmp_path, "another run")
    grid = federation.grid()

    def fault(client, message, reply):
        header = json.loads(reply.config_records[wire.CONFIG][HEADER])
        if client == 1 and "anchor" in header:
            reply.config_records[wire.CONFIG][HEADER] = json.dumps(header | {"anchor": "00" * 64})
        return reply

    federation.link.fault = fault
    federation.link.offline = {2}
    try:
        assert grid.anchors(folder).collect(5) == 1
    finally:
        federation.link.offline = set()
        federation.link.fault = lambda client, message, reply: reply
    assert [anchor["by"] for anchor in collected(folder)] == [
        federation.folders[0].public()["service_key"]
    ]
