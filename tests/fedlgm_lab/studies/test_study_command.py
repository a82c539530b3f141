"""`fedlgm study`: files, grids, the list of bundled studies, mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from diverging import install

from fedlgm import mechanisms
from fedlgm.errors import Notice
from fedlgm_lab.studies import files
from fedlgm_lab.studies.jobs import grid_jobs
from fedlgm_lab.studies.study import base_of
from fedlgm_lab.studies.tables.titles import TITLES
from simulations.config import recipe as recipes

REFERENCES = Path(__file__).parents[3] / "docs" / "references.md"
CHANGES = {
    "federation.clients": 20, "federation.rounds": 2, "federation.rate": 0.5, "privacy.delta": 0.01,
    "privacy.accountant": "rdp", "run.seed": 7, "run.evaluate_every": 1,
}  # fmt: skip


def test_the_command_runs_a_file_and_continues(run, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(
        'recipe = "digits"\nseeds = 2\n[grid]\n'
        'mechanism = ["uniform", {label = "small", name = "uniform", options = {bound = 0.5}}, '
        '"none"]\n'
        "[set]\n"
        + "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in CHANGES.items())
        + '"model.hidden" = [4]\n"training.epochs" = 1\n[quick]\n"federation.rounds" = 1\n'
    )
    status, out, err = run(
        "study", tmp_path / "small.toml", "--quick", "--out", tmp_path / "set", "--json"
    )
    assert status == 0, err
    found = json.loads(out)
    assert [row["method"] for row in found["runs"]] == ["uniform", "small", "none"]
    assert found["cells"][2]["epsilon"] == "inf"
    assert "seconds" not in (tmp_path / "set" / "study.json").read_text()
    status, out, err = run("study", tmp_path / "small.toml", "--quick", "--out", tmp_path / "set")
    assert status == 0, err
    assert "published together" in out
    assert {"runs.csv", "table.tex", "study.svg", "study.json"} <= {
        path.name for path in (tmp_path / "set").iterdir()
    }


def test_a_grid_on_the_command_line_replaces_that_of_a_study_and_not_its_recipe(
    tmp_path: Path,
) -> None:
    small = tmp_path / "small.toml"
    small.write_text(
        'recipe = "digits"\n[grid]\nmechanism = ["uniform"]\n"privacy.epsilon" = [8.0, 2.0]\n'
    )
    for study in (str(small), "004-table-2"):
        with pytest.warns(
            Notice,
            match=r"--grid privacy.epsilon replaces the study's own . values of it; its other",
        ):
            asked = files.requested_study(study, ["privacy.epsilon=1.0"], (), ())
        assert (asked.recipe, asked.grid) == (
            files.load(study).recipe, files.load(study).grid | {"privacy.epsilon": [1.0]},
        )  # fmt: skip


_RANKED = """
from fedlgm import tasks
class Ranked(tasks.Classification):
    def set_metrics(self):
        return {"auc": lambda outputs, targets: float("nan")}
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a study needs --grid"),
        (("004-table-19",), "no study '004-table-19'"),
        (("004-table-3",), "004-table-3 is not a grid of runs; made by: fedlgm study 004-table-2"),
        (("digits", "--grid", "privacy.epsilon"), "--grid takes key=value,value"),
        (("digits", "--grid", "epsilon=1,2"), "did you mean 'privacy.epsilon'"),
        (
            ("digits", "--grid", "mechanism=uniform,uniform"),
            "two mechanisms have the label 'uniform'",
        ),
        (
            (
                "digits",
                "--grid",
                "mechanism=uniform",
                "--seeds=1",
                "--set=task.name=my_ranked:Ranked",
            ),
            "metric 'auc' is nan",
        ),
    ],
)
def test_the_command_says_what_is_wrong_and_writes_nothing(
    run, arguments, message, tmp_path, monkeypatch
) -> None:
    (tmp_path / "my_ranked.py").write_text(_RANKED)
    monkeypatch.syspath_prepend(tmp_path)
    status, _, err = run("study", *arguments, "--out", tmp_path / "set")
    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert not (tmp_path / "set").exists()


def test_bundled_studies_are_listed_and_can_be_planned(run) -> None:
    status, out, _ = run("study", "--list", "--json")
    assert status == 0
    assert set(json.loads(out)) == {*files.names(), *files.elsewhere(), *TITLES}
    _, text, _ = run("study", "--list")
    lines = text.splitlines()
    assert all(sum(line.split()[:1] == [name] for line in lines) == 1 for name in json.loads(out))
    headings, of_a_paper = 4 + 3, 3  # with blank lines; authors and title, mechanisms, recipes
    assert len(lines) == len(json.loads(out)) + headings + of_a_paper * len(files.papers())
    assert all(bool(one.command) != bool(one.why) for one in files.elsewhere().values())
    for name in files.names():
        for quick in (False, True):
            asked = files.requested_study(name, (), (), (), quick)
            assert asked.title
            assert asked.paper
            base, own, options = base_of(asked.recipe, asked.grid, {}, asked.set)
            made = grid_jobs(base, asked.grid | (asked.search or {}), range(1), options, own)
            assert not [job.refused for job in made if job.refused]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["002-figure-7", "003-table-4 --grid privacy.epsilon=8.0"])
