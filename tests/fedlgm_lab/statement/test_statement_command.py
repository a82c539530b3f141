"""`fedlgm statement`: every format, what only the operator sees, and what is refused."""

from __future__ import annotations

import html
import json
import stat
from pathlib import Path

import pytest
from federations import tiny_values
from typer.testing import CliRunner

from fedlgm_lab.statement import statement_page
from simulations import launch
from simulations.cli import app
from simulations.config import recipe as recipes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = tiny_values()
    values["statement"] = {"purpose": "a <b>test</b> | of pages", "responsible": "data office"}
    values["run"] |= {"audit": True}
    folder = tmp_path_factory.mktemp("statement") / "run"
    launch.simulate(recipes.Recipe.model_validate(values), run_dir=folder, trackers=[])
    return folder


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["statement", *map(str, arguments)])


def test_markdown_and_html_give_every_answer(run):
    statement = json.loads(invoke(run, "--format", "json").stdout)
    markdown, page = invoke(run).stdout, invoke(run, "--format", "html").stdout
    for answer in (statement["attack"], statement["guarantee"], "data office", "not declared"):
        assert answer.replace("|", "\\|") in markdown
        assert html.escape(answer) in page
    assert "<b>test" not in page
    assert "\\<b\\>test\\</b\\> \\| of pages" in markdown
    assert page.startswith("<!doctype html>")


def test_a_row_for_the_registry(run):
    row = json.loads(invoke(run, "--format", "registry").stdout)
    assert row["model"] == "Central"
    assert row["unit"] == "client-level"
    assert row["epsilon"] > 0
    assert row["year"] is None


def test_the_audit_is_the_operators(run, tmp_path):
    assert "not audited" in invoke(run).stdout
    file = tmp_path / "statement.md"
    said = invoke(run, "--private", "--out", file)
    assert said.exit_code == 0
    assert "epsilon at least" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_run_of_a_study_says_that_its_settings_may_be_chosen(run, tmp_path):
    study = tmp_path / "grid"
    (study / "runs").mkdir(parents=True)
    (study / "study.json").write_text("{}")
    (study / "runs" / "one").symlink_to(run)
    told = json.loads(invoke(study / "runs" / "one", "--format", "json").stdout)
    assert told["searched"].startswith("a run of the study grid")


def test_what_cannot_be_is_refused(run, tmp_path):
    said = invoke(run, "--format", "pdf")
    assert said.exit_code != 0
    assert invoke(tmp_path / "nowhere").exit_code != 0


def test_no_character_of_an_answer_is_markup():
    text = statement_page.to_markdown("a|b", {"c": [("d*", "`e` [f](g) <h>")]})
    assert "| d\\* | \\`e\\` \\[f\\](g) \\<h\\> |" in text
