"""Correlated noise on real nodes: the server keeps rounds apart, each node holds it to that, and
says what it cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedlgm.privacy.events import decode
from fedlgm_nodes.deploy.create import create
from simulations.config import recipe as recipes
from tests.support.deployed import deployed_like_simulated

pytestmark = pytest.mark.slow
RECIPE = (
    "model.hidden=[8]",
    "training.epochs=1",
    "federation.clients=2",
    "federation.rounds=5",
    "federation.rate=none",
    "federation.cohort=1",
    "federation.sampling=min-separation",
    "privacy.noise=banded",
    "privacy.trust=central",
    "privacy.max_participations=none",
    "privacy.relation=zero-out",
    "run.seed=7",
)


def test_a_deployed_run_is_the_simulations_and_nodes_take_part_as_far_apart_as_it_says(
    tmp_path: Path,
) -> None:
    asked = recipes.load("nodes", RECIPE)
    folder = create(tmp_path / "lab", 2, example=asked, test_seed=7, policy={"epsilon": 500.0})
    for i in range(2):
        policy = folder.node(f"node{i}").service.policy_file
        policy.write_text(policy.read_text().replace('trust = ["local"]', 'trust = ["central"]'))
    deployed = deployed_like_simulated(folder, asked, tmp_path / "simulated")
    assert "nobody takes part twice within 2 rounds" in deployed["guarantee"]
    taken = []
    for i in range(2):
        with folder.node(f"node{i}").service.ledger(readonly=True) as ledger:
            rows = ledger.rows()
        rounds = sorted(row.round for row in rows)
        assert (np.diff(rounds) >= 2).all()
        taken += rounds
        # Under replace-one, and as long as a column of C: its unit norm.
        for row in rows:
            cost = decode(json.loads(row.event)).noise_multiplier
            assert cost == pytest.approx(deployed["noise_multiplier"] / 2, rel=1e-6)
    assert sorted(taken) == list(range(1, 6))
    assert not list(
        Path(deployed["run"]).glob("nodes.*")
    )  # who took part is among the private files
    answered = (Path(deployed["run"]) / "private" / "nodes.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in answered] == list(range(1, 6))
