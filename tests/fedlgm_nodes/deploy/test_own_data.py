"""From an operator's own tables to an approved, reported run: the page's commands, as written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from patience import LIMIT_S

from fedlgm.errors import ConfigError
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.server_entry import recipe_for_nodes, work_of
from simulations.config import recipe as recipes

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
def test_eight_commands_from_own_tables_to_an_approved_and_reported_run(tmp_path):
    write_tables(tmp_path)
    _, *blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert sum(len(block.splitlines()) for block in blocks) == 8
    try:
        begun = shell(tmp_path, blocks[0])
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
        # Another order of the columns, which the model could not tell, is refused.
        recipe = folder.path / "recipe.toml"
        text = recipe.read_text()
        recipe.write_text(re.sub(r'"age",\s+"dose"', '"dose", "age"', text))
        assert recipe.read_text() != text
        other = shell(tmp_path, "fedlgm deploy run lab/recipe.toml lab")
        assert other.returncode == 2
        assert "the work's features are not those of [data] in this node's policy" in other.stderr
    finally:
        shell(tmp_path, "fedlgm deploy down lab")


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
    with pytest.raises(ConfigError, match=r"data\.test_file: name"):
        recipe_for_nodes(recipes.load("nodes", ["data.name=table", "data.target=finding"]), 2)
