"""Two real nodes, each of which protects its own examples: together they learn, and pay by their
own ledgers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fedlgm_nodes.deploy import processes
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from simulations.config import recipe as recipes
from tests.support.deployed import like_simulated

ROUNDS = 3
SMALL = (
    "federation.clients=2",
    "federation.rate=1.0",
    f"federation.rounds={ROUNDS}",
    "training.steps=20",
    "training.sampling_rate=0.2",
    "training.batch_size=96",
    "training.lr=1.0",
    "privacy.accountant=pld",
    "run.evaluate_every=1",
    "training.kernel=torch",  # as nodes do
)


OPTIONS = {  # of the mechanism, as questions carry them to the nodes
    "flat": (),
    "per layer, bounds from noisy bits": (
        "mechanism.style=per-layer", "mechanism.allocation=snr-consistent", "mechanism.clip=med",
        "mechanism.norms=quantile",
    ),
    "weights from a noisy query": ("mechanism.name=lm-dp-sgd", "mechanism.emphasis=2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentFolder]:
    folder = create(
        tmp_path_factory.mktemp("e") / "lab",
        2,
        example=recipes.load("example-level-federation", SMALL),
        policy={"unit": "example", "epsilon": 60.0},
        test_seed=7,
    )
    try:
        processes.up(folder)
        yield folder
    finally:
        processes.down(folder)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_nodes_that_protect_their_examples_learn_what_the_simulation_learns(lab, tmp_path, options):
    recipe = recipes.load("example-level-federation", [*SMALL, *OPTIONS[options]])
    before = stated(lab)
    deployed = like_simulated(lab, recipe, tmp_path / "simulated")
    # Steps of layers bounded to shares of C are shorter; with noisy figures among them three rounds
    # are few.
    assert deployed["accuracy"] > (
        0.85 if options == "flat" else 0.3
    )  # with client-level privacy few nodes stay near a tenth
    said = stated(lab)
    assert (said["unit"], said["relation"]) == ("example", "add-remove")
    assert said["releases"] - before["releases"] == ROUNDS
    if before["releases"] == 0:
        assert said["epsilon_spent"] == pytest.approx(deployed["epsilon"], rel=1e-3)
    assert said["guarantee"].startswith(
        "proven (example-level, add-remove, each client adds its own noise)"
    )


def stated(lab: DeploymentFolder) -> dict[str, Any]:
    """What `fedlgm node ledger` states of the first node."""
    command = [sys.executable, "-m", "simulations.cli", "node", "ledger"]
    said = subprocess.run(
        [*command, str(lab.node("node0").service.path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = json.loads(said.stdout)
    return figures
