"""A run's stored provenance."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pandas
import pytest

import simulations
from fedlgm.errors import LedgerError, RunError
from fedlgm.training.models import digest_of_file
from simulations.config.assembly import Assembly
from simulations.config.own import FIXED, own_of
from simulations.runs.folder import RunFolder
from simulations.runs.provenance import provenance_of
from simulations.runs.provenance_file import ProvenanceFile
from strategies.nodes import AnyNode
from tests.support.own_objects import OBJECTS, SMALL


def test_a_run_without_stored_layers_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "provenance.json"
    file.write_text('{"layers": {"fc1": 520}}')
    assert ProvenanceFile(file).layers() == {"fc1": 520}
    file.write_text("{}")
    with pytest.raises(LedgerError, match="does not name the layers"):
        ProvenanceFile(file).layers()


def public_text(run: Path) -> bytes:
    """Everything that a run's folder holds, but for its private files."""
    return b"".join(
        file.read_bytes()
        for file in run.rglob("*")
        if file.is_file() and "private" not in file.parts
    )


def test_public_files_hold_no_hash_of_the_data(tmp_path: Path) -> None:
    """A reader who knows all examples but one could test guesses of the last one against a hash."""
    run = tmp_path / "run"
    simulations.simulate(**OBJECTS, overrides=SMALL, run_dir=run)
    given = Assembly(RunFolder.open(run).recipe(), own_of(OBJECTS))
    prints = given.own.fingerprints(given.model.module(), given.data.partition)
    assert {"data", "division of the data"} <= prints.keys()
    assert not [
        what
        for what, found in prints.items()
        if what != FIXED and found.encode() in public_text(run)
    ]
    key = run / "private" / "provenance.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert simulations.resume(run, **OBJECTS)["rounds"] == 3
    key.unlink()
    with pytest.raises(RunError, match=r"provenance\.key is gone: .* restore it"):
        simulations.resume(run, **OBJECTS)


def test_nor_do_they_hold_one_of_a_file_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = pandas.DataFrame({"a": [0.1, 0.9] * 20, "b": [0.5, 0.2] * 20, "out": ["no", "yes"] * 20})
    for name in ("train.csv", "test.csv"):
        rows[: 40 if name == "train.csv" else 10].to_csv(name, index=False)
    values = {
        "name": "table",
        "file": "train.csv",
        "test_file": "test.csv",
        "target": "out",
        "partition": "iid",
    }
    changes = {f"data.{key}": value for key, value in values.items()}
    changes |= {"federation.clients": 4, "federation.rounds": 1, "privacy.epsilon": 1}
    simulations.simulate("digits", overrides=changes, run_dir="run")
    assert digest_of_file("train.csv").encode() not in public_text(Path("run"))
    folder = RunFolder.open(Path("run"))
    made = provenance_of(Assembly(folder.recipe()), AnyNode())
    folder.provenance.settle(made)
    Path("run/provenance.json").write_text(json.dumps(made))  # as earlier versions wrote it
    folder.provenance.settle(made)
    with Path("train.csv").open("a") as file:
        file.write("0.3,0.3,no\n")
    with pytest.raises(RunError, match="is not the training file"):
        folder.provenance.settle(provenance_of(Assembly(folder.recipe()), AnyNode()))
