"""People with rows at several real nodes: a run's epsilon is a person's at all of them."""

from __future__ import annotations

import pandas
import pytest
from typer.testing import CliRunner

from fedlgm.errors import ConfigError
from fedlgm_nodes.deploy import deployment_commands, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.server_entry import DeployedAssembly, recipe_for_nodes
from fedlgm_nodes.service.row import protected
from simulations.config import recipe as recipes
from simulations.runs.folder import RunFolder

SMALL = (
    "model.hidden=[8]", "federation.rounds=2", "federation.clients=3", "training.epochs=1",
    "privacy.epsilon=2.0", "privacy.max_participations=2", "federation.overlap=2",
    "federation.rate=1.0", "run.seed=none",
)  # fmt: skip


def test_a_run_states_its_condition_and_needs_noise_for_a_part_of_a_node():
    one, joint = (
        DeployedAssembly(recipe_for_nodes(recipes.load("nodes", values), 3)).privacy.first_plan()
        for values in ((*SMALL, "federation.overlap=1"), SMALL)
    )
    assert joint.facts.overlap == 2
    assert 1.3 < joint.effective_multiplier / one.effective_multiplier < 1.5  # the root of 2
    assert joint.guarantee.status == "conditional"
    assert "nobody having data at more than 2 clients" in joint.guarantee.reason
    central = ("privacy.trust=central", "privacy.max_participations=none")
    for values, message in (
        (central, r"federation\.overlap: .*add-remove.*replace-one"),
        (("deployment.one_node_per_person=true",), "each person counts at one node"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe_for_nodes(recipes.load("nodes", [*SMALL, *values]), 3)


def test_a_deployment_is_made_for_people_at_several_nodes(tmp_path):
    rows = pandas.DataFrame({"age": [52, 61, 40, 33], "ill": ["yes", "no", "yes", "no"]})
    tables = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for table in tables:
        rows.to_csv(table, index=False)
    given = [word for table in tables for word in ("--data", str(table))]
    asked = ["init", str(tmp_path / "lab"), *given, "--target", "ill", "--overlap", "2"]
    assert CliRunner().invoke(deployment_commands.app, asked).exit_code == 0
    folder = DeploymentFolder(tmp_path / "lab")
    assert [folder.node(f"node{i}").service.policy().privacy.overlap for i in (0, 1)] == [2, 2]
    recipe = recipe_for_nodes(recipes.load(str(folder.path / "recipe.toml")), 2)
    assert recipe.federation.overlap == 2
    plain = ["init", str(tmp_path / "plain"), *given, "--target", "ill"]
    assert CliRunner().invoke(deployment_commands.app, plain).exit_code == 0
    node = DeploymentFolder(tmp_path / "plain").node("node0").service
    assert node.policy().privacy.overlap is None
    assert "overlap" not in (tmp_path / "plain" / "recipe.toml").read_text()


def _state(folder: DeploymentFolder, overlaps: dict[str, int]) -> None:
    for name, overlap in overlaps.items():
        file = folder.node(name).service.policy_file
        text = file.read_text()
        file.write_text(text.replace("exact_sums = ", f"overlap = {overlap}\nexact_sums = ", 1))


@pytest.mark.slow
def test_nodes_charge_what_the_run_states_and_refuse_what_they_do_not_know(tmp_path):
    recipe = recipes.load("nodes", SMALL)
    folder = create(tmp_path / "lab", 3, example=recipe, policy={"epsilon": 8.0})
    _state(folder, {"node0": 2, "node1": 2})
    said: list[str] = []
    try:
        processes.up(folder)
        result = submit.run(folder, recipe, say=said.append)
    finally:
        processes.down(folder)
    assert any("node2" in line and "does not say at how many nodes" in line for line in said)
    assert _spent(folder, "node2") == (0.0, 0)
    assert 1.9 < result["epsilon"] <= 2.0
    assert "nobody having data at more than 2 clients" in result["guarantee"]
    assert RunFolder.open(result["run"]).verified_result()["guarantee"] == result["guarantee"]
    for name in ("node0", "node1"):
        assert _spent(folder, name) == (pytest.approx(result["epsilon"], rel=1e-3), 2)


def _spent(folder: DeploymentFolder, name: str) -> tuple[float, int]:
    """Epsilon and number of a node's releases."""
    node = folder.node(name).service
    privacy = node.policy().privacy
    with node.ledger(readonly=True) as ledger:
        return ledger.epsilon(privacy.delta, protected(privacy)), ledger.count()
