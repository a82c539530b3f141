"""Recipes that name a user's own model, data, task and partition; and the bundled recipes of
text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bible import bible_bytes

from fedlgm import data
from fedlgm.errors import ConfigError, DataError, FedlgmError
from fedlgm_lab.reports.partition import partition_report
from fedlgm_lab.reports.report import write_report
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.own import Own

MODULE = '''
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedlgm import Mechanism
from fedlgm.training.tasks import Task


class Net(nn.Module):
    """Two inputs: numbers [n, 5] and tokens [n, 4]. Dropout is a layer and a function."""

    def __init__(self, width=4, rate=0.0):
        super().__init__()
        self.drop, self.rate = nn.Dropout(rate), rate
        self.embedding, self.norm = nn.Embedding(7, width), nn.LayerNorm(width + 5)
        self.outputs = nn.Linear(width + 5, 1)

    def forward(self, numbers, tokens):
        words = self.drop(self.embedding(tokens)).mean(1)
        hidden = self.norm(torch.cat([numbers, words], dim=1))
        return self.outputs(nn.functional.dropout(hidden, self.rate, self.training))


class Quantile(Task):
    """Pinball loss."""

    name = "quantile"

    def __init__(self, level=0.5):
        self.level = level

    def losses(self, outputs, targets):
        error = targets - outputs[:, 0]
        return torch.maximum(self.level * error, (self.level - 1) * error)


def load():
    rng = np.random.default_rng(5)
    numbers, tokens = rng.standard_normal((90, 5)), rng.integers(7, size=(90, 4))
    y = numbers.sum(1) + tokens.mean(1)
    x = (numbers, tokens)
    first = (numbers[:20], tokens[:20])
    clients = [list(range(i, 90, 12)) for i in range(11)] + [[]]
    return {"train": (x, y), "test": (first, y[:20]), "clients": clients, "name": "mine"}


class Strict(Quantile):
    def __init__(self, level=0.5):
        raise LookupError("no such level")


@dataclass(frozen=True)
class Rule(Mechanism):
    bound: float = 1.0

    def __post_init__(self):
        raise LookupError("no such bound")


class Offline:
    def __init__(self, *_):
        raise ConnectionError("no server")


number = 3


def halves(data, clients, seed, *, reverse=False):
    order = np.arange(len(data.train_y))
    return np.array_split(order[::-1] if reverse else order, clients)
'''
VALUES: dict[str, Any] = {
    "name": "own",
    "data": {"name": "my_own_things:load", "partition": "natural"},
    "model": {"name": "my_own_things:Net", "width": 3},
    "task": {"name": "my_own_things:Quantile", "level": 0.8},
    "federation": {"clients": 12, "rounds": 3, "rate": 0.5},
    "training": {"lr": 0.1, "batch_size": 4},
    "mechanism": {"name": "snr-consistent"},
    "privacy": {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp"},
    "run": {"seed": 3, "block_size": 3},
}
SAME = ("model_sha256", "loss", "metrics", "epsilon", "ledger_head")


def own(**sections: dict[str, Any]) -> recipes.Recipe:
    """The recipe with changed sections; the options of another model or task are its own."""
    kept = {
        name: {} if "name" in section else VALUES.get(name, {})
        for name, section in sections.items()
    }
    kept["data"] = VALUES["data"]
    return recipes.Recipe.model_validate(
        {**VALUES, **{name: {**kept[name], **section} for name, section in sections.items()}}
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with the user's module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_own_things.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("my_own_things", None)


@pytest.mark.parametrize("vectorize", ["off", "on", "auto"])
@pytest.mark.usefixtures("undrawn")
def test_everything_may_be_a_users_own(here: Path, vectorize: str) -> None:
    result = launch.simulate(own(training={"vectorize": vectorize}), run_dir=here / "run")
    assert result["metrics"] == {"loss": result["loss"]}
    assert result["headline"] == "loss"
    assert "accuracy" not in result
    assert result["epsilon"] <= 8
    assert result["guarantee_status"] == "proven"
    write_report(here / "run")
    assert "test loss" in (here / "run" / "report.html").read_text()
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["metrics"] for row in rows][-1] == result["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), [("ray", 2), ("flower", 1)])
def test_engines_agree_on_a_users_own(
    here: Path, engine: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, whose draws change the model, and users who have several clients."""
    monkeypatch.setenv("PYTHONPATH", f"{here}:{':'.join(filter(None, sys.path))}")
    plain = own(federation={"users": 5}, privacy={"unit": "user"})
    recipe = plain.with_values(model={"rate": 0.3})
    expected = launch.simulate(recipe, run_dir=here / "local")
    result = launch.simulate(recipe, engine=engine, workers=workers, run_dir=here / "run")
    assert result["unit"] == "user"
    assert [result[name] for name in SAME] == [expected[name] for name in SAME]
    without = launch.simulate(plain, run_dir=here / "without")
    assert without["model_sha256"] != result["model_sha256"]


