"""The nodes of a deployment are the witnesses of its run, and state their own ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm_lab.certificate import signing
from fedlgm_lab.certificate.certify import certify
from fedlgm_lab.certificate.verifier.checks import verify
from fedlgm_lab.certificate.verifier.envelope import NotCheckable
from fedlgm_lab.certificate.verifier.node import verify_node
from fedlgm_nodes.deploy import processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.service.certificate import certify_node
from simulations.config import recipe as recipes

RECIPE = [
    "model.hidden=[8]",
    "training.epochs=1",
    "federation.rounds=2",
    "privacy.max_participations=none",
    "privacy.trust=central",
    "run.keep_releases=true",
]


@pytest.mark.slow
def test_nodes_are_witnesses_of_a_run(tmp_path: Path) -> None:
    recipe = recipes.load("nodes", RECIPE)
    policy = {"epsilon": 90.0, "trust": ["central"]}
    folder = create(tmp_path / "lab", 1, example=recipe, policy=policy)
    try:
        processes.up(folder)
        result = submit.run(folder, recipe)
    finally:
        processes.down(folder)
    signing.create_key(tmp_path / "operator.pem")
    run, node = Path(str(result["run"])), folder.node("node0").service
    certificate = certify(run, tmp_path / "operator.pem").read_bytes()
    held = {
        "certificate": certificate,
        "model": (run / "model.safetensors").read_bytes(),
        "key": signing.public_hex(signing.load_key(tmp_path / "operator.pem")),
        "releases": run / "releases",
    }
    key = str(node.public()["service_key"])
    case = verify(**held, witnesses=[key])  # type: ignore[arg-type]
    assert not case.notes
    with pytest.raises(NotCheckable, match="nobody but the operator vouches"):
        verify(**held)  # type: ignore[arg-type]
    told = verify_node(certify_node(node), key)
    assert told["releases"] == 2  # rate 1: the node took part in both rounds
    assert told["epsilon"] <= 90.0
