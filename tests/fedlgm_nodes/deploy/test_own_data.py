"""From an operator's own tables to an approved, reported run: the page's commands, as written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from patience import LIMIT_S
from typer.testing import CliRunner

import simulations
from fedlgm.errors import FedlgmError
from fedlgm_nodes.deploy import deployment_commands, own_data, processes
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.server_entry import DeployedAssembly, recipe_for_nodes, work_of
from fedlgm_nodes.service.work import Work
from simulations.config import recipe as recipes
from simulations.runs.recorder import measure

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/own-data-on-nodes.md"
_FEDLGM = f'fedlgm() {{ "{sys.executable}" -m simulations.cli "$@"; }}\n'


def write_tables(folder: Path) -> None:
    rng = np.random.default_rng(3)
    for name, count in (("north", 200), ("south", 150), ("public", 120)):
        x = rng.normal([50, 6], [20, 2], size=(count, 2))
        finding = np.where(x[:, 0] / 20 + x[:, 1] / 2 > 5.5, "malignant", "benign")
        rows = {"age": x[:, 0].round(1), "dose": x[:, 1].round(2), "finding": finding}
        pandas.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)


def shell(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", _FEDLGM + script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )


def end(lab: Path) -> None:
    """Stop the deployment in a folder, if there is one."""
    if lab.exists():
        processes.down(DeploymentFolder.open(lab))


def watch_until(folder: Path, words: str) -> None:
    """`fedlgm deploy status --watch` until it says these words."""
    command = ["timeout", str(LIMIT_S), sys.executable, "-m", "simulations.cli"]
    command += ["deploy", "status", "lab", "--watch"]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as watch:
        assert any(words in line for line in watch.stdout or ())
        watch.terminate()


@pytest.mark.slow
def test_eight_commands_from_own_tables_to_an_approved_and_reported_run(tmp_path, run):
    """Then a run whose recipe names no public rows, which the nodes' approval covers."""
    write_tables(tmp_path)
    _, *blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert sum(len(block.splitlines()) for block in blocks) == 8
    init, up = blocks[0].split("\n", 1)
    # for the second run
    twice = "sed -i 's/^epsilon = 8.0/epsilon = 16.0/' lab/nodes/*/service/policy.toml"
    try:
        begun = shell(tmp_path, f"{init}\n{twice}\n{up}")
        assert begun.returncode == 2, begun.stderr
        watch_until(tmp_path, "SuperLink answers, 2 of 2 nodes connected")
        digests = dict(re.findall(r"(node\d) refuses it \(the work (\w{16}) waits", begun.stderr))
        assert digests.keys() == {"node0", "node1"}
        script = blocks[1]
        for name, digest in digests.items():
            script = script.replace(f"DIGEST-OF-{name.upper()}", digest)
        done = shell(tmp_path, f"set -e\n{script}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "columns: age, dose" in done.stdout
        assert "10 of 10 rounds are done" in done.stderr
        folder = DeploymentFolder.open(tmp_path / "lab")
        (result,) = folder.runs.glob("*/result.json")
        assert json.loads(result.read_text())["accuracy"] > 0.8
        assert "quality of findings" in (tmp_path / "report.html").read_text()
        text = (folder.path / "recipe.toml").read_text()
        bare = "".join(line for line in text.splitlines(True) if not line.startswith("test_file"))
        assert bare != text
        (folder.path / "bare.toml").write_text(bare)
        done = shell(tmp_path, "fedlgm deploy run lab/bare.toml lab --set model.seed=2")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        end(tmp_path / "lab")
    (file,) = set(folder.runs.glob("*/result.json")) - {result}
    found = json.loads(file.read_text())
    assert found["metrics"] == {}
    assert 0 < found["epsilon"] <= 8.0
    status, out, err = run("report", file.parent)
    assert status == 0, err
    said = "not evaluated: no test rows"
    assert said in done.stdout
    assert said in out
    assert said in file.with_name("report.html").read_text()
    assert run("export", file.parent, "--format", "onnx")[0] == 0
    assert run("predict", file.with_name("model.onnx"), tmp_path / "north.csv")[0] == 0


def test_without_public_rows_init_states_the_work_that_the_nodes_accept(tmp_path):
    write_tables(tmp_path)
    files = [part for name in ("north", "south") for part in ("--data", f"{tmp_path / name}.csv")]
    options = [*files, "--target", "finding", "--unit", "example"]
    made = CliRunner().invoke(deployment_commands.app, ["init", str(tmp_path / "lab"), *options])
    assert made.exit_code == 0, made.output
    folder = DeploymentFolder(tmp_path / "lab")
    recipe = recipe_for_nodes(recipes.load(folder.path / "recipe.toml"), 2)
    work = work_of(recipe)
    assert work["table"] == {"inputs": ["age", "dose"], "labels": ["benign", "malignant"]}
    for node in ("node0", "node1"):
        Work.parse(work, folder.node(node).service.policy())
    assembly = DeployedAssembly(recipe)
    assert measure(assembly, assembly.model.module(), 0) == {}


def test_the_server_of_a_table_reads_only_public_rows(tmp_path):
    write_tables(tmp_path)
    values = ["data.name=table", f"data.test_file={tmp_path / 'public.csv'}"]
    values += ["data.target=finding", "data.standardise=test", "run.seed=none"]
    recipe = recipe_for_nodes(recipes.load("nodes", values), 2)
    table = work_of(recipe)["table"]
    assert (table["inputs"], table["labels"]) == (["age", "dose"], ["benign", "malignant"])
    assert recipe_for_nodes(recipe, 2) == recipe
    gone = recipes.load("nodes", [*values, f"data.file={tmp_path / 'private.csv'}"])
    assert work_of(recipe_for_nodes(gone, 2)) == work_of(recipe)


STATED = ("data.name=table", "data.target=finding", 'data.inputs=["age", "dose"]', "run.seed=none")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (STATED[:2], r"data\.inputs: list the columns"),
        (STATED, r"data\.labels: list the classes"),
        ((*STATED, "data.classes=2", "data.standardise=test"), r"data\.standardise: needs public"),
        ((*STATED, "data.classes=2", "run.patience=2"), r"run\.patience: needs public"),
        ((*STATED, "data.classes=2", "data.standardise={agee=[50, 20]}"), "did you mean 'age'"),
    ],
)
def test_a_table_without_test_rows_states_columns_and_classes(values, message):
    with pytest.raises(FedlgmError, match=message):
        DeployedAssembly(recipe_for_nodes(recipes.load("nodes", values), 2)).model.module()


