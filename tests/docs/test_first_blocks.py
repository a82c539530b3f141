"""Every how-to page begins with a block that can be pasted into an empty folder, and runs in under
a minute on an idle machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import LIMIT_S

ROOT = Path(__file__).parents[2]
PAGES = {
    page.stem: page.read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs" / "how-to").glob("*.md"))
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_ELSEWHERE = {"run-real-nodes"}
"""Its commands, in less than the same time: `fedlgm_nodes/deploy/test_tutorial.py`."""
_HEAD = 20
"""Lines above which the block begins."""
_SECONDS = 60.0


def first_block(page: str) -> tuple[str, str, int]:
    """Kind, content and line of a page's first block; an example's file is read."""
    found = BLOCK.search(PAGES[page])
    assert found is not None
    code = re.sub(
        r'--8<-- "(.*?)"', lambda name: (ROOT / name[1]).read_text(encoding="utf-8"), found[2]
    )
    return found[1], code, PAGES[page][: found.start()].count("\n")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_a_block_without_placeholders(page: str) -> None:
    kind, code, line = first_block(page)
    assert kind in ("bash", "python", "")
    assert line < _HEAD
    assert not re.search(r"^    \w", "\n".join(PAGES[page].splitlines()[:line]), re.MULTILINE)
    assert not re.search(r"\b(?:RUN|DIR|FILE|KEY|FOLDER)\b|\.\.\.|^\$ ", code)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(PAGES.keys() - RUN_ELSEWHERE))
def test_the_block_runs(page: str, short_path: Path) -> None:
    """Its processor time is bounded: the wall time depends on what else runs."""
    kind, code, _ = first_block(page)
    command = [sys.executable, "-c", code] if kind == "python" else ["bash", "-e", "-c", code]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    start = os.times()
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=short_path, env=environment, capture_output=True, text=True, check=False,
            timeout=LIMIT_S,
        )  # fmt: skip
    finally:
        if (short_path / "lab").is_dir():  # a deployment, whose processes go on
            down = [sys.executable, "-m", "simulations.cli", "deploy", "down", "lab"]
            subprocess.run(down, cwd=short_path, env=environment, check=True)
    assert done.returncode == 0, done.stderr or done.stdout
    end = os.times()
    used = end.children_user + end.children_system - start.children_user - start.children_system
    assert min(used, time.monotonic() - begun) < _SECONDS
