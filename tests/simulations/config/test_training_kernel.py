"""`training.kernel`: what it refuses, and that a run's recipe says which arithmetic made its model."""

from __future__ import annotations

from pathlib import Path

import pytest

import simulations
from fedlgm.errors import ConfigError
from fedlgm.training.native import library
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly


def test_the_text_of_recipes_without_a_kernel_stays() -> None:
    """Ledgers belong to it."""
    usual = recipes.load("digits")
    assert "kernel" not in usual.to_toml()
    assert "kernel" not in recipes.load("digits", ["training.kernel=torch"]).to_toml()


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("digits", ["training.kernel=native", "training.vectorize=on"], "one client after another"),
        ("digits", ["training.kernel=fast"], "training.kernel"),
        ("example-level-federation", ["training.kernel=native"], r"training\.kernel"),
    ],
)
def test_settings_that_do_not_fit_are_refused(recipe: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipes.load(recipe, overrides)


@pytest.mark.parametrize(
    ("recipe", "override", "words"),
    [("digits", "trainer.name=fedprox", "no native form"), ("text-gru", "training.vectorize=off", "does not know")],
)
def test_models_and_trainers_that_the_kernel_does_not_know_are_refused(recipe: str, override: str, words: str) -> None:
    assembly = Assembly(recipes.load(recipe, [override, "training.kernel=native"]))
    with pytest.raises(ConfigError, match=words):
        assembly.trainer(vectorized=False, compiled=False)


def test_without_the_kernel_auto_is_torch_and_native_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was made with the kernel never goes on with other arithmetic."""

    def missing() -> None:
        raise ConfigError("no compiler here")

    monkeypatch.setattr("fedlgm.training.native.trainer.library", missing)
    assert Assembly(recipes.load("digits", ["training.kernel=auto"])).faster_training(1).kernel is None
    with pytest.raises(ConfigError, match="no compiler here"):
        Assembly(recipes.load("digits", ["training.kernel=native"])).check()


@pytest.mark.slow
@pytest.mark.skipif(library.instruction_set() is None, reason="the kernel needs AVX2")
def test_a_run_records_the_kernel_that_auto_chose(tmp_path: Path) -> None:
    runs = [
        simulations.simulate(
            "digits", overrides=["federation.rounds=1", f"training.kernel={kernel}"], run_dir=tmp_path / kernel
        )
        for kernel in ("auto", "native")
    ]
    assert recipes.load(tmp_path / "auto" / "recipe.toml").training.kernel == "native"
    assert runs[0]["model_sha256"] == runs[1]["model_sha256"]
