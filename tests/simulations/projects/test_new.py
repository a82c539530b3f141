"""`fedlgm new`: each project runs at once, and its own test passes."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from simulations.projects import new as projects
from tests.support.forked import ForkedCommand

CASES = [
    (kind, protection.unit, protection.trust)
    for kind in projects.names()
    for protection in projects.kind_of(kind).protections
]
QUICK = [
    ("pytorch", "example", "central"),
    ("hospitals", "example", "central"),
    ("opacus", "example", "central"),
    ("flower", "client", "central"),
]


@pytest.mark.parametrize(
    ("kind", "unit", "trust"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_projects_own_test_passes(run, tmp_path, kind, unit, trust):
    status, out, err = run(
        "new", kind, "my-project", "--unit", unit, "--trust", trust, "--epsilon", "4", "--json"
    )
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert (told["unit"], told["trust"], told["epsilon"]) == (unit, trust, 4.0)
    files = sorted(file.name for file in Path("my-project").iterdir())
    assert told["files"] == files
    assert sum(name.endswith(".py") for name in files) == 2  # the code and its test
    assert len((Path("my-project") / "README.md").read_text().splitlines()) <= 10
    if kind == "flower":
        return  # `docs/test_first_blocks.py` runs the project's test, as the page's block does
    os.chdir("my-project")
    options = ["-q", "-p", "no:cacheprovider"]
    pytests = ForkedCommand(tmp_path / "tested", *options, main=lambda: sys.exit(pytest.main()))
    status, out, err = pytests.end()
    assert status == 0, out + err


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in projects.names() if kind != "flower"])
def test_a_projects_command_prints_epsilon_and_guarantee(run, tmp_path, kind):
    assert run("new", kind, "mine")[0] == 0
    command, script = projects.kind_of(kind).run.split()
    assert command == "python"
    os.chdir("mine")
    program = ForkedCommand(
        tmp_path / "ran", main=lambda: runpy.run_path(script, run_name="__main__")
    )
    status, out, err = program.end()
    assert status == 0, err
    assert "epsilon 8.00" in out
    assert "proven (" in out


def test_a_folder_with_files_is_refused_and_left_alone(run):
    Path("thesis").mkdir()
    (Path("thesis") / "train.py").write_text("mine")
    status, _, err = run("new", "opacus", "thesis")
    assert status == 2
    assert "thesis already exists and is not an empty folder: name a new folder" in err
    assert [file.name for file in Path("thesis").iterdir()] == ["train.py"]
    Path("empty").mkdir()
    assert run("new", "opacus", "empty")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hospital", "p"], "unknown kind of project 'hospital'; did you mean 'hospitals'?"),
        (["hospitals", "p", "--unit", "client"], "few to protect a whole site"),
        (["flower", "p", "--trust", "local"], "it offers --unit client --trust central"),
        (["opacus", "p", "--epsilon", "0"], "epsilon must be finite and positive"),
    ],
)
def test_mistakes_are_answered_in_one_message(run, arguments, said):
    status, _, err = run("new", *arguments)
    assert status == 2
    assert said in " ".join(err.split())
    assert not Path("p").exists()


def test_on_a_terminal_unit_and_trust_are_asked_before_epsilon(run, monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("example\nlocal\n2\n"))
    status, out, _ = run("new", "pytorch", "asked")
    assert status == 0
    order = [out.index(text) for text in ("must stay hidden", "adds the noise", "Epsilon (smaller")]
    assert order == sorted(order)
    code = (Path("asked") / "train.py").read_text()
    assert '"example-level-federation"' in code
    assert '"privacy.epsilon": 2' in code
