"""Example-level runs: every engine gives the same bits and the same ledgers of clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.errors import ConfigError
from fedlgm.privacy.ledger import Ledger
from simulations import launch
from simulations.config import recipe as recipes
from simulations.summaries.ledgers import ledger_report

CENTRAL = recipes.load(
    "dp-sgd-digits",
    ["federation.rounds=4", "federation.clients=3", "federation.rate=1", "privacy.accountant=rdp"],
)
FEDERATED = recipes.load(
    "example-level-federation",
    [
        "federation.clients=8",
        "federation.rounds=3",
        "federation.rate=0.7",
        "training.steps=2",
        "run.block_size=2",
        "mechanism.style=per-layer",
        "mechanism.clip=med",
        "mechanism.norms=quantile",
        "privacy.accountant=rdp",
        "privacy.max_participations=2",
    ],
)
SAME = ("model_sha256", "accuracy", "epsilon", "rounds", "noise_multiplier", "guarantee", "unit")


pytestmark = pytest.mark.slow


def spent(run: str) -> tuple[list, set]:
    with Ledger(Path(run) / "ledger.sqlite") as ledger:
        return ledger_report(Path(run))["clients"], ledger.noise_keys()


def assert_same_bits(recipe: recipes.Recipe, folder: Path, **options) -> None:
    expected = launch.simulate(recipe, engine="local", run_dir=folder / "local")
    result = launch.simulate(recipe, run_dir=folder / "other", **options)
    assert {name: result[name] for name in SAME} == {name: expected[name] for name in SAME}
    assert spent(result["run"]) == spent(expected["run"])


@pytest.mark.parametrize(
    "recipe", [pytest.param(CENTRAL, id="central"), pytest.param(FEDERATED, id="federated")]
)
def test_ray_gives_the_same_bits(tmp_path, one_ray, recipe):
    assert_same_bits(recipe, tmp_path, engine="ray", workers=2)


def _of(base: str, *overrides: str):
    return recipes.load(base, ["privacy.accountant=rdp", *overrides])


# every other mechanism and variant, centralised and by clients that noise their own steps
OTHERS = {
    "auto-s": ["mechanism.name=auto-s"],
    "dp-psac": ["mechanism.name=dp-psac"],
    **{
        f"lm-dp-sgd {weights}": [
            "mechanism.name=lm-dp-sgd",
            f"mechanism.weights={weights}",
            "mechanism.emphasis=2",
        ]
        for weights in ("public", "stale", "privatised")
    },
    "lm-dp-sgd published": ["mechanism.name=lm-dp-sgd", "mechanism.variant=published"],
    "lm-dp-sgd published, least bias": [
        "mechanism.name=lm-dp-sgd",
        "mechanism.variant=published",
        "mechanism.weights=bias",
    ],
}
BASES = {
    "central": ("dp-sgd-digits", "federation.rounds=3"),
    "federated": (
        "example-level-federation",
        "federation.clients=6",
        "federation.rounds=3",
        "training.steps=2",
        "run.block_size=2",
    ),
}


@pytest.mark.parametrize(
    ("base", "name"),
    [
        # Weights from the loss, and from a query: once for a central run, once for a federation.
        ("central", "auto-s"),
        ("federated", "dp-psac"),
        ("federated", "lm-dp-sgd public"),
        ("central", "lm-dp-sgd stale"),
        ("central", "lm-dp-sgd privatised"),
        ("central", "lm-dp-sgd published"),
        ("central", "lm-dp-sgd published, least bias"),
    ],
)
def test_every_other_mechanism_gives_the_same_bits_on_ray(tmp_path, one_ray, base, name):
    recipe = _of(*BASES[base], *OTHERS[name])
    assert_same_bits(recipe, tmp_path, engine="ray", workers=2)


@pytest.mark.parametrize("name", [name for name in OTHERS if "published" in name])
def test_a_federation_refuses_a_plan_of_each_batch(tmp_path, name):
    with pytest.raises(ConfigError, match="plans every step from its batch"):
        launch.simulate(_of(*BASES["federated"], *OTHERS[name]), run_dir=tmp_path / "run")


def test_flower_gives_the_same_bits(tmp_path):
    """With weights that go from step to step, and a node per client."""
    recipe = _of(
        *BASES["federated"],
        *OTHERS["lm-dp-sgd privatised"],
        "privacy.max_participations=2",
        "federation.rate=0.7",
    )
    nodes = recipe.federation.clients
    assert_same_bits(recipe, tmp_path, engine="flower", workers=1, supernodes=nodes)
