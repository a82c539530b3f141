"""The code of the how-to pages runs as it is printed, block after block: Python, and the commands
of some pages."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pandas
import pytest
from matplotlib import pyplot
from typer.testing import CliRunner

import simulations
from fedlgm.errors import ConfigError
from fedlgm_lab.recommend import sweep
from fedlgm_nodes.policy import Distributed, Policy
from simulations import cli
from simulations.cli import app
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```(python|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ fedlgm (.*)$", re.MULTILINE)


COMMANDS = re.compile(r"^(?:    )?fedlgm (.*)$", re.MULTILINE)


INDENTED = re.compile(r"^    fedlgm (.*)$", re.MULTILINE)


@pytest.mark.slow
def test_the_commands_of_correlated_noise_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed, but for fewer rounds; the policy's key is one."""
    text = (PAGES / "correlated-noise.md").read_text(encoding="utf-8")
    commands = [shlex.split(command) for command in COMMANDS.findall(text)]
    assert [command[0] for command in commands] == ["plan", "simulate", "simulate"]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        short = [] if command[0] == "plan" else ["--set", "federation.rounds=12", "--json"]
        monkeypatch.setattr(sys, "argv", ["fedlgm", *command, *short])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
    for name in ("correlated", "turns"):
        result = RunFolder.open(tmp_path / "runs" / name).result()
        assert result is not None
        assert result["epsilon"] <= 8
    for kind, block in BLOCK.findall(text):
        assert kind == "toml"
        (section, values) = next(iter(tomllib.loads(block).items()))
        assert Policy.model_fields[section].annotation(**values).min_separation == 10


def test_the_commands_of_distributed_trust_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed, but for two rounds; the keys of the page make a recipe of one's own a distributed
    one."""
    text = (PAGES / "distributed-trust.md").read_text(encoding="utf-8")
    commands = [shlex.split(command) for command in COMMANDS.findall(text.partition("\n## ")[0])]
    assert [command[0] for command in commands] == ["plan", "simulate"]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        short = [] if command[0] == "plan" else ["--set", "federation.rounds=2", "--json"]
        monkeypatch.setattr(sys, "argv", ["fedlgm", *command, *short])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
    result = RunFolder.open(tmp_path / "runs" / "distributed").result()
    assert result is not None
    assert result["readers_epsilon"] < result["epsilon"] <= 8
    block, policy = [block for kind, block in BLOCK.findall(text) if kind == "toml"]
    for key in ("ab", "cd"):
        policy = policy.replace("...", key * 32, 1)
    rules = Distributed(**tomllib.loads(policy)["distributed"])
    assert (rules.min_cohort, rules.max_colluders) == (6, 1)
    changes = {
        f"{section}.{key}": value
        for section, rows in tomllib.loads(block).items()
        for key, value in rows.items()
    }
    own = recipes.load("digits", {**changes, "federation.clients": 30, "federation.rate": 1.0})
    assert Assembly(own, planned=True).privacy.first_plan().facts.shares is not None


@pytest.mark.parametrize(
    "page",
    [
        *(
            "epsilon",
            "check",
            "own-model",
            "own-data",
            "own-task",
            "extend",
            "text",
            "layer-risk",
            "tune",
            "secure-aggregation",
            "random-allocation",
            "certificate",
        ),
        *(
            pytest.param(page, marks=pytest.mark.slow)
            for page in (
                *(
                    "example-level",
                    "adaptive-allocation",
                    "compare",
                    "study",
                    "hugging-face",
                    "adapters",
                ),
                *("tables", "private-statistics"),
            )
        ),
    ],
)
def test_the_pages_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    earlier = re.match(r"# .*\n\nThis page continues \[.*?\]\((.*?)\)", text)
    before = (PAGES / earlier[1]).read_text(encoding="utf-8") if earlier else ""
    blocks = BLOCK.findall(before) + BLOCK.findall(text)
    assert blocks
    namespace: dict[str, object] = {"__name__": "page"}
    for kind, code in blocks:
        if kind == "toml":
            tomllib.loads(code)
        elif not code.startswith("--8<--"):  # an example that stands in a file of its own
            exec(compile(code, f"{page}.md", "exec"), namespace)


@pytest.mark.slow
def test_the_example_level_pages_commands_and_recipes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.slow
def test_the_commands_of_layer_risk_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for fewer passes and steps."""
    monkeypatch.chdir(tmp_path)
    commands = [
        shlex.split(found)
        for found in INDENTED.findall((PAGES / "layer-risk.md").read_text(encoding="utf-8"))
    ]
    assert [command[0] for command in commands] == ["risk", "risk", "simulate"]
    short = {
        "risk": ["risk.epochs=2", "risk.adversary_epochs=2"],
        "simulate": ["federation.rounds=3"],
    }
    for command in commands:
        changes = [text for change in short[command[0]] for text in ("--set", change)]
        engine = ["--engine", "local"] if command[0] == "simulate" else []
        done = CliRunner().invoke(app, [*command, *changes, *engine], catch_exceptions=False)
        assert done.exit_code == 0, (command, done.output)


