"""Flower's own commands on the bundled app: what they show, and an older Flower beside this one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from patience import LIMIT_S, wait_until

from simulations import launch
from simulations.config import recipe as recipes
from simulations.engines.flower import APP
from simulations.engines.superlink import private_superlink
from simulations.runs.folder import RunFolder

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/flower-app.md").read_text(encoding="utf-8")
SMALL = "federation.clients=20; federation.rounds=2; federation.rate=0.5; data.partition=iid"
WARNING = re.compile(r".*(?:\bWARN(?:ING)?\b|Warning:).*", re.IGNORECASE)

pytestmark = pytest.mark.slow


def option(command: str, name: str) -> str:
    """Value of an option as the page gives it to the command."""
    text = next(
        block
        for block in re.findall(r"^```\w*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        if command in block
    )
    words = shlex.split(text.replace("\\\n", " "))
    return words[words.index(name) + 1]


def run_config(folder: Path) -> str:
    return f'set="{SMALL}" nodes="workers" simulated=true run-dir="{folder}"'


def reference(folder: Path) -> str:
    """The model of the same federation in this process."""
    recipe = recipes.load(None, SMALL.split("; "))
    return str(launch.simulate(recipe, engine="local", run_dir=folder)["model_sha256"])


def test_apply_shows_no_warnings(tmp_path):
    command = [
        sys.executable,
        "-m",
        "simulations.cli",
        "apply",
        "coordinate-descent",
        "--set",
        "passes=1",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "coordinate-descent" in done.stdout
    assert WARNING.findall(done.stdout) == []
    assert done.stderr == ""


def test_flwr_run_shows_no_warnings(tmp_path, monkeypatch):
    assert "FLWR_LOG_LEVEL=ERROR" in PAGE
    monkeypatch.setenv("FLWR_LOG_LEVEL", "ERROR")
    federation = option("flwr run", "--federation-config").replace(
        "num-supernodes=10", "num-supernodes=2"
    )
    log = tmp_path / "superlink.log"
    with private_superlink(log) as flwr:
        run_id = flwr.submit(
            APP, "--federation-config", federation, "--run-config", run_config(tmp_path / "run")
        )
        wait_until(RunFolder(tmp_path / "run").result_file.is_file)  # the log is silent
        wait_until(lambda: flwr.status(run_id).startswith("finished"))
        shown = flwr.log(run_id)
    assert "round 2: " in shown
    assert "ledger head" in shown
    assert WARNING.findall(shown) == []


def test_flower_simulation_of_flower_1_26_beside_this_one(tmp_path):
    """The very same app under an older Flower: the same model, bit by bit."""
    target = tmp_path / "flwr-1.26"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        "flwr==1.26.1",
    ]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(
            f"flwr 1.26.1 cannot be installed here: {installed.stderr.strip().splitlines()[-1:]}"
        )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(target), str(ROOT)]),
        "FLWR_LOG_LEVEL": "ERROR",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(tmp_path / "flower"),
        "RAY_ADDRESS": "local",
    }
    command = [str(target / "bin/flower-simulation"), "--app", str(APP), "--num-supernodes", "2"]
    command += ["--run-config", run_config(tmp_path / "run")]
    command += ["--backend-config", option("flower-simulation", "--backend-config")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "round 2: " in done.stdout
    assert WARNING.findall(done.stdout + done.stderr) == []
    result = RunFolder.open(tmp_path / "run").result() or {}
    assert result["rounds"] == 2
    assert result["model_sha256"] == reference(tmp_path / "reference")
