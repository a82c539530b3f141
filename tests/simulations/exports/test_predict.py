"""Exported models of tables know their columns, and predict rows whose columns are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pandas
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from typer.testing import CliRunner

import simulations
from fedlgm import data
from fedlgm.data.class_names import PUBLISHED
from fedlgm.errors import ConfigError, DataError, FedlgmError, RunError
from fedlgm_lab.reports.report import write_report
from simulations.cli import app
from simulations.exports.export import metadata
from simulations.exports.predict import _frame, predict

GENERATOR = np.random.default_rng(0)
TABLE = pandas.DataFrame(
    {
        "age": GENERATOR.integers(20, 90, 80), "dose": GENERATOR.normal(5, 2, 80),
        "smokes": GENERATOR.random(80) < 0.5, "out": GENERATOR.choice(["ill", "well"], 80),
    }
)  # fmt: skip
FIGURES = {"age": (50.0, 20.0), "dose": (5.0, 2.0)}
OVERRIDES = [
    "federation.clients=20",
    "federation.rounds=1",
    "privacy.delta=0.01",
    "privacy.accountant=rdp",
]


def run(folder: Path, model: torch.nn.Module, **options) -> simulations.RunResult:
    own = {"train": TABLE, "test": TABLE[:30], "target": "out", "standardise": FIGURES} | options
    return simulations.simulate(model=model, data=own, overrides=OVERRIDES, run_dir=folder / "run")


@pytest.fixture(scope="module")
def linear(tmp_path_factory) -> simulations.RunResult:
    return run(tmp_path_factory.mktemp("linear"), torch.nn.Linear(3, 2))


@pytest.fixture(scope="module")
def models(linear) -> dict[str, Path]:
    return {
        ending: Path(linear.export(linear.folder.parent / f"m.{ending}")["file"])
        for ending in ("onnx", "safetensors", "pt")
    }


def expected(result: simulations.RunResult) -> np.ndarray:
    x = TABLE[["age", "dose", "smokes"]].to_numpy(np.float64)
    x = ((x - [50, 5, 0]) / [20, 2, 1]).astype(np.float32)
    return torch.softmax(result.model()(torch.from_numpy(x)).double(), 1).detach().numpy()


@pytest.mark.usefixtures("undrawn")
def test_every_export_and_the_report_name_columns_and_classes(linear, models):
    told = metadata(linear.folder)
    assert [(one["name"], one["dtype"]) for one in told["columns"]] == [
        ("age", "int"), ("dose", "float"), ("smokes", "bool")
    ]  # fmt: skip
    assert (told["columns"][0]["mean"], told["columns"][0]["deviation"]) == (50.0, 20.0)
    props = {one.key: one.value for one in onnx.load(models["onnx"]).metadata_props}
    assert json.loads(props["columns"]) == told["columns"]
    assert json.loads(props["labels"]) == ["ill", "well"]
    assert json.loads(models["pt"].with_suffix(".json").read_text())["columns"] == told["columns"]
    page = Path(write_report(linear.folder)["report"]).read_text()
    assert all(
        word in page for word in ("dose", "Columns, in the order of the inputs", "ill, well")
    )


@pytest.mark.parametrize("ending", ["onnx", "safetensors", "pt"])
def test_rows_are_matched_by_name_and_standardised(ending, linear, models, tmp_path):
    TABLE[["smokes", "dose", "out", "age"]].to_csv(tmp_path / "rows.csv", index=False)
    found = predict(models[ending], tmp_path / "rows.csv")
    assert np.allclose(found.frame[["P(ill)", "P(well)"]], expected(linear), atol=1e-5)
    assert (found.columns, found.ignored, found.standardised) == (
        ["age", "dose", "smokes"],
        ["out"],
        True,
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            TABLE.rename(columns={"dose": "Dose"}),
            r"rows\.csv has no column 'dose'; did you mean 'Dose'",
        ),
        (
            TABLE.assign(age=TABLE.age + 0.5),
            r"column 'age' must hold whole numbers, as in training",
        ),
        (TABLE.assign(smokes=7), r"column 'smokes' must hold True and False, or 1 and 0"),
        (TABLE.assign(dose="high"), r"column 'dose' holds text, not numbers"),
        (TABLE.assign(dose=np.nan), r"column 'dose' has no finite number in 80 of 80 rows"),
        (TABLE[:0], r"rows\.csv has no rows below its header"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, message, models, tmp_path):
    rows.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match=message):
        predict(models["safetensors"], tmp_path / "rows.csv")


def test_two_columns_of_one_name_are_refused(models, tmp_path):
    (tmp_path / "rows.csv").write_text("age,dose,dose,smokes\n50,1,2,True\n")
    with pytest.raises(DataError, match=r"has several columns 'dose'"):
        predict(models["safetensors"], tmp_path / "rows.csv")


def test_models_that_do_not_fit_are_refused(linear, models, tmp_path):
    TABLE.to_csv(tmp_path / "rows.csv", index=False)
    deep = run(tmp_path, torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()))
    deep.export(tmp_path / "deep.safetensors")
    with pytest.raises(
        ConfigError, match=r"which is enough for a linear model only: export this model as \.onnx"
    ):
        predict(tmp_path / "deep.safetensors", tmp_path / "rows.csv")
    with pytest.raises(RunError, match=r"only a model of one linear layer has coefficients"):
        deep.coefficients()
    with pytest.raises(RunError, match=r"is a folder: export its model first"):
        predict(linear.folder, tmp_path / "rows.csv")
    (tmp_path / "bad.onnx").write_text("no model")
    with pytest.raises(RunError, match=r"bad\.onnx is not a model of `fedlgm export`"):
        predict(tmp_path / "bad.onnx", tmp_path / "rows.csv")


def test_other_endings_of_torch_are_one_sentence(linear, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"suffix must name a format: .*; torch\.load reads \.pt as it reads \.pth",
    ):
        linear.export(tmp_path / "m.pth")


def test_models_of_arrays_have_no_names(tmp_path):
    x, y = np.zeros((40, 3)), np.arange(40) % 2
    result = simulations.simulate(
        model=torch.nn.Linear(3, 2), data={"train": (x, y), "test": (x, y)}, overrides=OVERRIDES,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    TABLE.to_csv(tmp_path / "rows.csv", index=False)
    result.export(tmp_path / "m.safetensors")
    with pytest.raises(RunError, match=r"does not name its columns"):
        predict(tmp_path / "m.safetensors", tmp_path / "rows.csv")
    with pytest.raises(RunError, match=r"coefficients need names"):
        result.coefficients()


def test_coefficients_are_those_of_the_model_by_name(linear):
    frame = linear.coefficients()
    assert (list(frame.index), list(frame.columns)) == (
        ["age", "dose", "smokes", "(intercept)"],
        ["ill", "well"],
    )
    assert frame.loc["dose", "well"] == pytest.approx(linear.model().weight[1, 1].item())


def binary(folder: Path, **options) -> simulations.RunResult:
    own = {"train": TABLE, "test": TABLE[:30], "target": "out"} | options
    changes = [*OVERRIDES, "task.name=binary"]
    return simulations.simulate(
        model=torch.nn.Linear(3, 1), data=own, overrides=changes, run_dir=folder / "run"
    )


def test_one_logit_is_that_of_the_second_class(tmp_path):
    result = binary(tmp_path)
    assert list(result.coefficients().columns) == ["well"]
    TABLE.to_csv(tmp_path / "rows.csv", index=False)
    found = predict(result.export(tmp_path / "m.onnx")["file"], tmp_path / "rows.csv").frame
    x = torch.from_numpy(TABLE[["age", "dose", "smokes"]].to_numpy(np.float32))
    well = torch.sigmoid(result.model()(x).double()).detach().numpy()[:, 0]
    assert list(found.columns) == ["class", "P(ill)", "P(well)"]
    assert np.allclose(found["P(well)"], well, atol=1e-5)
    assert np.allclose(found["P(ill)"], 1 - well, atol=1e-5)
    assert list(found["class"]) == np.where(found["P(well)"] > 0.5, "well", "ill").tolist()


def test_one_logit_without_names_is_a_probability(tmp_path):
    table = TABLE.assign(out=TABLE.out == "well")
    result = binary(tmp_path, train=table, test=table[:30])
    assert list(result.coefficients().columns) == ["output 0"]
    TABLE.to_csv(tmp_path / "rows.csv", index=False)
    found = predict(result.export(tmp_path / "m.safetensors")["file"], tmp_path / "rows.csv").frame
    assert list(found.columns) == ["probability"]


@pytest.mark.parametrize(
    ("task", "labels", "columns"),
    [
        ("binary", ["a", "b"], ["P(a)", "P(b)"]),
        ("multi-label", [], ["probability 0", "probability 1"]),
        ("regression", [], ["output 0", "output 1"]),
        ("hazards", ["0 to 6", "6 to 12"], ["0 to 6", "6 to 12"]),
    ],
)
def test_outputs_have_the_names_of_their_classes(task, labels, columns):
    assert list(_frame(np.zeros((1, 2)), task, labels).columns) == columns


def test_the_one_output_of_one_interval_has_its_name():
    assert list(_frame(np.zeros((1, 1)), "hazards", ["0 to 6"]).columns) == ["0 to 6"]


class Tokens(torch.nn.Module):
    """Wards as ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(5, 4), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x).flatten(1))


