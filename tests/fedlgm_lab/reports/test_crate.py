"""A run packed as an RO-Crate: its public files, described so that another program reads them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rocrate.rocrate import ROCrate
from safetensors.torch import load_file

import simulations
from fedlgm.errors import ConfigError
from fedlgm_lab.reports import crate


@pytest.fixture(scope="module")
def packed(_finished_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crate.write_crate(_finished_once, tmp_path_factory.mktemp("crate") / "crate.zip")


def test_the_crate_is_read_by_the_formats_own_library(packed: Path, finished: Path) -> None:
    read: Any = ROCrate(packed)
    assert read.root_dataset["conformsTo"].id == crate.PROFILE
    assert read.mainEntity.id == "model.safetensors"
    result = json.loads((finished / "result.json").read_text(encoding="utf-8"))
    figures = {figure["name"]: figure["value"] for figure in read.root_dataset["variableMeasured"]}
    assert figures["model_sha256"] == result["model_sha256"]
    assert figures["guarantee"] == result["guarantee"]
    (action,) = [entity for entity in read.get_entities() if entity.type == "CreateAction"]
    assert [part.id for part in action["object"]] == ["recipe.toml"]
    assert action["instrument"]["name"] == "fedlgm"


def test_only_public_files_are_in_it(packed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        names = set(archive.namelist())
        archive.extract("model.safetensors", tmp_path)
    assert names == {*crate._FILES, "model.safetensors", "statement.md", "ro-crate-metadata.json"}
    assert load_file(tmp_path / "model.safetensors")


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_a_users_own_model_is_packed_with_its_exported_model(
    run: Any, tmp_path: Path, finished: Path
) -> None:
    part = (np.zeros((40, 3), dtype=np.float32), np.arange(40) % 2)
    changes = {"federation.clients": 10, "federation.rounds": 1, "privacy.epsilon": 1}
    result = simulations.simulate(
        model=torch.nn.Linear(3, 2), data={"train": part, "test": part}, overrides=changes,
        run_dir=tmp_path / "own",
    )  # fmt: skip
    status, _, error = run("crate", result.folder, "--out", tmp_path / "crate.zip")
    assert status == 2
    assert "result.export('model.safetensors')" in " ".join(error.split())
    result.export(tmp_path / "own.safetensors")
    crate.write_crate(result.folder, tmp_path / "crate.zip", tmp_path / "own.safetensors")
    read: Any = ROCrate(tmp_path / "crate.zip")
    (action,) = [entity for entity in read.get_entities() if entity.type == "CreateAction"]
    assert action["name"] == "Private training: own-data"
    assert read.mainEntity.id == "model.safetensors"
    with pytest.raises(ConfigError, match="is not the model of this run"):
        crate.write_crate(finished, tmp_path / "crate.zip", tmp_path / "own.safetensors")
    with pytest.raises(ConfigError, match="is not an exported model"):
        crate.write_crate(finished, tmp_path / "crate.zip", finished / "recipe.toml")


def test_another_suffix_is_refused(run: Any, finished: Path, tmp_path: Path) -> None:
    status, _, error = run("crate", finished, "--out", tmp_path / "crate.tar")
    assert status == 2
    assert not (tmp_path / "crate.tar").exists()
    assert "ends in .zip" in error