def test_bundled_studies_run(words: str, run, tmp_path: Path) -> None:
    status, out, err = run("study", *words.split(), "--quick", "--out", tmp_path / "set", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert {row["status"] for row in found["runs"]} == {"finished"}
    assert len(found["runs"]) == len(found["cells"])


@pytest.mark.parametrize(
    "command", [("study", "--grid", "mechanism=uniform,gaussian"), ("compare",)]
)
def test_a_study_whose_runs_all_diverge_says_so_and_keeps_them(
    run, command, tmp_path, monkeypatch
) -> None:
    """It said "no metric 'accuracy' in this study; it has accuracy"."""
    install(tmp_path / "modules", monkeypatch)
    changes = CHANGES | {"federation.rounds": 3, "federation.server_optimizer": "my_diverging:Step"}
    sets = [f"--set={key}={value}" for key, value in changes.items()]
    name, *options = command
    status, out, err = run(
        name, "digits", *options, "--seeds=1", *sets, "--out", tmp_path / "set", "--json"
    )
    assert (status, json.loads(out)["error"]["kind"]) == (2, "RunError")
    said = err.splitlines()[-1]
    assert said.startswith("error: no run of the study is finished: training diverged in round 3")
    assert len(list((tmp_path / "set").glob("*/ledger.sqlite"))) >= 2


def test_tables_that_cannot_be_written_leave_the_runs(run, tmp_path) -> None:
    """It said "[Errno 13] Permission denied: 'set/study.json.partial'"."""
    (tmp_path / "set" / "study.json").mkdir(parents=True)
    sets = [f"--set={key}={value}" for key, value in (CHANGES | {"federation.rounds": 1}).items()]
    status, _, err = run(
        "study",
        "digits",
        "--grid",
        "mechanism=uniform",
        "--seeds=1",
        *sets,
        "--out",
        tmp_path / "set",
    )
    assert status == 2
    assert re.search(
        r"error: cannot write the study's tables to .*: it is a folder; its finished runs are kept",
        err.splitlines()[-1],
    )
    assert len(list((tmp_path / "set").glob("*/result.json"))) == 1


def test_every_table_and_figure_of_the_papers_has_a_row() -> None:
    rows = {*files.names(), *files.elsewhere(), *TITLES}
    for number, paper in files.papers().items():
        kinds = {"figure": paper.figures, "table": paper.tables}
        for kind, count in kinds.items():
            for index in range(1, count + 1):
                name = f"{number}-{kind}-{index}"
                assert any(row == name or row.startswith(f"{name}-") for row in rows), name
    for entry in (*map(files.load, files.names()), *files.elsewhere().values()):
        assert not re.search(r"(Tables|Figures) |(Table|Figure) .*(Table|Figure)", entry.paper)


def test_the_list_names_the_papers_and_their_parts_exist(run) -> None:
    status, out, _ = run("study", "--list")
    assert status == 0
    for number, paper in files.papers().items():
        assert paper.title.split(":")[0] in " ".join(out.split())
        assert number in out
        assert f"(arXiv {paper.arxiv})" in out
        assert f"(arXiv {paper.arxiv}; studies {number})" in REFERENCES.read_text(encoding="utf-8")
        assert set(paper.mechanisms) <= set(mechanisms.names(None))
        assert set(paper.recipes) <= set(recipes.names())


@pytest.mark.usefixtures("undrawn")
def test_a_claim_that_turns_with_the_learning_rate_is_fragile(run, tmp_path: Path) -> None:
    """At one server rate a small bound hardly moves the model. At a rate searched for each bound it
    is level."""
    changes = CHANGES | {"federation.rounds": 3, "run.evaluate_every": 3}
    body = (
        'recipe = "digits"\nseeds = 3\n[grid]\n'
        '"mechanism.bound" = [0.01, 1.0]\nmechanism = ["gaussian"]\n'
        '[tune]\n"federation.server_lr" = [0.2, 20.0]\n'
        "[set]\n"
        + "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in changes.items())
        + '"model.hidden" = [4]\n"training.epochs" = 1\n"privacy.epsilon" = 8.0\n'
        '[[claims]]\nsays = "A larger bound is more accurate"\na = "gaussian"\n'
        'along = "mechanism.bound"\n'
    )
    (tmp_path / "turning.toml").write_text(body)
    status, out, err = run("study", tmp_path / "turning.toml", "--tuned", "--out", tmp_path / "set")
    assert status == 0, err
    assert "fragile: A larger bound is more accurate" in out
    assert "tuned: accuracy" in out
    assert (tmp_path / "set" / "tuned" / "study.json").is_file()


def test_a_study_without_values_to_tune_is_refused(run, tmp_path: Path) -> None:
    status, _, err = run("study", "004-figure-8", "--tuned", "--out", tmp_path / "set")
    assert status == 2
    assert "[tune]" in err
    assert not (tmp_path / "set").exists()
