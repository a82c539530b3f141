"""Every how-to page begins with a block that can be pasted into an empty folder, and runs in under
a minute on an idle machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from patience import LIMIT_S

from tests.support.forked import ForkedCommand, forget

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
_IMPORTS_S = 4.0
"""Of each process: the imports that a forked one does not repeat."""


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


def commands(code: str) -> list[list[str]]:
    """The arguments of each line, if all are `fedlgm` commands that need no shell; else nothing.

    Ray does not survive a fork of a process that has used it."""
    if re.search(r"[*$|<>;&]|\bray\b", code):
        return []
    lines = [words for line in code.splitlines() if (words := shlex.split(line, comments=True))]
    return [words[1:] for words in lines] if all(words[0] == "fedlgm" for words in lines) else []


def run_forked(kind: str, code: str, folder: Path) -> list[tuple[int, str, str]]:
    """Status and output of each command of a block or of its Python, in the folder, in processes
    that import the library afresh. What it imports is there: to import that takes seconds.

    A block that needs a shell gives an empty list."""

    def enter() -> None:
        os.chdir(folder)
        sys.path.insert(0, "")
        forget()

    def run_code() -> None:
        exec(compile(code, "block.py", "exec"), {"__name__": "__main__"})

    def run_command() -> None:
        import_module("simulations.entry").main()

    python = kind == "python"
    ended = []
    for number, arguments in enumerate([[]] if python else commands(code)):
        said, main = folder.with_name(f"said-{number}"), run_code if python else run_command
        ended.append(ForkedCommand(said, *arguments, before=enter, main=main).end())
        if ended[-1][0]:
            break
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(PAGES.keys() - RUN_ELSEWHERE))
def test_the_block_runs(page: str, short_path: Path) -> None:
    """Its processor time is bounded: the wall time depends on what else runs."""
    kind, code, _ = first_block(page)
    folder = short_path / "empty"
    folder.mkdir()
    start, begun = os.times(), time.monotonic()
    ended = run_forked(kind, code, folder)
    if not ended:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-e", "-c", code], cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, timeout=LIMIT_S,
        )  # fmt: skip
        ended = [(done.returncode, done.stdout, done.stderr)]
    status, out, err = ended[-1]
    assert status == 0, err or out
    end = os.times()
    used = end.children_user + end.children_system - start.children_user - start.children_system
    assert min(used, time.monotonic() - begun) < _SECONDS - _IMPORTS_S * len(ended)
