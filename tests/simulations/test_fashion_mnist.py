"""The federated experiment's own data, two rounds of it."""

from __future__ import annotations

import pytest

from fedlgm import data
from fedlgm.errors import DataError
from simulations import launch
from simulations.config import recipe as recipes


def _load():
    try:
        return data.load("fashion-mnist", download=False)
    except DataError as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
def test_two_rounds(tmp_path):
    dataset = _load()
    assert len(dataset.train_y) == 60_000
    recipe = recipes.load(
        "fashion-mnist-short",
        [
            "federation.rounds=2",
            "federation.rate=0.02",
            "training.epochs=1",
            "run.evaluate_every=2",
        ],
    )
    result = launch.simulate(recipe, engine="local", run_dir=tmp_path / "run")
    assert result["rounds"] == 2
    assert result["epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert result["epsilon"] <= 3.0
    assert result["guarantee_status"] == "proven"
    assert 0 <= result["accuracy"] <= 1
