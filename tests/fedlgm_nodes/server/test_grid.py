"""What a strategy sees of real nodes: a Grid with one node per client, whatever Flower's side
does."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from flwr.app import MessageType, RecordDict

from fedlgm import wire
from fedlgm.errors import RunError
from tests.support import nodes
from tests.support.node_grids import CLIENTS
from tests.support.nodes import MODEL, NodeProcess, rows


def test_a_round_of_all_nodes(federation):
    model = federation.run(2)
    assert not torch.equal(model, MODEL)
    assert [report.answered for report in federation.reports] == [["n0", "n1", "n2"]] * 2
    assert [len(rows(folder)) for folder in federation.folders] == [2, 2, 2]
    assert set(json.loads(federation.positions.read_text())) == {"0", "1", "2"}


def test_central_trust_where_the_nodes_allow_it(federation):
    with pytest.raises(
        RunError, match=r"refused \(privacy\): a plan for central trust; allowed: local"
    ):
        federation.run(trust="central")
    for client, folder in enumerate(federation.folders):
        federation.processes[client].stop()
        nodes.edit(folder, 'trust = ["local"]', 'trust = ["local", "central"]')
        federation.processes[client] = NodeProcess(folder)
    federation.run(trust="central")
    assert federation.reports[-1].answered == ["n0", "n1", "n2"]
    assert [[row.trust for row in rows(folder)] for folder in federation.folders] == [
        ["central"]
    ] * 3


def test_the_same_round_again_costs_nothing_and_gives_the_same_model(federation):
    assert torch.equal(federation.run(2), federation.run(2))
    assert [len(rows(folder)) for folder in federation.folders] == [2, 2, 2]


def test_a_missing_client_adds_nothing_and_the_denominator_stays(federation):
    whole = federation.run() - MODEL
    parts = []
    for offline in range(CLIENTS):
        federation.link.offline = {offline}
        parts.append(federation.run() - MODEL)
    # Each part lacks one client, over the same denominator: together they hold everybody twice.
    np.testing.assert_allclose(sum(parts).numpy(), 2 * whole.numpy(), atol=1e-4)


def test_the_server_stops_asking_at_its_own_limit(federation):
    federation.run(4, cap=2)
    assert len(federation.link.sent) == 2 * CLIENTS
    assert [len(rows(folder)) for folder in federation.folders] == [2, 2, 2]


def test_nothing_raw_is_asked_for(federation):
    message = federation.grid().create_message(RecordDict(), "train.norms", 2, "1")
    with pytest.raises(RunError, match="nothing raw leaves them"):
        federation.grid().send_and_receive([message])


def test_every_client_has_a_node_to_the_strategy(federation):
    grid = federation.grid()
    federation.link.offline = {0, 1, 2}
    assert grid.get_node_ids() == [2, 3, 4]
    (reply,) = grid.send_and_receive([grid.create_message(RecordDict(), MessageType.QUERY, 3, "q")])
    assert reply.content.config_records[wire.CONFIG][wire.PARTITION] == 1


def test_after_a_node_was_removed_the_others_keep_their_numbers(federation, monkeypatch):
    enrolment = federation.enrolment()
    others = enrolment.model_copy(update={"node": enrolment.node[1:]})
    monkeypatch.setattr(federation, "enrolment", lambda: others)
    monkeypatch.setattr("tests.support.node_grids.CLIENTS", 2)
    federation.run()
    assert federation.reports[0].answered == ["n1", "n2"]
    assert [len(rows(folder)) for folder in federation.folders] == [0, 1, 1]
