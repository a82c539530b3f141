"""The benchmark of how noise fades: levels, errors under a map from noise to models, and tables of
kept runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedlgm import LayerTable, RunFacts, Sampling, Transcript, mechanisms
from fedlgm.noise import correlation
from fedlgm_lab.studies.tables import noise_response
from fedlgm_lab.studies.tables.runs import cells
from fedlgm_lab.studies.tables.store import Kept
from simulations.config import recipe as recipes
from simulations.config.facts import facts_of


def test_errors_of_sums_are_those_of_the_library() -> None:
    sums = np.tril(np.ones((noise_response.ROUNDS, noise_response.ROUNDS)))
    for c, std in noise_response.noises().values():
        mean, last = noise_response.error(c, std, sums)
        assert mean == pytest.approx(std * c.error())
        assert last == pytest.approx(
            std * c.error(reduce="max")
        )  # of sums the last model has the largest


def test_noise_that_fades_at_once_is_that_of_a_round() -> None:
    c, std = correlation.get("banded", noise_response.ROUNDS, bands=10), 2.0
    _, last = noise_response.error(c, std, np.eye(noise_response.ROUNDS))
    assert last == pytest.approx(std * c.noise_std()[-1])


@pytest.mark.parametrize("level", [1.0, 1.8])
def test_levels_are_those_of_the_runs(level: float, tmp_path: Path) -> None:
    name = f"public cycle, independent noise of level {level:g}"
    (cell,) = cells(Kept(tmp_path / "none.json"), noise_response.NAME, cell=name)
    facts = facts_of(recipes.load(cell.recipe, cell.changes))
    found = mechanisms.get("uniform").calibrate(facts) / noise_response.multiplier()
    assert found == pytest.approx(level, rel=1e-4)


def test_powers_of_the_sizes_lie_between_two_rules() -> None:
    layers, facts = (
        LayerTable.from_sizes({"wide": 400, "narrow": 4}),
        RunFacts(1.5, Sampling("poisson", 100, 0.1)),
    )
    start = Transcript.start(torch.zeros(404))
    for power, rule in ((0.0, "uniform"), (0.5, "snr-consistent")):
        own = noise_response.PowerSplit("split", power=power).plan(layers, facts, start)
        assert own.sigma == pytest.approx(mechanisms.get(rule).plan(layers, facts, start).sigma)
        assert own.effective_multiplier == pytest.approx(1.5)


def test_a_push_is_added_once() -> None:
    server, model = noise_response.Pushed(2.0, torch.tensor([1.0, 0.0]), 2), torch.zeros(2)
    for _ in range(3):
        model = server.step(model, torch.tensor([0.0, 1.0]))
    assert [row.tolist() for row in server.models] == [[0.0, 2.0], [2.0, 4.0], [2.0, 6.0]]


def test_noise_between_two_pushes_fades_as_the_earlier_one(tmp_path: Path) -> None:
    kept, setting = Kept(tmp_path / "none.json"), noise_response.SETTINGS[0]
    assert noise_response.map_of(kept, setting, "outputs") is None
    row = {
        f"{what} {at}": [0.9**lag * at for lag in range(noise_response.ROUNDS - at + 1)]
        for at in noise_response.PUSHED
        for what in ("weights", "outputs")
    }
    kept.rows.append(
        {"study": "responses", "noise": setting.noise, "rate": setting.rate, "seed": 1} | row
    )
    found = noise_response.map_of(kept, setting, "outputs")
    assert found is not None
    assert found[20, 15] == pytest.approx(16 * 0.9**5)
    assert found[20, 14] == pytest.approx(1 * 0.9**6)
    assert np.triu(found, 1).max() == 0
    lines = noise_response.responses_table(kept).splitlines()
    assert len(lines) == 4
    assert "fading as in" in noise_response.errors_table(kept)
