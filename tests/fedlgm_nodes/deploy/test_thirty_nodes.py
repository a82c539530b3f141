"""Thirty nodes of the digits: their services, through the real rounds of a server, give the
simulation's model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.server_entry import (
    DeployedAssembly,
    recipe_for_nodes,
    remaining_need,
    work_of,
)
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.server.answers import AnswerCheck
from fedlgm_nodes.server.enrolment import Enrolment, key_digest
from fedlgm_nodes.server.questions import NodeQuestions
from fedlgm_nodes.server.round import RoundReport
from fedlgm_nodes.server.secure_grid import EnrolledSum, SecureGrid
from simulations import launch
from simulations.config import recipe as recipes
from simulations.runs import new_folder
from simulations.runs.server import serve
from tests.support.node_grids import QUICK, Link, pem
from tests.support.nodes import edit, rows
from tests.support.secure_nodes import Served

NODES, ROUNDS, SEED = 30, 2, 7


@pytest.mark.slow
def test_thirty_services_give_the_simulations_model(tmp_path, monkeypatch):
    """As a deployment runs it, but for Flower's processes; the nodes' noise is that of the
    simulation's seed."""
    asked = recipes.load(
        "distributed-digits",
        [f"federation.rounds={ROUNDS}", f"privacy.max_participations={ROUNDS}", f"run.seed={SEED}"],
    )
    policy = {"trust": ["distributed"], "server_key": ""}
    lab = create(tmp_path / "lab", NODES, example=asked, policy=policy, test_seed=SEED)
    folders = [lab.node(f"node{client}").service for client in range(NODES)]
    for folder in folders:
        edit(folder, "reply_every_seconds = 0.5", "reply_every_seconds = 0.0")
    served = Served(folders)
    monkeypatch.setattr(frames, "exchange", served.exchange)
    try:
        keys, reports, lines = [pem() for _ in folders], list[RoundReport](), list[str]()
        enrolled = Enrolment.load(lab.enrolment_file).model_dump()["node"]
        enrolment = Enrolment.model_validate(
            {"node": [one | {"flower_key": key_digest(keys[one["client"]])} for one in enrolled]}
        )
        recipe = recipe_for_nodes(asked, NODES, test=True)
        assembly, folder = DeployedAssembly(recipe), new_folder.create(tmp_path / "run", recipe)
        nodes = SecureGrid(
            Link(folders, keys), enrolment, NodeQuestions(folder.path.name, work_of(recipe)),
            AnswerCheck(enrolment, assembly.model.layers, test=True),
            patience=replace(QUICK, give_up_seconds=120.0, round_seconds=120.0), say=lines.append,
            on_round=reports.append,
        )  # fmt: skip
        nodes.require(remaining_need(assembly, folder.path.name, done=0))
        result = serve(nodes, assembly, folder, "deployment", nodes=EnrolledSum(simulated=True))
        assert [len(report.answered) for report in reports] == [NODES] * ROUNDS
        assert [len(rows(one)) for one in folders] == [ROUNDS] * NODES
    finally:
        served.close()
    simulated = launch.simulate(asked, engine="local", run_dir=tmp_path / "simulated")
    for figure in ("model_sha256", "accuracy", "epsilon", "readers_epsilon", "guarantee"):
        assert result[figure] == simulated[figure], json.dumps([result[figure], simulated[figure]])
