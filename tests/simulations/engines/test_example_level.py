"""Example-level runs: every engine gives the same bits and the same ledgers of clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.errors import ConfigError
from fedlgm.privacy.ledger import Ledger
from simulations import launch
from simulations.config import recipe as recipes
from simulations.reports.report import ledger_report

CENTRAL = recipes.load(
    "dp-sgd-digits", ["federation.rounds=4", "federation.clients=3", "federation.rate=1", "privacy.accountant=rdp"]
)
FEDERATED = recipes.load(
    "example-level-federation",
    [
        "federation.clients=8", "federation.rounds=3", "federation.rate=0.7", "training.steps=2", "run.block_size=2",
        "mechanism.style=per-layer", "mechanism.clip=med", "mechanism.norms=quantile", "privacy.accountant=rdp",
        "privacy.max_participations=2",
    ],
)  # fmt: skip
SAME = ("model_sha256", "accuracy", "epsilon", "rounds", "noise_multiplier", "guarantee", "unit")


@pytest.fixture(
    scope="module",
    params=[pytest.param(CENTRAL, id="central"), pytest.param(FEDERATED, id="federated")],
)
def reference(request, tmp_path_factory):
    recipe = request.param
    return recipe, launch.simulate(recipe, engine="local", run_dir=tmp_path_factory.mktemp("local") / "run")


def spent(run: str) -> tuple[list, set]:
    with Ledger(Path(run) / "ledger.sqlite") as ledger:
        return ledger_report(Path(run))["clients"], ledger.noise_keys()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"engine": "ray", "workers": 2}, id="ray", marks=pytest.mark.slow),
        pytest.param(
            {"engine": "flower", "workers": 2, "supernodes": 8}, id="flower, a node per client", marks=pytest.mark.slow
        ),
    ],
)
def test_engines_agree_bit_by_bit(reference, tmp_path, options):
    recipe, expected = reference
    if "supernodes" in options:
        options = options | {"supernodes": recipe.federation.clients}
    result = launch.simulate(recipe, run_dir=tmp_path / "run", **options)
    assert {name: result[name] for name in SAME} == {name: expected[name] for name in SAME}
    assert spent(result["run"]) == spent(expected["run"])


def _of(base: str, *overrides: str):
    return recipes.load(base, ["privacy.accountant=rdp", *overrides])


OTHERS = {  # every other mechanism and variant, centralised and by clients that noise their own steps
    "auto-s": ["mechanism.name=auto-s"],
    "dp-psac": ["mechanism.name=dp-psac"],
    **{
        f"lm-dp-sgd {weights}": ["mechanism.name=lm-dp-sgd", f"mechanism.weights={weights}", "mechanism.emphasis=2"]
        for weights in ("public", "stale", "privatised")
    },
    "lm-dp-sgd published": ["mechanism.name=lm-dp-sgd", "mechanism.variant=published"],
    "lm-dp-sgd published, least bias": [
        "mechanism.name=lm-dp-sgd", "mechanism.variant=published", "mechanism.weights=bias"
    ],
}  # fmt: skip
BASES = {
    "central": ("dp-sgd-digits", "federation.rounds=3"),
    "federated": (
        "example-level-federation", "federation.clients=6", "federation.rounds=3", "training.steps=2",
        "run.block_size=2",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", OTHERS)
def test_every_mechanism_gives_the_same_bits_in_every_engine(tmp_path, base, name):
    """Each by one other engine: centralised and federated runs of a mechanism take different ones."""
    if base == "federated" and "published" in name:
        with pytest.raises(ConfigError, match="plans every step from its batch"):
            launch.simulate(_of(*BASES[base], *OTHERS[name]), run_dir=tmp_path / "run")
        return
    recipe = _of(*BASES[base], *OTHERS[name])
    engine = ("ray", "flower")[([*OTHERS].index(name) + [*BASES].index(base)) % 2]
    expected = launch.simulate(recipe, engine="local", run_dir=tmp_path / "local")
    result = launch.simulate(recipe, engine=engine, workers=2, run_dir=tmp_path / engine)
    assert {key: result[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert spent(result["run"]) == spent(expected["run"])
