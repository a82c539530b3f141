"""Predictions of an exported model of a table, for the rows of a CSV file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from fedlgm.data import encoding, tables
from fedlgm.data.named_tables import read_csv
from fedlgm.errors import ConfigError, DataError, RunError
from fedlgm.files import explain_failure
from simulations.exports.export import format_of

_PROBABILITIES = ("binary", "ranked", "multi-label")


@dataclass(frozen=True)
class Predicted:
    """Predictions, one row for each row of the file.

    Attributes:
        frame: for classes, the predicted class and the probability of each class; otherwise the
            model's outputs.
        columns: the columns that the model read, in the order of its inputs.
        ignored: further columns of the file.
        standardised: whether the model's file holds the constants that standardise the columns.
        guarantee: guarantee of the model.
    """

    frame: pandas.DataFrame
    columns: list[str]
    ignored: list[str]
    standardised: bool
    guarantee: str

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "predictions": self.frame.to_dict(orient="records"),
            "columns": self.columns,
            "ignored": self.ignored,
            "standardised": self.standardised,
            "guarantee": self.guarantee,
        }

    def note(self) -> str:
        """How the columns were standardised, and which columns were ignored, in words."""
        constants = (
            "standardised with the constants of the model's file"
            if self.standardised
            else (
                "not standardised, because the model's file holds no constants: give columns as "
                "the model was trained on"
            )
        )
        ignored = f"; ignored: {', '.join(self.ignored)}" if self.ignored else ""
        return f"{len(self.frame)} rows, {constants}{ignored}"


def predict(model: Path | str, file: Path | str) -> Predicted:
    """Predict the rows of a CSV file.

    Args:
        model: a file of `fedlgm export`, of a model trained on tables: .onnx, or .safetensors or
            .pt of one linear layer.
        file: .csv or .csv.gz, with the model's columns in any order.

    Raises:
        ConfigError: onnxruntime is missing, or the format needs a linear model.
        DataError: a column is missing, named twice, or holds other values than in training.
        RunError: the model cannot be read, or does not name its columns.
    """
    path = Path(model)
    if path.is_dir():
        raise RunError(
            f"{path} is a folder: export its model first, as in fedlgm export {path} --format onnx"
        )
    format = format_of(path)
    if not path.is_file():
        raise RunError(f"there is no file {str(path)!r}: fedlgm export RUN writes one")
    try:
        told, run = _READERS[format](path)
        columns: list[tables.Column] = _metadata_list(told, "columns")
        labels: list[str] = _metadata_list(told, "labels")
    except (ConfigError, RunError):
        raise
    except Exception as error:  # readers of damaged files may raise anything
        raise RunError(f"{path} is not a model of `fedlgm export`: {_first_line(error)}") from error
    if not columns:
        raise RunError(
            f"{path} does not name its columns: it was trained on arrays, or exported by an "
            "earlier version; train on tables and export again"
        )
    x, ignored = _rows(Path(file), columns)
    try:
        outputs = np.asarray(run(tables.standardise(x, columns)))
    except Exception as error:  # exceptions of onnxruntime have no common type
        raise DataError(f"{path} does not take the rows of {file}: {_first_line(error)}") from error
    frame = _frame(outputs.reshape(len(x), -1), str(told.get("task", "")), labels)
    stored = any("mean" in column for column in columns)
    names = [column["name"] for column in columns]
    return Predicted(frame, names, ignored, stored, str(told.get("guarantee", "")))


def _metadata_list(told: Mapping[str, Any], key: str) -> list[Any]:
    """A list of the metadata, which most formats hold as text."""
    value = told.get(key) or []
    return list(json.loads(value)) if isinstance(value, str) else list(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _onnx(path: Path) -> tuple[Mapping[str, Any], Any]:
    if find_spec("onnxruntime") is None:
        raise ConfigError("predictions of .onnx need onnxruntime: pip install onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    taken = session.get_inputs()[0]
    kind = np.int64 if taken.type == "tensor(int64)" else np.float32
    return session.get_modelmeta().custom_metadata_map, lambda x: session.run(
        None, {taken.name: x.astype(kind)}
    )[0]


def _safetensors(path: Path) -> tuple[Mapping[str, Any], Any]:
    from safetensors import safe_open

    with safe_open(str(path), framework="np") as stored:
        told = stored.metadata() or {}
        return told, _linear(path, told, {name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118


def _pt(path: Path) -> tuple[Mapping[str, Any], Any]:
    import torch

    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise RunError(f"{path} needs its metadata, {beside}, which fedlgm export wrote beside it")
    told = json.loads(beside.read_text(encoding="utf-8"))
    state = torch.load(path, weights_only=True)
    return told, _linear(path, told, {name: tensor.numpy() for name, tensor in state.items()})


_READERS = {"onnx": _onnx, "safetensors": _safetensors, "pt": _pt}


def _linear(path: Path, told: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> Any:
    if told.get("coefficients") != "linear":
        raise ConfigError(
            f"{path} holds tensors without their layers, which is enough for a linear model only: "
            "export this model as .onnx"
        )
    weight = next(values for values in state.values() if values.ndim == 2)
    bias = next(
        (values for values in state.values() if values.ndim == 1), np.zeros(len(weight), np.float32)
    )
    return lambda x: x.astype(np.float32) @ weight.T + bias


def _rows(path: Path, columns: Sequence[tables.Column]) -> tuple[np.ndarray, list[str]]:
    """A file's columns that the model reads, in the model's order, [n, d], and the names of the
    file's other columns.
    """
    if not path.name.lower().endswith((".csv", ".csv.gz")) or not path.is_file():
        raise DataError(f"{str(path)!r} must be a .csv or .csv.gz file that exists")
    try:
        table = read_csv(path, [column["of"] for column in columns if "of" in column])
    except (OSError, EOFError, ValueError) as error:
        raise DataError(explain_failure(f"{path} cannot be read", error)) from error
    if not len(table):
        raise DataError(f"{path} has no rows below its header: give a file with rows to predict")
    header = [str(name) for name in table.columns]
    names = [column.get("of", column["name"]) for column in columns]
    tables.require_columns(names, header, str(path))
    arrays = []
    for column, name in zip(columns, names, strict=True):
        what = f"{path}: column {name!r}"
        given = table[name].to_numpy()
        if "of" in column:
            listed = encoding.Encoding({name: column["categories"]}, _fill_of(column, name))
            if faults := listed.faults(table):
                raise DataError(
                    f"{path}: {'; '.join(faults)}: {', '.join(column['categories'])} are known"
                )
        values = tables.numbers(
            encoding.input_values(column, given), what, "give numbers, as in training"
        )
        if column["dtype"] == "int" and (values != np.rint(values)).any():
            raise DataError(f"{what} must hold whole numbers, as in training")
        if column["dtype"] == "bool" and not np.isin(values, (0, 1)).all():
            raise DataError(f"{what} must hold True and False, or 1 and 0, as in training")
        arrays.append(values)
    return np.stack(arrays, axis=1), [name for name in header if name not in names]


def _fill_of(column: tables.Column, name: str) -> dict[str, Any]:
    return {name: column["fill"]} if "fill" in column else {}


def names_of_outputs(count: int, task: str, labels: Sequence[str]) -> list[str] | None:
    """Names of a model's outputs, from the names of the classes or intervals. None if the number of
    these names does not fit the outputs.

    Example:
        >>> names_of_outputs(1, "binary", ["ill", "well"]), names_of_outputs(2, "regression", [])
        (['well'], None)
    """
    if count == 1 and len(labels) == 2 and task in _PROBABILITIES:
        return [labels[1]]
    return list(labels) if len(labels) == count else None


def _frame(outputs: np.ndarray, task: str, labels: Sequence[str]) -> pandas.DataFrame:
    """Outputs [n, k] as the task reads them."""
    outputs, count = outputs.astype(np.float64), outputs.shape[1]
    names = names_of_outputs(count, task, labels)
    if names is not None and len(names) < len(labels):
        outputs, names = np.concatenate([np.zeros_like(outputs), outputs], axis=1), list(labels)
        task = "classification"  # the logit of the second class is its excess over the first
    if task == "classification":
        names = names or [str(i) for i in range(count)]
        shares = np.exp(outputs - outputs.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        likeliest = [names[i] for i in outputs.argmax(1)]
        return pandas.DataFrame(
            {"class": likeliest} | {f"P({name})": shares[:, i] for i, name in enumerate(names)}
        )
    suffixes = [""] if count == 1 else [f" {i}" for i in range(count)]
    if task in _PROBABILITIES:
        outputs, what = 1 / (1 + np.exp(-np.clip(outputs, -700, 700))), "probability"
        names = names and [f"P({name})" for name in names]
    else:
        what = "output"
    shown = names or [f"{what}{suffix}" for suffix in suffixes]
    return pandas.DataFrame({name: outputs[:, i] for i, name in enumerate(shown)})
