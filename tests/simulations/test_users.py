"""The users of own data are named in the same way in every function that takes data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import simulations
from fedlgm.errors import DataError

X = np.random.default_rng(2).normal(size=(60, 4)).astype(np.float32)
DATA = {"train": (X, (X[:, 0] > 0).astype(int)), "test": (X, (X[:, 0] > 0).astype(int))}
USERS = np.arange(60) % 12
FEW = {
    "federation.rounds": 2,
    "federation.rate": 0.5,
    "privacy.delta": 0.01,
    "privacy.accountant": "rdp",
}


def net() -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def test_a_study_a_search_and_a_recommendation_take_the_users_that_a_run_takes(
    tmp_path: Path,
) -> None:
    given = {"model": net, "data": DATA, "users": USERS, "overrides": FEW}
    run = simulations.simulate(**given, run_dir=tmp_path / "run")
    grid = {"mechanism": ["gaussian"]}
    study = simulations.study(
        **given, grid=grid, seeds=1, folder=tmp_path / "study", progress=False
    )
    searched = simulations.tune(
        **given, search={"training.lr": [0.1, 0.2]}, expected_runs=1.5, folder=tmp_path / "search"
    )
    folders = (run.folder, *study.folder.glob("*-run0"), searched.folder)
    kept = [simulations.load_recipe(folder / "recipe.toml") for folder in folders]
    assert [(recipe.data.partition, recipe.federation.clients) for recipe in kept] == [
        ("natural", 12)
    ] * 3
    found = simulations.recommend(**given, public="test")
    assert found["noise_on_mean"] == pytest.approx(run["noise_multiplier"] / 6)  # half of 12 users


@pytest.mark.parametrize("function", [simulations.study, simulations.tune, simulations.recommend])
def test_users_need_data(function) -> None:
    with pytest.raises(DataError, match="users names the users of your own data"):
        function(users=USERS)