def test_integer_inputs_stay_integers(tmp_path):
    x = pandas.DataFrame(
        {"ward": GENERATOR.integers(0, 5, 80), "day": GENERATOR.integers(0, 5, 80)}
    )
    y = np.arange(80) % 2
    result = simulations.simulate(
        model=Tokens(),
        data={"train": (x, y), "test": (x, y)},
        overrides=OVERRIDES,
        run_dir=tmp_path / "run",
    )
    file = result.export(tmp_path / "m.onnx")["file"]
    x.to_csv(tmp_path / "rows.csv", index=False)
    found = predict(file, tmp_path / "rows.csv").frame
    expected = (
        torch.softmax(result.model()(torch.from_numpy(x.to_numpy())).double(), 1).detach().numpy()
    )
    assert np.allclose(found[["P(0)", "P(1)"]], expected, atol=1e-5)
    x.assign(ward=7).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match=r"m\.onnx does not take the rows of .*rows\.csv: .*ut of"):
        predict(file, tmp_path / "rows.csv")


def test_the_bundled_table_has_the_names_and_constants_of_its_columns(tmp_path):
    bunch = load_breast_cancer()
    columns = data.load("breast-cancer").columns
    assert [one["name"] for one in columns] == bunch.feature_names.tolist()
    result = simulations.simulate(
        "ten-hospitals",
        overrides={"federation.rounds": 1, "privacy.accountant": "rdp"},
        run_dir=tmp_path / "run",
    )
    assert list(result.coefficients().index) == [*bunch.feature_names, "(intercept)"]
    pandas.DataFrame(bunch.data, columns=bunch.feature_names)[4::5].to_csv(
        tmp_path / "rows.csv", index=False
    )
    found = predict(result.export(tmp_path / "m.safetensors")["file"], tmp_path / "rows.csv").frame
    with torch.no_grad():
        outputs = (
            result.model()(torch.from_numpy(data.load("breast-cancer").test_x)).double().numpy()
        )
    assert np.allclose(found.iloc[:, 0], 1 / (1 + np.exp(-outputs[:, 0])), atol=1e-5)


