"""What a stranger reads first: version, citation, where things go."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from typer.testing import CliRunner

import fedlgm
from simulations.cli import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_one():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"fedlgm {fedlgm.__version__}\n")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert (
        re.findall(r"^version: (.*)$", citation, re.MULTILINE)
        == [fedlgm.__version__]
        == [PROJECT["version"]]
    )
    assert f"license: {PROJECT['license']}" in citation


def test_contributing_names_folders_and_targets_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in re.findall(r"`([\w/]+/(?:[\w/]+\.(?:py|md))?)`", text):
        assert (ROOT / path).exists() or (ROOT / "fedlgm" / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
