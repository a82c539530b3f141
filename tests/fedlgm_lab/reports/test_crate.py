"""A run packed as an RO-Crate: its public files, described so that another program reads them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rocrate.rocrate import ROCrate
from safetensors.torch import load_file

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


def test_another_suffix_is_refused(run: Any, finished: Path, tmp_path: Path) -> None:
    status, _, error = run("crate", finished, "--out", tmp_path / "crate.tar")
    assert status == 2
    assert not (tmp_path / "crate.tar").exists()
    assert "ends in .zip" in error
