"""The noise that a compared run's model has received, against noise that is drawn and added up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compared import summary_of

from fedlgm_lab.studies import running
from fedlgm_lab.studies.jobs import Job, jobs
from fedlgm_lab.studies.noise import model_noise
from simulations import launch
from simulations.runs.folder import RunFolder

ROUNDS = 12
SMALL = (
    *(
        "federation.clients=40",
        "federation.rate=0.25",
        f"federation.rounds={ROUNDS}",
        "federation.sampling=cyclic",
    ),
    *("data.partition=iid", "model.hidden=[4]", "training.epochs=1", "privacy.accountant=rdp"),
    "run.evaluate_every=100",
)
NOISES = ("independent", "banded", "blt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], RunFolder]:
    """Finished runs by noise and mechanism; `adaptive` changes its layers' noise scales from round
    to round."""
    found = {}
    for noise in NOISES:
        for mechanism in ("snr-consistent", "adaptive"):
            job = made(mechanism, f"privacy.noise={noise}")
            path = tmp_path_factory.mktemp("runs") / "run"
            launch.simulate(job.recipe, run_dir=path)
            found[noise, mechanism] = RunFolder.open(path)
    return found


def made(mechanism: str, *more: str) -> Job:
    (job,) = jobs("digits", [mechanism], 1, [*SMALL, *more])
    return job


def drawn(folder: RunFolder, rows: list, momentum: float, draws: int = 4000) -> np.ndarray:
    """Root mean square norm of the model's noise after each round, of noise drawn layer by layer,
    [T]."""
    recipe, rng = folder.recipe(), np.random.default_rng(0)
    mix = np.eye(len(rows)) if recipe.noise is None else np.linalg.inv(recipe.noise.matrix())
    sizes = list(folder.provenance.read()["layers"].values())
    total = np.zeros(len(rows))
    for j, size in enumerate(sizes):
        scales = np.array([row["sigma"][j] for row in rows]) / recipe.sampling.expected
        w = scales[:, None] * (
            mix @ rng.standard_normal((len(rows), draws))
        )  # one coordinate, many times
        model = step = np.zeros(draws)
        squared = []
        for noise in w:
            step = momentum * step + noise
            model = model + step
            squared.append(np.mean(model**2))
        total += size * np.array(squared)
    return np.sqrt(total)


@pytest.mark.parametrize("mechanism", ["snr-consistent", "adaptive"])
@pytest.mark.parametrize("noise", NOISES)
def test_it_is_that_of_noise_drawn_and_added_up(
    runs: dict[tuple[str, str], RunFolder], noise: str, mechanism: str
) -> None:
    folder = runs[noise, mechanism]
    rows, momentum = folder.rows(), folder.recipe().federation.server_momentum
    np.testing.assert_allclose(model_noise(folder, rows), drawn(folder, rows, momentum), rtol=0.05)
    assert not np.allclose(
        model_noise(folder, rows), drawn(folder, rows, 0.0), rtol=0.05
    )  # another server


def test_correlated_noise_is_larger_in_each_round_and_smaller_in_the_model(tmp_path: Path) -> None:
    todo = jobs("digits", ["uniform"], 1, [*SMALL, "privacy.noise=banded"])
    other = jobs("digits", ["gaussian"], 1, [*SMALL, "privacy.noise=independent"])
    running.run([*todo, *other], tmp_path)
    banded, plain = summary_of([*todo, *other], tmp_path)["cells"]
    assert banded["epsilon"] == pytest.approx(plain["epsilon"], rel=1e-3)
    assert banded["noise_scale"] > plain["noise_scale"]
    assert banded["model_noise"] < plain["model_noise"]
