"""Paths that no file can have end in one sentence, wherever they enter, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from click import Argument, Command, Group
from torch import nn
from typer.testing import CliRunner

import simulations
from fedlgm import data
from fedlgm.errors import FedlgmError
from fedlgm.files import path_of
from fedlgm.training.models.weights import load_weights_
from fedlgm_lab.attacks.inception import InceptionFeatures
from fedlgm_lab.audits import Audit
from fedlgm_lab.audits.runs.targets import audit_run
from simulations.cli import app
from simulations.exports.export import export, load_model, metadata
from simulations.pretrain import pretrain

IMPOSSIBLE = {
    "zero byte": "a\0b",
    "half a character": "a\ud800b",
    "bytes that are not UTF-8": "a\udcffb",
}
WRITTEN = {
    "data": {
        "train": (np.ones((9, 2)), np.arange(9) % 2),
        "test": (np.ones((9, 2)), np.arange(9) % 2),
    }
}
TEXT = simulations.load_recipe("text-adapters")


def with_paths(
    command: Command, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Words and paths' parameters of every command that takes a path."""
    if isinstance(command, Group):
        for name, inner in command.commands.items():
            yield from with_paths(inner, (*words, name))
    elif found := [one for one in command.params if one.type.name in ("path", "file", "directory")]:
        yield words, found


COMMANDS = {
    " ".join((*words, one.name)): (*words, *(() if isinstance(one, Argument) else one.opts[:1]))
    for words, found in with_paths(typer.main.get_command(app))
    for one in found
}


def test_the_commands_with_paths_are_found():
    assert len(COMMANDS) >= 20
    assert ("deploy", "init") in COMMANDS.values()


@pytest.mark.parametrize("path", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_refuses_it(words, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, [*words, path])
    assert found.exit_code == 2
    assert isinstance(found.exception, SystemExit)
    assert "is not text: it has a zero byte, or is not UTF-8" in " ".join(
        found.output.replace("│", "").split()
    )
    assert list(tmp_path.iterdir()) == []


CALLS: dict[str, Callable[[str], Any]] = {
    "path_of": lambda path: path_of("file", path),
    "simulate": lambda path: simulations.simulate(run_dir=path, **WRITTEN, model=nn.Linear(2, 2)),
    "recipe": simulations.simulate,
    "resume": simulations.resume,
    "study": lambda path: simulations.study(folder=path),
    "tune": lambda path: simulations.tune(folder=path, search={"training.lr": [0.1]}),
    "Study.read": simulations.Study.read,
    "audit": lambda path: audit_run(path, Audit()),
    "standardise": lambda path: simulations.standardise(
        **WRITTEN, low=0, high=1, epsilon=1, delta=1e-6, ledger=path
    ),
    "export": export,
    "export out": lambda path: export("run", out=path),
    "load_model": load_model,
    "metadata": metadata,
    "pretrain": lambda path: pretrain(TEXT, path, steps=1),
    "pretrain text": lambda path: pretrain(TEXT, "base.safetensors", texts=[Path(path)]),
    "load_weights_": lambda path: load_weights_(nn.Linear(2, 2), path),
    "data": lambda path: data.load("mnist", path),
    "InceptionFeatures": InceptionFeatures,
}


@pytest.mark.parametrize("path", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_function_refuses_it(call, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedlgmError):
        call(path)
    assert list(tmp_path.iterdir()) == []


def test_a_result_finds_its_folder_after_the_program_has_changed_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = ["federation.rounds=1", "federation.clients=9"]
    (tmp_path / "run").mkdir()  # an empty folder may exist
    result = simulations.simulate(
        model=nn.Linear(2, 2), **WRITTEN, overrides=changes, run_dir="run"
    )
    call = {
        "model": nn.Linear(2, 2),
        "grid": {"mechanism": ["uniform"]},
        "overrides": changes,
        "seeds": 1,
    }
    study = simulations.study(**WRITTEN, **call, folder="study", progress=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert result.folder == tmp_path / "run"
    assert [row["round"] for row in result.history] == [0, 1]
    assert len(study.history()) == 1
    result.model()
    assert Path(result["run"]).is_dir()
    assert list(Path.cwd().iterdir()) == []


def test_a_tilde_is_the_users_home(tmp_path, monkeypatch):
    """It became a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    changes = ["federation.rounds=1", "federation.clients=9"]
    result = simulations.simulate(
        model=nn.Linear(2, 2), **WRITTEN, overrides=changes, run_dir="~/runs/first"
    )
    assert result.folder == tmp_path / "home" / "runs" / "first"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    with pytest.raises(FedlgmError, match="the user's home is not known"):
        simulations.simulate(model=nn.Linear(2, 2), **WRITTEN, run_dir="~nobody-of-this-name/run")
