"""The tutorial's commands, as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S

PAGE = Path(__file__).parents[3] / "docs/how-to/run-real-nodes.md"


@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path, capsys):
    """The page says how long it takes; here it is told only, since a busy machine must not fail
    it. The processor time of the commands is bounded, as `docs/test_first_blocks.py` bounds that of
    the other pages' first blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [line.split()[2] for block in blocks for line in block.splitlines()] == [
        "init", "up", "status", "run", "ledger", "status", "down",
    ]  # fmt: skip
    script = f'set -e\nfedlgm() {{ "{sys.executable}" -m simulations.cli "$@"; }}\n' + "\n".join(
        blocks
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PAGE.parents[2]), os.environ.get("PYTHONPATH", "")])
    }
    started, before = time.monotonic(), os.times()
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        after = os.times()
        used = after.children_user + after.children_system
        used -= before.children_user + before.children_system
        assert min(used, time.monotonic() - started) < 60
        with capsys.disabled():
            print(f"\nthe tutorial's commands took {time.monotonic() - started:.0f} s")
        assert "997 of 1000 releases left" in done.stdout
        assert "epsilon 8 of 8 spent" in done.stdout
        assert "NOT PRIVATE" not in done.stdout
    finally:
        if (tmp_path / "lab").exists():
            subprocess.run(
                [sys.executable, "-m", "simulations.cli", "deploy", "down", str(tmp_path / "lab")],
                env=environment, check=False, capture_output=True,
            )  # fmt: skip
    for one in psutil.process_iter():
        try:
            assert str(tmp_path) not in one.cwd()
        except psutil.Error:
            continue
