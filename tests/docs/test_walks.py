"""A run enters the functions that docs/decisions/walks.md lists, those of its first list in order."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from typer.testing import CliRunner

from simulations.cli import app

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^\| \d+ \| `(\S+)` \| `(\w+)` \|", re.MULTILINE)
FURTHER = re.compile(r"^\| `(\S+)` \| `(\w+)` \|", re.MULTILINE)
PAGE = (ROOT / "docs/decisions/walks.md").read_text(encoding="utf-8")
STEPS, OTHERS = STEP.findall(PAGE), FURTHER.findall(PAGE)
MOST_STEPS, MOST_FUNCTIONS, MOST_LINES = 15, 27, 50


def test_a_run_enters_the_listed_functions_in_their_order(tmp_path: Path) -> None:
    listed = {(str(ROOT / file), function) for file, function in STEPS + OTHERS}
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        place = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and place in listed and place not in entered:
            entered.append(place)

    command = ["simulate", "--rounds", "1", "--workers", "1", "--run-dir", str(tmp_path / "run")]
    sys.setprofile(note)
    try:
        result = CliRunner().invoke(app, command)
    finally:
        sys.setprofile(None)
    assert result.exit_code == 0, result.output
    places = [(str(Path(file).relative_to(ROOT)), function) for file, function in entered]
    assert [place for place in places if place in STEPS] == STEPS
    assert set(places) == {*STEPS, *OTHERS}


def test_the_walk_is_short() -> None:
    assert 0 < len(STEPS) <= MOST_STEPS
    assert len({*STEPS, *OTHERS}) <= MOST_FUNCTIONS
    assert f"{len({*STEPS, *OTHERS})} in all" in PAGE
    for file, function in STEPS + OTHERS:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        bodies = [
            node.body[ast.get_docstring(node) is not None :]
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == function
        ]
        lengths = [(body[-1].end_lineno or 0) - body[0].lineno + 1 for body in bodies if body]
        assert max(lengths) <= MOST_LINES, (file, function, lengths)
