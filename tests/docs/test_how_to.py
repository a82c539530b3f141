"""The code of the how-to pages runs as it is printed, block after block: Python, and the commands of some pages."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.cli import app
from simulations.config import recipe as recipes

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```(python|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ fedlgm (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", ["own-model", "own-data", "own-task", "text", "example-level"])
def test_the_pages_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((PAGES / f"{page}.md").read_text(encoding="utf-8"))
    assert blocks
    namespace: dict[str, object] = {"__name__": "page"}
    for kind, code in blocks:
        if kind == "toml":
            tomllib.loads(code)
        elif not code.startswith("--8<--"):  # an example that stands in a file of its own
            exec(compile(code, f"{page}.md", "exec"), namespace)


@pytest.mark.slow
def test_the_example_level_pages_commands_and_recipes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (PAGES / "example-level.md").read_text(encoding="utf-8")
    commands = COMMAND.findall(page)
    assert len(commands) == 8
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
        assert done.exit_code == 0, (command, done.output)
    for kind, code in BLOCK.findall(page):
        if kind == "toml":
            Path("page.toml").write_text(code, encoding="utf-8")
            recipes.load("page.toml")
