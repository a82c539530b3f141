"""Noise of a correlation of one's own: that of its coefficients; refused where it does not fit the
run."""

from __future__ import annotations

from pathlib import Path

import pytest

import simulations
from fedlgm.errors import ConfigError
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation

ROUNDS = 6


def test_a_correlation_of_ones_own_is_that_of_its_coefficients(tmp_path: Path) -> None:
    changes = [f"federation.rounds={ROUNDS}"]
    bundled = simulations.simulate(
        "correlated-digits", overrides=changes, run_dir=tmp_path / "bundled"
    )
    plan = simulations.load_recipe(tmp_path / "bundled" / "recipe.toml").noise
    assert plan is not None
    own = Correlation("mine", ROUNDS, plan.coefficients)
    changes.append("privacy.bands=none")
    given = simulations.simulate(
        "correlated-digits", noise=own, overrides=changes, run_dir=tmp_path / "given"
    )
    assert given["noise_multiplier"] == bundled["noise_multiplier"]
    assert given.epsilon == bundled.epsilon
    stored = simulations.load_recipe(tmp_path / "given" / "recipe.toml").noise
    assert stored == own  # a resumed run needs no object
    assert simulations.resume(tmp_path / "given")["model_sha256"] == given["model_sha256"]


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (
            correlation.get("banded", 7, bands=2),
            "it is for 7 rounds, but the run has federation.rounds = 6",
        ),
        (3, "noise must be a name such as 'banded'"),
        (len, "got '<len>'; fedlgm.correlation.register gives a function a name"),
        ("bandit", "privacy.noise"),
        ("given", "needs privacy.correlation"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    noise: object, message: str, tmp_path: Path
) -> None:
    changes = [f"federation.rounds={ROUNDS}", "privacy.bands=none"]
    with pytest.raises(ConfigError, match=message):
        simulations.simulate(
            "correlated-digits", noise=noise, overrides=changes, run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_independent_sampling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="how many rounds lie between"):
        simulations.simulate(
            "digits", noise=correlation.get("banded", 100, bands=2), run_dir=tmp_path / "run"
        )