@pytest.mark.slow
def test_the_commands_of_compare_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for fewer rounds and seeds; the first one a second time, as after Ctrl-C."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PAGES.parent / "examples"))
    commands = [
        shlex.split(found)
        for found in INDENTED.findall((PAGES / "compare.md").read_text(encoding="utf-8"))
    ]
    assert [command[0] for command in commands] == ["compare", "compare", "compare", "report"]
    short = ["--set", "federation.rounds=2", "--seeds", "1"]
    for command in (commands[0], *commands):
        done = CliRunner().invoke(
            app, [*command, *(short if command[0] == "compare" else [])], catch_exceptions=False
        )
        assert done.exit_code == 0, (command, done.output)
        if command[0] == "compare":
            assert "privacy spent" in done.output
    folder = tmp_path / "runs" / "compare-digits"
    named = {"runs.csv", "table.tex", "study.svg", "study.json"}
    assert named <= {file.name for file in folder.iterdir()}
    assert {file.name for file in folder.iterdir() if file.is_dir()} == {
        f"{method}-eps8-dirichlet-run0"
        for method in ("snr-consistent", "uniform", "gaussian", "own_mechanism-InverseSize")
    }
    assert len([file for file in (tmp_path / "runs" / "budgets").iterdir() if file.is_dir()]) == 8


@pytest.mark.slow
def test_the_commands_of_adaptive_allocation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed, but for fewer rounds and seeds."""
    monkeypatch.chdir(tmp_path)
    text = (PAGES / "adaptive-allocation.md").read_text(encoding="utf-8")
    commands = [shlex.split(found) for found in INDENTED.findall(text)]
    assert [command[0] for command in commands] == [
        "plan",
        "simulate",
        "simulate",
        "compare",
        "simulate",
    ]
    for command in commands:
        short = ["--set", "federation.rounds=11"] if command[0] == "simulate" else []
        if command[0] == "compare":
            short = ["--set", "federation.rounds=2", "--seeds", "1"]
        done = CliRunner().invoke(app, [*command, *short], catch_exceptions=False)
        assert done.exit_code == 0, (command, done.output)


def test_the_command_of_the_sweep_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for one budget and one round."""
    monkeypatch.setattr(sweep, "EPSILONS", (8.0,))
    (command,) = INDENTED.findall((PAGES / "recipe.md").read_text(encoding="utf-8"))
    short = ["--set", "federation.rounds=1", "--set", "federation.rate=1.0"]
    done = CliRunner().invoke(app, [*shlex.split(command), *short], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "10,000" in done.output


def test_the_figure_of_the_layers_is_one_call(tmp_path: Path) -> None:
    text = (PAGES / "report.md").read_text(encoding="utf-8")
    (call,) = re.findall(r"only the signal-to-noise ratio of the layers, use `(.*?)`\.", text)
    result = simulations.simulate(
        "digits", run_dir=tmp_path / "run", overrides={"federation.rounds": 1}
    )
    axes = eval(call, {"pandas": pandas, "result": result})
    layers = result.layers()
    assert [bar.get_height() for bar in axes.patches] == [row["snr"] for row in layers]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        row["layer"] for row in layers
    ]
    axes.figure.savefig(tmp_path / "snr.pdf")
    pyplot.close(axes.figure)


def test_a_test_needs_as_many_seeds_as_the_page_says() -> None:
    text = (PAGES / "study.md").read_text(encoding="utf-8")
    sentence = (
        "**A test needs at least two seeds** of both methods in a cell; `difference` refuses fewer."
    )
    assert sentence in text
    with pytest.raises(ConfigError, match="at least two seeds"):
        simulations.difference([0.9], [0.8])
    assert simulations.difference([0.9, 0.8], [0.8, 0.75]).p < 1
