"""The yardsticks run on small files, at proven epsilon 3, and continue."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedlgm_lab.studies.tables import maker, yardsticks
from tests.support.data_files import write_cifar10, write_mnist

SMALL = tuple(
    yardsticks.Yardstick(name, model, 90.0, 8, 0.5, passes=1)
    for name, model in (
        ("mnist", yardsticks.LINEAR),
        ("mnist", yardsticks.CNN),
        ("cifar10", yardsticks.LINEAR),
        ("cifar10", yardsticks.STANDARDISED),
        ("cifar10", yardsticks.SCATTERED_CNN),
    )
)


@pytest.mark.filterwarnings("error:slower, generic")
def test_a_trial_runs_on_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "data" / "MNIST" / "raw")
    write_cifar10(tmp_path / "data" / "cifar-10-batches-py")
    monkeypatch.setattr(yardsticks, "YARDSTICKS", SMALL)
    monkeypatch.setattr(yardsticks, "SEEDS", (1,))
    settings = {"data": str(tmp_path / "data"), "examples": 16}
    pages, complete = maker.make("yardsticks", tmp_path / "out", settings)
    assert complete
    kept = json.loads((tmp_path / "out" / "yardsticks.json").read_text(encoding="utf-8"))
    assert [(row["set"], row["model"]) for row in kept] == [(y.set, y.model) for y in SMALL]
    for row in kept:
        assert row["guarantee"] == "proven"
        assert 2.9 < row["epsilon"] <= 3.0
        assert "training.batch_size=8" in row["changes"]
    assert pages["yardsticks.md"]["yardsticks"].count("| mnist |") == 2


def test_features_are_those_of_single_images(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    all_rows = yardsticks.features("mnist", str(tmp_path), 16).train_x
    alone = yardsticks.features("mnist", str(tmp_path), 1).train_x
    assert all_rows.shape == (16, 81 * 7 * 7)
    assert all_rows[0] == pytest.approx(alone[0], abs=1e-4)


def test_features_are_standardised_by_moments_for_which_the_run_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py")
    monkeypatch.setitem(yardsticks._SETTINGS, "moments", {"epsilon": 400, "delta": 1e-6})
    found = yardsticks.standardised("cifar10", str(tmp_path), 16)
    channels = found.train_x.reshape(16, 243, 64).swapaxes(0, 1).reshape(243, -1)
    # Medians: the noise is another each time, and large beside the variance of a few channels.
    # Features that were not standardised have 0.20 and 0.52.
    assert np.median(np.abs(channels.mean(1))) < 0.05
    assert np.median(channels.std(1)) == pytest.approx(1.0, abs=0.1)
    assert found.spent is not None
    assert found.spent.epsilon(1e-6) > 100