@pytest.mark.usefixtures("undrawn")
def test_names_of_published_classes_are_exported(tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "digits", tuple("abcdefghij"))
    result = simulations.simulate(
        "digits",
        overrides=["federation.rounds=1", "federation.clients=20", "privacy.accountant=rdp"],
        run_dir=tmp_path / "run",
    )
    assert metadata(result.folder)["labels"] == result.labels == [*"abcdefghij"]
    assert "a, b, c, d, e, f, g, h, i, j" in Path(write_report(result.folder)["report"]).read_text()


def test_the_command_prints_rows_or_json(linear, models, tmp_path):
    TABLE.to_csv(tmp_path / "rows.csv", index=False)
    arguments = ["predict", str(models["onnx"]), str(tmp_path / "rows.csv")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[0] == "class,P(ill),P(well)"
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert len(told["predictions"]) == 80
    assert told["guarantee"] == linear.guarantee


def test_private_statistics_are_the_constants_of_the_columns(tmp_path):
    own = {"train": TABLE, "test": TABLE[:30], "target": "out"}
    found = simulations.standardise(
        own, low=0, high=100, epsilon=1.0, delta=1e-3, ledger=tmp_path / "s.sqlite"
    )
    columns = found.data.columns
    assert [one["mean"] for one in columns] == pytest.approx(found.mean.tolist())
    assert [one["deviation"] for one in columns] == pytest.approx(found.deviation.tolist())


@pytest.mark.parametrize(
    "constants", [{"agee": (0, 1)}, {"age": (0, 0)}, {"age": 1}, {"age": (float("nan"), 1)}]
)
def test_constants_that_do_not_fit_are_refused(constants):
    with pytest.raises(FedlgmError, match=r"data\.standardise: "):
        data.load({"train": TABLE, "test": TABLE, "target": "out", "standardise": constants})
