"""Simulations from Python: users' own objects in every engine, and results that show themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import simulations
from fedlgm import mechanisms
from fedlgm.errors import RunError
from fedlgm_lab.audits import Audit
from fedlgm_lab.audits.runs.targets import audit_run
from simulations.arguments import resolve
from simulations.config import recipe as recipes
from simulations.config.own import own_of
from simulations.runs.folder import RunFolder
from tests.support.own_objects import DATA, OBJECTS, SMALL, Alike, Net, X, Y, halves

ROOT = Path(__file__).parents[2]


def readme_code() -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]


def readme_result(engine: str) -> simulations.RunResult:
    names: dict[str, Any] = {}
    torch.manual_seed(0)  # the model's own initial weights are the run's
    seeded = readme_code().replace(
        'overrides=["', 'overrides=["run.seed=7", "'
    )  # own data have no seed
    exec(seeded.replace("data=data,", f"data=data, engine={engine!r},"), names)
    return names["result"]


def test_the_readmes_lines_train_ones_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = readme_code()
    assert code == (ROOT / "docs" / "examples" / "own_model.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    result = readme_result("local")
    assert 7.9 < result.epsilon <= 8
    assert result.accuracy is not None
    assert result.accuracy > 0.6
    assert [row["round"] for row in result.history] == list(range(result["rounds"] + 1))


def test_users_of_the_data_are_its_clients(tmp_path: Path) -> None:
    """Who says whose each example is must get these users as clients, not a division by label."""
    users = np.array([f"user {i % 25}" for i in range(200)])
    data = DATA | {"users": users}
    result = simulations.simulate(
        model=Net, data=data, overrides=SMALL[1:], run_dir=tmp_path / "run"
    )
    recipe = RunFolder.open(result.folder).recipe()
    assert (recipe.data.partition, recipe.federation.clients) == ("natural", 25)
    fewer = simulations.simulate(model=Net, data=data, overrides=SMALL, run_dir=tmp_path / "fewer")
    recipe = RunFolder.open(fewer.folder).recipe()
    assert (recipe.data.partition, recipe.federation.clients) == ("natural", 20)


def test_partitions_and_optimizers_may_be_given_by_name(tmp_path: Path) -> None:
    given = {"model": Net, "data": DATA, "partition": "iid", "server_optimizer": "momentum"}
    result = simulations.simulate(**given, overrides=SMALL, run_dir=tmp_path / "run")
    recipe = RunFolder.open(result.folder).recipe()
    assert (recipe.data.partition, recipe.federation.server_optimizer) == ("iid", "momentum")


def test_targets_that_are_no_labels_are_divided_at_random_unless_the_caller_says_otherwise() -> (
    None
):
    real, classes = {"train": (X, X[:, 0]), "test": (X, X[:, 0])}, DATA
    regression = ["task.name=regression"]
    for data, texts, overrides, expected in (
        (real, regression, (), "iid"),
        (real, regression, {"data.partition": "LinearPartitioner"}, "LinearPartitioner"),
        (real, [*regression, "data.partition=dirichlet"], (), "dirichlet"),
        (classes, (), (), "dirichlet"),
        (classes, regression, (), "iid"),  # the task makes them real
        (real, (), {"task.name": "regression"}, "iid"),
        (real, (), {"task.name": "regression", "data.partition": "dirichlet"}, "dirichlet"),
    ):
        found, _ = resolve(None, {"data": data}, texts, overrides)
        assert found.data.partition == expected, (texts, overrides)
    assert (
        resolve(None, {"data": real, "task": lambda o, t: (o[:, 0] - t) ** 2})[0].data.partition
        == "iid"
    )


@pytest.mark.slow
def test_the_readmes_lines_train_alike_on_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_ray: None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert readme_result("local")["model_sha256"] == readme_result("ray")["model_sha256"]


def test_a_result_shows_itself(tmp_path: Path) -> None:
    result = simulations.simulate(model=Net, data=DATA, overrides=SMALL, run_dir=tmp_path / "run")
    module = result.model()
    accuracy = (module(torch.tensor(X[:50]).float()).argmax(1).numpy() == Y[:50]).mean()
    assert accuracy == pytest.approx(result.accuracy)
    page = result._repr_html_()
    assert result.guarantee.split(":")[0] in page
    assert all(row["layer"] in page for row in result.layers())
    assert "epsilon" in repr(result)


def test_a_run_of_objects_is_audited_with_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = simulations.simulate(**OBJECTS, overrides=[*SMALL, "run.audit=true"], run_dir=run)
    found = result.audit()
    assert found.passed
    assert found.method == "one-run-gaussian"
    assert found.epsilon_lower <= result.epsilon == found.epsilon_reported
    with pytest.raises(RunError, match=r"simulations.resume\(.*\).audit\(\)"):
        audit_run(run, Audit())
    with pytest.raises(RunError, match="another mechanism"):
        audit_run(run, Audit(), own=own_of(OBJECTS | {"mechanism": Alike("other", bound=0.25)}))


def test_a_registered_mechanism_is_written_into_the_recipe(tmp_path: Path) -> None:
    method = mechanisms.get("snr-consistent", bound=0.5)
    result = simulations.simulate(
        mechanism=method, overrides=[*SMALL, "federation.rounds=1"], run_dir=tmp_path / "run"
    )
    recipe = simulations.load_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.mechanism.build() == method
    assert result["mechanism"] == "snr-consistent"


@pytest.mark.parametrize("given", [{"partition": halves}, {"model": Net}])
def test_what_takes_no_other_data_leaves_the_sets_own_keys(given: dict[str, Any]) -> None:
    raw = recipes.read("fashion-mnist")
    own_of(given).into(raw)
    assert raw["data"]["pixels"] == [0, 1]


def test_other_data_leave_the_keys_of_a_folder_of_images_behind() -> None:
    raw = recipes.read("lm-dp-sgd-celeba")
    own_of({"data": DATA}).into(raw)
    assert raw["data"] == {"name": "<DataSet>", "partition": "iid"}


def test_no_epsilon_stands_without_its_guarantee(tmp_path: Path) -> None:
    result = simulations.simulate(
        **OBJECTS, overrides=(text for text in SMALL), run_dir=tmp_path / "run"
    )
    assert re.search(r"epsilon \d.*, proven \(client-level, add-remove", repr(result))


def test_overrides_may_be_a_mapping(tmp_path: Path) -> None:
    changes = {
        "federation.rounds": 1,
        "run.seed": None,
        "mechanism.name": "gaussian",
        "model.hidden": [8],
    }
    changes |= {"federation.clients": 20, "privacy.accountant": "rdp"}
    recipe = simulations.simulate(overrides=changes, run_dir=tmp_path / "run")._assembly.recipe
    assert (recipe.federation.rounds, recipe.run.seed, recipe.mechanism.name) == (
        1,
        None,
        "gaussian",
    )
    assert recipe.model.options["hidden"] == [8]


def test_own_data_inherit_neither_name_nor_public_seed_of_a_bundled_recipe(tmp_path: Path) -> None:
    unseeded = [text for text in SMALL if not text.startswith("run.seed")]
    result = simulations.simulate(
        model=Net, data=DATA, overrides=unseeded, run_dir=tmp_path / "run"
    )
    assert (result["recipe"], result._assembly.recipe.run.seed) == ("own-data", None)
    assert not result["noise_reproducible"]
    given = recipes.load("digits", ["run.seed=7"]).model_copy(
        update={"name": "mine"}
    )  # the caller states both
    result = simulations.simulate(
        given, model=Net, data=DATA, overrides=unseeded, run_dir=tmp_path / "given"
    )
    assert (result["recipe"], result._assembly.recipe.run.seed) == ("mine", 7)


def test_an_own_mechanism_is_shown_by_its_name(tmp_path: Path) -> None:
    given = {"model": Net, "data": DATA, "mechanism": Alike("by depth")}
    result = simulations.simulate(**given, overrides=SMALL, run_dir=tmp_path / "run")
    assert result["mechanism"] == "<by depth>"
