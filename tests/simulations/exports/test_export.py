"""A finished run's model leaves as a file that other programs read, with its guarantee."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import simulations
from fedlgm import data, mechanisms
from fedlgm.errors import ConfigError, LedgerError, RunError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import models, tasks
from simulations import launch
from simulations.config import recipe as recipes
from simulations.exports import export as exporting
from simulations.runs import new_folder
from simulations.runs.checkpoints import model_digest
from simulations.runs.folder import RunFolder


@pytest.fixture
def run(tiny: Callable[..., Any], tmp_path: Path) -> dict[str, Any]:
    """A finished run: its summary."""
    return launch.simulate(tiny(), run_dir=tmp_path / "run", trackers=[])


def accuracy(model: nn.Module) -> float:
    digits = data.load("digits")
    return tasks.evaluate(
        tasks.Classification(),
        model,
        torch.from_numpy(digits.test_x),
        torch.from_numpy(digits.test_y),
    )["accuracy"]


def fresh() -> nn.Module:
    digits = data.load("digits")
    return models.build(
        "mlp", in_shape=digits.shape, classes=10, seed=99, hidden=[8], activation="tanh"
    )


def test_the_model_comes_back_with_the_same_bits_and_accuracy(run: dict[str, Any]) -> None:
    for model in (exporting.load_model(run["run"]), exporting.load_model(run["run"], fresh())):
        assert model_digest(LayerTable.from_module(model).flatten(model)) == run["model_sha256"]
        assert accuracy(model) == run["accuracy"]
        assert not model.training
    assert accuracy(fresh()) != run["accuracy"]


@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_a_state_dict_loads_elsewhere(run: dict[str, Any], format: Any, tmp_path: Path) -> None:
    written = exporting.export(run["run"], format, tmp_path / f"other.{format}")
    assert Path(written["file"]) == tmp_path / f"other.{format}"
    assert written["bytes"] == Path(written["file"]).stat().st_size
    state = (
        load_file(written["file"])
        if format == "safetensors"
        else torch.load(written["file"], weights_only=True)
    )
    model = fresh()
    model.load_state_dict(state)
    assert accuracy(model) == run["accuracy"]
    if format == "safetensors":
        assert written["metadata_file"] is None
        with safe_open(written["file"], framework="pt") as stored:
            told = dict(stored.metadata())
        told["epsilon"] = json.loads(told["epsilon"])
    else:
        told = json.loads((tmp_path / "other.json").read_text())
    for name in ("epsilon", "guarantee", "ledger_head", "model_sha256"):
        assert told[name] == run[name]
    recipe = tmp_path / "again.toml"
    recipe.write_text(told["recipe"])
    assert recipes.load(recipe) == RunFolder.open(Path(run["run"])).recipe()


def test_a_model_passed_in_python_is_given_again(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = fresh()
    result = simulations.simulate(tiny(), model=model, run_dir=tmp_path / "run", trackers=[])
    with pytest.raises(ConfigError, match="model"):
        exporting.export(tmp_path / "run")
    written = exporting.export(tmp_path / "run", module=fresh())
    model.load_state_dict(load_file(written["file"]))
    assert accuracy(model) == result.accuracy


def test_a_mechanism_passed_in_python_is_not_needed(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    class Mine(type(mechanisms.get("gaussian"))):  # type: ignore[misc]
        """Sees the model as one layer."""

    result = simulations.simulate(
        tiny(), mechanism=Mine("mine"), run_dir=tmp_path / "run", trackers=[]
    )
    assert result["mechanism"] == "<mine>"
    assert accuracy(exporting.load_model(tmp_path / "run")) == result.accuracy
    assert exporting.export(tmp_path / "run")["model_sha256"] == result["model_sha256"]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("onnx") is None or find_spec("onnxscript") is None, reason="needs fedlgm[onnx]"
)
def test_a_run_of_data_passed_in_python_becomes_onnx_by_an_example(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    digits = data.load("digits")
    own = {"train": (digits.train_x, digits.train_y), "test": (digits.test_x, digits.test_y)}
    result = simulations.simulate(
        tiny(), model=fresh(), data=own, run_dir=tmp_path / "run", trackers=[]
    )
    with pytest.raises(
        ConfigError, match=r"its model '<Sequential>' as a Python object.*module=MyNet\(\)"
    ):
        exporting.export(tmp_path / "run", "onnx")
    with pytest.raises(
        ConfigError, match=r"its data '<DataSet>' as a Python object.*example=x\[:2\]"
    ):
        exporting.export(tmp_path / "run", "onnx", module=fresh())
    example = digits.test_x[:2].astype(np.float64)  # converted as the data were
    file = exporting.export(tmp_path / "run", "onnx", module=fresh(), example=example)["file"]
    session = pytest.importorskip("onnxruntime").InferenceSession(
        file, providers=["CPUExecutionProvider"]
    )
    outputs = session.run(None, {session.get_inputs()[0].name: digits.test_x})[0]
    assert float((outputs.argmax(1) == digits.test_y).mean()) == result.accuracy


def test_where_a_file_goes(run: dict[str, Any], tmp_path: Path) -> None:
    assert exporting.export(run["run"])["file"] == f"{run['run']}/model.safetensors"
    assert exporting.export(run["run"], "pt", tmp_path)["file"] == str(tmp_path / "model.pt")
    before = sorted(tmp_path.rglob("*"))
    assert exporting.export(run["run"], "pt", tmp_path)["metadata_file"] == str(
        tmp_path / "model.json"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_only_exported_models_are_replaced(run: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(run["run"])
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    others: list[tuple[Any, str]] = [
        ("safetensors", "recipe.toml"),
        ("safetensors", "ledger.sqlite"),
        ("pt", "provenance.pt"),
        (
            "safetensors",
            str(next((folder / "checkpoints").glob("*.safetensors")).relative_to(folder)),
        ),
    ]
    for format, name in others:
        with pytest.raises(RunError, match="exists and is not an exported model"):
            exporting.export(folder, format, folder / name)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    for _ in range(2):
        assert exporting.export(folder, "pt", tmp_path / "net.pt")["metadata_file"] == str(
            tmp_path / "net.json"
        )


def test_an_infinite_epsilon_is_text(tiny: Callable[..., Any], tmp_path: Path) -> None:
    run = launch.simulate(tiny(mechanism={"name": "none"}), run_dir=tmp_path / "run", trackers=[])
    with safe_open(exporting.export(run["run"])["file"], framework="pt") as stored:
        assert math.isinf(float(json.loads(stored.metadata()["epsilon"])))
        assert stored.metadata()["guarantee"].startswith("NOT PRIVATE")


def test_what_cannot_be_exported(
    tiny: Callable[..., Any], run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="unknown export format 'h5'; known: safetensors, pt, onnx"
    ):
        exporting.export(run["run"], "h5")  # type: ignore[arg-type]
    for name in ("model.pth", "model.onnx", "model"):
        with pytest.raises(ConfigError, match=f"out: {name} would hold safetensors"):
            exporting.export(run["run"], out=tmp_path / name)
    with pytest.raises(RunError, match="not a run folder"):
        exporting.export(tmp_path)
    with pytest.raises(RunError, match="cannot write"):
        exporting.export(run["run"], "pt", tmp_path / "nowhere" / "model.pt")
    with pytest.raises(RunError, match="parameters, but the given model has 6"):
        exporting.load_model(run["run"], nn.Linear(2, 2))
    new_folder.create(tmp_path / "unfinished", tiny())
    with pytest.raises(RunError, match="not finished"):
        exporting.export(tmp_path / "unfinished")
    with monkeypatch.context() as without:
        without.setattr(exporting, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"onnx and onnxscript: pip install 'fedlgm\[onnx\]'"):
            exporting.export(run["run"], "onnx")
    folder = Path(run["run"])
    for file in (folder / "checkpoints").glob("*"):
        if "000003" in file.name:
            file.unlink()
    with pytest.raises(RunError, match="is not the model of its result"):
        exporting.load_model(folder)
    (folder / "ledger.sqlite").write_bytes(b"another")
    with pytest.raises(LedgerError):
        exporting.export(folder)
    assert not list(folder.glob("model.*"))


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("onnx") is None or find_spec("onnxscript") is None, reason="needs fedlgm[onnx]"
)
def test_onnx_gives_the_same_outputs(run: dict[str, Any], tmp_path: Path) -> None:
    import onnx

    runtime = pytest.importorskip("onnxruntime")
    file = exporting.export(run["run"], "onnx", tmp_path)["file"]
    told = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert told["guarantee"] == run["guarantee"]
    assert told["model_sha256"] == run["model_sha256"]
    digits = data.load("digits")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: digits.test_x})[
        0
    ]  # not the batch it was traced with
    expected = exporting.load_model(run["run"])(torch.from_numpy(digits.test_x)).detach().numpy()
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    assert float((outputs.argmax(1) == digits.test_y).mean()) == run["accuracy"]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("onnx") is None or find_spec("onnxscript") is None, reason="needs fedlgm[onnx]"
)
def test_a_model_that_onnx_has_no_words_for_is_named(run: dict[str, Any]) -> None:
    class Branching(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)

    module = Branching(*exporting.load_model(run["run"]).children())
    with pytest.raises(RunError, match="cannot express Branching as ONNX: "):
        exporting.export(run["run"], "onnx", module=module)
    assert not list(Path(run["run"]).glob("model.*"))