def test_own_arrays_and_other_sets_leave_the_interval_of_pixels_behind(tmp_path: Path) -> None:
    file = tmp_path / "unit.toml"
    file.write_text('extends = "digits"\n[data]\npixels = [0, 1]\n')
    raw = recipes.read(file)
    x, y = np.zeros((4, 1, 8, 8)), np.arange(4)
    Own(data=data.load({"train": (x, y), "test": (x, y)})).into(raw)
    assert "pixels" not in raw["data"]
    assert recipes.load(file).data.pixels == (0.0, 1.0)
    assert recipes.load(file, ["data.name=synthetic"]).data.pixels is None
    assert recipes.load(file, ["data.name=mnist", "data.pixels=[0, 2]"]).data.pixels == (0.0, 2.0)


def test_own_partitions(here: Path) -> None:
    section = {"partition": "my_own_things:halves", "reverse": True}
    assembly = Assembly(own(data=section, federation={"clients": 4}))
    assert assembly.data.sizes.tolist() == [23, 23, 22, 22]
    report = partition_report(own(), here / "partition.png")
    assert report["sizes"]["empty"] == 1
    assert [sum(row) for row in report["histogram"]][-2:] == [7, 0]


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        (
            {"model": {"name": "my_own_things:Nett"}},
            ConfigError,
            r"model 'my_own_things:Nett': .* did you mean 'Net'",
        ),
        (
            {"model": {"name": "my_absent:Net"}},
            ConfigError,
            r"module 'my_absent' cannot be imported: there is no module",
        ),
        (
            {"model": {"depth": 3}},
            ConfigError,
            r"model 'my_own_things:Net': unknown option 'depth'",
        ),
        (
            {"model": {"name": "torch.nn:BatchNorm1d", "num_features": 5}},
            ConfigError,
            r"buffer 'running_mean'",
        ),
        (
            {"model": {"name": "torch.nn:Linear", "in_features": 5, "out_features": 1}},
            ConfigError,
            r"does not take a batch",
        ),
        ({"data": {"name": "my_own_things:Net"}}, DataError, r"must be a fedlgm.data.DataSet"),
        ({"data": {"name": "my_own_things:absent"}}, ConfigError, r"data 'my_own_things:absent'"),
        (
            {"data": {"partition": "my_own_things:absent"}},
            ConfigError,
            r"data.partition 'my_own_things:absent'",
        ),
        (
            {"federation": {"clients": 5}},
            ConfigError,
            r"data.partition: 'mine' has 12 clients of its own",
        ),
        (
            {"task": {"name": "my_absent:Task"}},
            ConfigError,
            r"task 'my_absent:Task': module 'my_absent'",
        ),
        (
            {"model": {"name": "my_own_things:number"}},
            ConfigError,
            r"^model 'my_own_things:number' is neither an",
        ),
        (
            {"task": {"name": "my_own_things:Strict"}},
            ConfigError,
            r"^task 'my_own_things:Strict': LookupError: no such level \(my_own_things.py, line \d+\)$",
        ),
        (
            {"mechanism": {"name": "my_own_things:Rule"}},
            ConfigError,
            r"^mechanism 'my_own_things:Rule': LookupError: no such bound \(my_own_things.py, line \d+\)$",
        ),
        (
            {"run": {"trackers": ["my_own_things:Offline"]}},
            ConfigError,
            r"^run.trackers 'my_own_things:Offline': ConnectionError: no server \(my_own_things.py",
        ),
        (
            {"task": {"name": "regression", "level": 1}},
            ConfigError,
            r"task 'regression': unknown option 'level'",
        ),
    ],
)
def test_what_does_not_work_is_refused_before_anything_is_written(
    here: Path, sections: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        launch.simulate(own(**sections), run_dir=here / "run")
    assert isinstance(caught.value, FedlgmError)
    assert not (here / "run").exists()


def test_a_task_that_does_not_fit_is_refused_before_anything_is_written(here: Path) -> None:
    values = {**VALUES, "task": {"name": "classification"}}
    with pytest.raises(DataError, match=r"needs integer targets .* use the task 'regression'"):
        launch.simulate(recipes.Recipe.model_validate(values), run_dir=here / "run")
    assert not (here / "run").exists()


@pytest.mark.parametrize("name", ["text-gru", "text-transformer"])
def test_recipes_of_text_run_on_a_small_text(name: str, tmp_path: Path) -> None:
    (tmp_path / "bible.data").write_bytes(bible_bytes())
    changes = [
        f"data.dir={tmp_path}",
        "federation.clients=3",
        "federation.rounds=2",
        "federation.rate=0.9",
        "run.evaluate_every=1",
        "privacy.delta=1e-2",
        "privacy.accountant=rdp",
    ]
    result = launch.simulate(recipes.load(name, changes), run_dir=tmp_path / "run")
    assert set(result["metrics"]) == {"loss", "perplexity", "accuracy"}
    assert result["headline"] == "perplexity"
    assert 0 < result["epsilon"] <= 8
    assert result["guarantee_status"] == "proven"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds"), [("text-gru", 4), ("text-transformer", 6)])
def test_recipes_of_text_learn_from_the_real_text(name: str, rounds: int, tmp_path: Path) -> None:
    try:
        data.load("bible-kjv-chapters")
    except DataError as missing:
        pytest.skip(str(missing))
    changes = [f"federation.rounds={rounds}", "run.evaluate_every=1"]
    changes += ["privacy.accountant=rdp"]
    launch.simulate(recipes.load(name, changes), run_dir=tmp_path / "run")
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-1]["metrics"]["perplexity"] < 0.6 * rows[0]["metrics"]["perplexity"]
