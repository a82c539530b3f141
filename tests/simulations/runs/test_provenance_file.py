"""A run's stored provenance."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

import simulations
from fedlgm.data import Partition
from fedlgm.errors import LedgerError, RunError
from simulations.config.own import own_of
from simulations.runs.folder import RunFolder
from simulations.runs.provenance_file import ProvenanceFile


def _nobody() -> Partition:
    return Partition.from_owner(np.full(60, -1), clients=1)


def test_a_run_without_stored_layers_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "provenance.json"
    file.write_text('{"layers": {"fc1": 520}}')
    assert ProvenanceFile(file).layers() == {"fc1": 520}
    file.write_text("{}")
    with pytest.raises(LedgerError, match="does not name the layers"):
        ProvenanceFile(file).layers()


def test_hashes_of_private_data_are_private(tmp_path: Path) -> None:
    """Whoever knows all examples but one would find the last one by trying candidates for it."""
    own = {"name": "data.file", "file": "train.csv", "sha256": "cd"}
    public = {"name": "data.test_file", "file": "test.csv", "sha256": "ef"}
    whole = {"layers": {"fc1": 1}, "objects": {"data": "ab"}, "sources": {"training file": own, "test file": public}}
    file = ProvenanceFile(tmp_path / "provenance.json")
    file.settle(whole)
    said = json.loads((tmp_path / "provenance.json").read_text())
    assert said == {"layers": {"fc1": 1}, "sources": {"test file": public}}
    assert stat.S_IMODE((tmp_path / "private/objects.json").stat().st_mode) == 0o600
    assert file.read() == whole
    file.settle(whole)
    with pytest.raises(RunError, match="with another data than this one"):
        file.check_objects({"data": "xy"})
    with pytest.raises(RunError, match=r"train\.csv is not the training file"):
        file.settle(whole | {"sources": {"training file": own | {"sha256": "xy"}, "test file": public}})


def test_a_run_shows_no_hash_of_its_data_outside_its_private_folder(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2
    data = {"train": (x, y), "test": (x, y)}
    changes = ["federation.clients=20", "federation.rounds=1", "privacy.delta=0.01"]
    simulations.simulate(model=torch.nn.Linear(3, 2), data=data, overrides=changes, run_dir=tmp_path / "run")
    hashes = RunFolder.open(tmp_path / "run").provenance.read()["objects"]
    assert hashes["data"] == own_of({"data": data}).fingerprints(torch.nn.Linear(3, 2), _nobody())["data"]
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and "private" not in path.parts:
            assert not any(one.encode() in path.read_bytes() for one in hashes.values() if one), path
