"""The benchmark that kills processes of a deployment: its check of charges, and three kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kills
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.server_entry import REPORT
from tests.support.patience import LIMIT_S

ROOT = Path(__file__).parents[2]


def test_answers_without_a_row(short_path: Path) -> None:
    folder = create(short_path / "l", 1)
    run = folder.runs / "nodes-001"
    (run / "private").mkdir(parents=True)
    log = folder.logs / "node0-service.log"
    log.write_text("listening\n")
    assert kills.charges(folder, run) == {"rows": 0, "answers": 0, "uncharged": 0}
    line = "round 2 of run '{}': {} release 1, epsilon 0.5 of 8 spent\n"
    log.write_text(line.format("nodes-001", "new") + line.format("another", "new"))
    assert kills.charges(folder, run) == {"rows": 0, "answers": 1, "uncharged": 1}
    (run / "private" / REPORT).write_text(json.dumps({"round": 2, "answered": ["node0"]}))
    folder.positions_file.write_text(json.dumps({"0": {"seq": 1, "head": "ab"}}))
    assert kills.charges(folder, run)["uncharged"] == 3


@pytest.mark.slow
def test_a_kill_under_each_trust_model_changes_no_model(tmp_path: Path) -> None:
    out = tmp_path / "kills.jsonl"
    command = [sys.executable, "-m", "benchmarks.kills", "--out", str(out)]
    command += ["--nodes", "3", "--seed", "3"]
    for often in (3, 3):  # the second call has nothing left to do
        done = subprocess.run(
            [*command, "--kills", str(often)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=3 * LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in out.read_text().splitlines()]
    assert [outcome["trust"] for outcome in outcomes] == ["local", "central", "distributed"]
    assert all(outcome["right"] and outcome["answers"] >= 9 for outcome in outcomes)


def test_the_page_shows_the_kept_outcomes() -> None:
    kept = (ROOT / "docs/results/kills.jsonl").read_text(encoding="utf-8").splitlines()
    page = (ROOT / "docs/how-to/run-real-nodes.md").read_text(encoding="utf-8")
    assert kills.table([json.loads(line) for line in kept]) in page
    assert f"answered {len(kept)} runs" in page.replace("\n", " ")