def test_a_table_without_test_rows_has_the_model_and_work_of_one_with_them(tmp_path):
    write_tables(tmp_path)
    rows = [f"data.test_file={tmp_path / 'public.csv'}", "data.standardise={age=[50, 20]}"]
    figures, named = "data.standardise={age=[50, 20]}", 'data.labels=["benign", "malignant"]'
    given = recipe_for_nodes(recipes.load("nodes", [*STATED, *rows]), 2)
    stated = recipe_for_nodes(recipes.load("nodes", [*STATED, figures, named]), 2)
    assert recipe_for_nodes(stated, 2) == stated
    assert work_of(stated) == work_of(given)
    models = [DeployedAssembly(recipe).model for recipe in (given, stated)]
    assert models[0].initial().equal(models[1].initial())
    assert models[1].data.dataset.columns is not None
    assert measure(DeployedAssembly(stated), models[1].module(), 0) == {}
    with pytest.raises(FedlgmError, match=r"data\.test_file: name"):
        simulations.simulate("nodes", overrides=[*STATED, named], run_dir=tmp_path / "run")


def test_nodes_whose_rows_have_other_classes_get_no_recipe(tmp_path):
    write_tables(tmp_path)
    tables = [pandas.read_csv(tmp_path / f"{name}.csv") for name in ("north", "south")]
    assert own_data.agree(_describe(tmp_path, tables))
    tables[1] = tables[1][tables[1]["finding"] == "benign"]
    assert not own_data.agree(_describe(tmp_path, tables))


def _describe(folder: Path, tables: list[pandas.DataFrame]) -> list[dict[str, Any]]:
    for name, table in zip(("north", "south"), tables, strict=True):
        table.to_csv(folder / f"{name}.csv", index=False)
    return [
        own_data.describe(folder / f"{name}.csv", labels="finding") for name in ("north", "south")
    ]
