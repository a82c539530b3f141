"""Recipes that keep releases for a certificate, or cannot."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fedlgm import allocation, mechanisms
from fedlgm.errors import ConfigError
from simulations.config import recipe as recipes
from simulations.config.kept_releases import server_step_of
from tests.support.certificates import SMALL

REFUSED = {
    "run.keep_releases: under local trust the clients draw the noise": [
        "privacy.trust=local",
        "privacy.max_participations=3",
        "run.beacon=file",
    ],
    "run.keep_releases: a certificate names who took part": [
        "privacy.trust=distributed",
        "privacy.accountant=rdp",
        "privacy.max_participations=3",
        "federation.sampling=fixed",
        "distributed.threshold=10",
    ],
    "run.keep_releases: nobody can see": [
        "mechanism.name='fedlgm.mechanisms.layerwise_gaussian:LayerwiseGaussian'",
        "mechanism.bound=none",
    ],
    "run.keep_releases: a verifier repeats only": ["federation.server_optimizer=yogi"],
    "run.keep_releases: canaries": ["run.audit=true"],
    "run.keep_releases: a run that may stop": ["run.patience=2"],
    "run.keep_releases: a public seed needs no": ["run.seed=2", "run.beacon=file"],
    "run.beacon is for runs": ["run.keep_releases=false", "run.beacon=file"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_recipe_that_could_not_be_certified_is_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipes.load("digits", [*SMALL, *REFUSED[message]])


def test_a_registered_mechanism_of_a_user_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Mine(mechanisms.FlatGaussian):
        __module__ = "mypkg.mechanisms"

    registered = dict(allocation.MECHANISMS.items())
    monkeypatch.setattr(allocation.MECHANISMS, "_items", registered)
    mechanisms.register("registered-mine", Mine)
    assert mechanisms.is_own("registered-mine")
    assert not any(map(mechanisms.is_own, set(mechanisms.names(None)) - {"registered-mine"}))
    with pytest.raises(ConfigError, match=r"run.keep_releases: nobody can see"):
        recipes.load("digits", [*SMALL, "mechanism.name=registered-mine"])


def test_the_text_of_other_recipes_stays_as_it_was() -> None:
    assert "keep_releases" not in recipes.load("digits").to_toml()
    assert recipes.load("digits", ["run.keep_releases=false"]) == recipes.load("digits")


def test_an_example_level_recipe_steps_as_its_training_says() -> None:
    assert server_step_of(recipes.load("dp-sgd-digits"))[0] in ("sgd", "momentum", "adam")
    averaged = recipes.load("example-level-federation", ["federation.server_lr=0.7"])
    assert server_step_of(averaged)[1] == 0.7  # the server averages what the clients release
    with pytest.raises(ConfigError, match=r"run.keep_releases: .*'adam'"):
        recipes.load(
            "dp-sgd-digits",
            [
                "run.seed=none",
                "run.keep_releases=true",
                "training.optimizer=adam",
                "training.momentum=0.0",
            ],
        )
