"""The [data] section of a policy, filled from the operator's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from pydantic import ValidationError

from fedlgm.data import images, tables
from fedlgm.data.named_tables import NAME as TABLE
from fedlgm.data.named_tables import convert_targets
from fedlgm.errors import ConfigError, DataError
from fedlgm.training import tasks
from fedlgm.wording import first_problem
from fedlgm_nodes.policy import Data
from fedlgm_nodes.service import data as node_data

# a column with whole numbers from this one on holds quantities, not classes
_MOST_CLASSES = 1000
_STATED = ("labels", "features", "class_names", "classes", "tasks")
ELSEWHERE = "elsewhere.txt"
"""The list of the people who count at other nodes, in a node's folder."""


def describe(
    data: Path,
    *,
    kind: str | None = None,
    labels: str | None = None,
    public: Path | None = None,
    people: str | None = None,
    **given: Any,
) -> dict[str, Any]:
    """The values of a policy that describe a node's examples (see `fedlgm_nodes.policy_template`).

    A table is read with the same checks as in the node's service, so that a fault in it is found
    before the node's folder is created.

    Args:
        data: a file or folder.
        kind: kind of the data; by default the name of the file or folder determines it.
        labels: a file (numpy, idx) or the column to predict (csv, parquet).
        public: file of public rows with the same columns. The public rows determine the columns,
            the classes, and the means and deviations with which inputs are standardised. Without
            public rows, the node's data determine the columns and classes, and no input is
            standardised.
        people: column of pseudonyms (see `fedlgm_nodes.service.people`); the public rows need no
            such column.
        given: values of the policy that replace the values found in the data.

    Raises:
        ConfigError: a file is missing, or its kind is not clear.
        DataError: a table cannot be used.
    """
    if not data.exists():
        raise ConfigError(
            f"--data: there is nothing at {data}; create it first, or leave --data out and "
            "edit the policy"
        )
    kind = kind or _kind(data)
    values: dict[str, Any] = {"path": str(data.resolve()), "kind": kind, "data_name": data.stem}
    if labels is not None:
        local = Path(labels)
        if not local.exists() and kind in ("numpy", "idx"):
            raise ConfigError(f"--labels: there is no file {labels}")
        values["labels"] = str(local.resolve()) if kind in ("numpy", "idx") else labels
    if kind == "images" and data.is_dir():
        names = sorted(entry.name for entry in data.iterdir() if entry.is_dir())
        shape = [3, images.SIZE, images.SIZE]
        values |= {"class_names": names, "classes": len(names), "shape": shape}
    if kind in ("csv", "parquet"):
        if labels is None:
            raise ConfigError("--target: name the column of the table to predict")
        source = data if public is None else public
        values |= _columns(source, labels, people, standardised=public is not None) | given
        section = {key: value for key, value in values.items() if key in Data.model_fields}
        if people is not None:  # the service reads the list when it starts
            values["people"] = {"column": people, "elsewhere": ELSEWHERE}
        task = tasks.get(values.get("tasks", ["classification"])[0])
        try:
            checked = Data.model_validate(section | {"name": "data"})
            node_data.targets(checked, node_data.read(checked, data.parent).y, task)
        except ValidationError as error:
            raise ConfigError(f"{data}: {first_problem(error)}") from error
    elif people is not None:
        raise ConfigError(
            f"--people: is for tables (.csv, .parquet), and {data.name} is not a table"
        )
    elif public is not None:
        raise ConfigError(f"--test: is for tables (.csv, .parquet), and {data.name} is not a table")
    return values | given


def agree(described: list[dict[str, Any]]) -> bool:
    """Whether the nodes' tables have the same columns and classes, so that one recipe can state the
    columns and classes for all nodes.
    """
    stated = [{key: values.get(key) for key in _STATED} for values in described]
    return all(each == stated[0] and each["features"] for each in stated)


def recipe_text(values: dict[str, Any], public: Path | None) -> str:
    """A recipe for nodes whose policies have these values. The operator is expected to edit it.

    Args:
        values: see `describe`.
        public: file of the public rows from which the values were taken. Without public rows,
            nothing is evaluated.
    """
    data = {"name": TABLE, "target": values["labels"], "inputs": values["features"]}
    if public is not None:
        data |= {"test_file": str(public.resolve()), "standardise": values["standardise"]}
    if "class_names" in values:
        data["labels"] = values["class_names"]
    elif public is None and "tasks" not in values:
        data["classes"] = values["classes"]
    recipe: dict[str, Any] = {
        "extends": "nodes",
        "title": f"{values['labels']} on real nodes",
        "data": data,
    }
    if "tasks" in values:
        recipe["task"] = {"name": values["tasks"][0]}
    if values.get("unit") == "example":
        recipe["extends"] = "example-level-federation"
        recipe["federation"] = {"rate": 1.0, "rounds": 10}
    if values.get("overlap") is not None:
        recipe["federation"] = recipe.get("federation", {}) | {"overlap": values["overlap"]}
    head = (
        "# No public rows (test_file): the server evaluates nothing."
        if public is None
        else "# The rows of test_file are public."
    )
    return (
        f"{head} Nodes compare inputs, labels and standardise with\n"
        f"# features, class_names and standardise of their policies.\n{tomli_w.dumps(recipe)}"
    )


def _columns(file: Path, target: str, people: str | None, *, standardised: bool) -> dict[str, Any]:
    """The values of a policy that describe a table's columns, its classes and, if `standardised`,
    the means and deviations of its inputs. The column of pseudonyms is not an input.
    """
    frame = node_data.read_rows(file, target)
    frame = frame.drop(columns=[people] if people in frame.columns else [])
    tables.require_columns([target], frame.columns, str(file))
    convert_targets(frame, frame, target, None)
    features, y = [str(name) for name in frame.columns if name != target], frame[target]
    values: dict[str, Any] = {"features": features}
    x = node_data.numbers(frame, features)
    described = tables.describe(frame, features, x, "test" if standardised else None)
    if standardised:
        values["standardise"] = {
            column["name"]: [float(f"{column[part]:.6g}") for part in ("mean", "deviation")]
            for column in described or ()
            if "mean" in column
        }
    if any(isinstance(value, str) for value in y):
        names = sorted(set(y))
        if "" in names or not all(isinstance(name, str) for name in names):
            raise DataError(f"{file}: column {target!r} has rows without a target: leave them out")
        values |= {"class_names": names, "classes": len(names)}
    elif _are_classes(y.to_numpy()):
        values["classes"] = int(y.max()) + 1
    else:
        values |= {"classes": 1, "tasks": ["regression"]}
    return values | {"shape": list(x.shape[1:])}


def _are_classes(y: np.ndarray) -> bool:
    return bool((y == np.floor(y)).all() and y.min() >= 0 and y.max() < _MOST_CLASSES)


def _kind(data: Path) -> str:
    if data.suffix in (".npz", ".npy"):
        return "numpy"
    if data.name.lower().endswith((".csv", ".csv.gz")):
        return "csv"
    if data.suffix == ".parquet" or (data.is_dir() and any(data.rglob("*.parquet"))):
        return "parquet"
    if data.is_dir():
        return "images"
    if "idx" in data.name or "ubyte" in data.name:
        return "idx"
    raise ConfigError(
        f"--data: {data.name} is not .npz, .npy, .csv, .parquet, IDX (as in images-idx3-ubyte) or "
        "a folder of images: convert it, or read it with your own function (--kind loader)"
    )
