"""A run on files: the names of its classes stay with the model, and mistakes are said before
anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from safetensors import safe_open

import simulations
from fedlgm.errors import DataError, RunError
from simulations.config.assembly import Assembly
from simulations.exports import export
from simulations.exports.predict import predict
from simulations.runs.folder import RunFolder
from simulations.runs.provenance import provenance_of
from strategies import AnyNode

SMALL = {
    "model.name": "logistic", "data.name": "table", "data.target": "out", "data.partition": "iid",
    "federation.clients": 10, "federation.rounds": 2, "federation.rate": 0.5, "privacy.delta": 0.01,
    "privacy.accountant": "rdp",
}  # fmt: skip


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    random = np.random.default_rng(0)
    for name, count in (("train", 60), ("test", 20)):
        x = random.normal(size=count)
        names = np.where(x > 0.5, "high", np.where(x < -0.5, "low", "middle"))
        pandas.DataFrame({"a": x, "b": random.normal(size=count), "out": names}).to_csv(
            tmp_path / f"{name}.csv", index=False
        )
    monkeypatch.chdir(tmp_path)
    return SMALL | {"data.file": "train.csv", "data.test_file": "test.csv"}


def test_class_names_are_kept_with_the_model(changes: dict, tmp_path: Path) -> None:
    result = simulations.simulate(
        "digits", overrides=changes, engine="local", run_dir=tmp_path / "run"
    )
    assert result.labels == ["high", "low", "middle"]
    assert export.metadata(tmp_path / "run")["labels"] == result.labels
    result.export(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["labels"]) == result.labels
    assert export.load_model(tmp_path / "run")(torch.zeros(1, 2)).shape == (1, 3)


def test_a_run_is_not_continued_with_another_file_or_other_names(
    changes: dict, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    simulations.simulate("digits", overrides=changes, engine="local", run_dir=run)
    folder = RunFolder.open(run)
    for name in ("train.csv", "test.csv"):
        Path(name).write_text(Path(name).read_text().replace("high", "tall"))
    now = provenance_of(Assembly(folder.recipe()), AnyNode())
    with pytest.raises(
        RunError, match=r"train\.csv is not the training file that .*run began with"
    ):
        folder.provenance.settle(now)
    stored = {key: value for key, value in folder.provenance.read().items() if key != "sources"}
    (run / "provenance.json").write_text(json.dumps(stored))
    with pytest.raises(
        RunError,
        match=r"with the classes high, low, middle: it cannot be .* with low, middle, tall",
    ):
        folder.provenance.settle(now)


def test_a_recipe_may_name_one_file_of_each_site(changes: dict, tmp_path: Path) -> None:
    rows = pandas.read_csv("train.csv")
    Path("sites").mkdir()
    for i, name in enumerate(["b", "a"]):
        rows[i::2].to_csv(f"sites/{name}.csv", index=False)
    files = {"data.file": "sites/*.csv", "data.partition": "natural", "federation.clients": 2}
    run = tmp_path / "run"
    simulations.simulate("digits", overrides=changes | files, engine="local", run_dir=run)
    folder = RunFolder.open(run)
    now = provenance_of(Assembly(folder.recipe()), AnyNode())
    folder.provenance.settle(now)
    rows.to_csv("sites/c.csv", index=False)
    with pytest.raises(RunError, match=r"\*\.csv is not the training file that .*run began with"):
        folder.provenance.settle(provenance_of(Assembly(folder.recipe()), AnyNode()))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("data.target=outcome", "'train' has no column 'outcome'; known: a, b, out"),
        ("data.inputs=['a', 'out']", "'train' has no column 'out'"),
        ("data.file=nowhere.csv", "data.file: there is no file"),
        (
            "data.test_file=none",
            "data.test_file: name the .csv or .parquet file with public test examples",
        ),
        ("data.trget=out", "trget"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_written(
    changed, said, changes, run, tmp_path, monkeypatch
):
    options = [f"{key}={value}" for key, value in changes.items()] + [changed]
    folder = tmp_path / "never"
    monkeypatch.chdir(tmp_path)
    status, _, err = run(
        "simulate",
        "digits",
        "--engine=local",
        "--run-dir",
        folder,
        *(f"--set={one}" for one in options),
    )
    assert status == 2
    assert said in " ".join(err.split())
    assert not folder.exists()


def test_a_text_column_among_the_features_is_refused_in_a_study(
    changes: dict, run, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pandas.read_csv("train.csv").assign(site="north")
    table.to_csv("train.csv", index=False)
    folder, said = (
        tmp_path / "study",
        "data: column 'site' of 'train' holds text, not numbers: drop it",
    )
    with pytest.raises(DataError, match=said):
        simulations.study(
            "digits", grid={"privacy.epsilon": [8.0]}, seeds=1, overrides=changes, folder=folder
        )
    options = [f"--set={key}={value}" for key, value in changes.items()]
    status, _, err = run(
        "study", "digits", "--grid=privacy.epsilon=8.0", "--seeds=1", *options, "--out", folder
    )
    assert status == 2
    assert err.startswith(f"error: {said}")
    assert not folder.exists()


@pytest.mark.parametrize("standardise", ["test", {"a": [0.5, 2.0]}])
def test_a_recipe_standardises_a_table_with_public_constants_which_exports_hold(
    standardise, changes, tmp_path
) -> None:
    result = simulations.simulate(
        "digits",
        overrides=changes | {"data.standardise": standardise},
        engine="local",
        run_dir=tmp_path / "run",
    )
    columns = export.metadata(tmp_path / "run")["columns"]
    test = pandas.read_csv("test.csv")
    a = columns[0]
    public = [test.a.mean(), test.a.std(ddof=0)] if standardise == "test" else [0.5, 2.0]
    assert [a["mean"], a["deviation"]] == pytest.approx(public)
    assert ("mean" in columns[1]) == (standardise == "test")
    found = predict(result.export(tmp_path / "model.safetensors")["file"], "test.csv").frame
    right = (found["class"] == test.out).mean()
    assert right == pytest.approx(result.accuracy)
    if standardise == "test":
        assert Assembly(RunFolder.open(tmp_path / "run").recipe()).data.dataset.test_x.mean(
            0
        ) == pytest.approx(0, abs=1e-6)
