"""Plans, facts and correlations as a hostile peer or a careless caller may write them: refused with
one message."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import Guarantee, ReleasePlan
from fedlgm.planning.transcript import Transcript

LAYERS = LayerTable.from_sizes({"a": 3, "b": 2})
CORRELATED = RunFacts(
    1.0, Sampling("cyclic", 10, 0.5, 2), rounds=4, noise=correlation.get("banded", 4, bands=2)
)
STEPS = RunFacts(
    1.0,
    Sampling("poisson", 10, 0.5),
    "add-remove",
    "local",
    rounds=4,
    steps=LocalSteps(3, 0.1, 8.0),
)


def raw_plan(facts: RunFacts) -> dict:
    name = "dp-sgd" if facts.steps is not None else "snr-consistent"
    mechanism = mechanisms.get(name)
    plan = mechanism.plan(mechanism.table(LAYERS), facts, Transcript(0, ()))
    return json.loads(replace(plan, position=1).to_json())


def read(raw: dict, facts: RunFacts) -> ReleasePlan:
    return ReleasePlan.from_json(
        LAYERS.as_single_layer() if facts.steps is not None else LAYERS, json.dumps(raw)
    )


@pytest.mark.parametrize("facts", [CORRELATED, STEPS], ids=["correlated", "steps"])
def test_what_was_not_crafted_is_read(facts):
    assert read(raw_plan(facts), facts).event is not None


CRAFTED = {
    "position": [math.nan, 1.5, "1", True, [1], math.inf],
    "facts.sampling.separation": [math.nan, math.inf, 0, -1, 1.5, "2", 3, None],
    "facts.sampling.population": [math.nan, math.inf, 0, 1.5, "10"],
    "facts.sampling.rate": [math.nan, 0, 2, "x"],
    "facts.relation": [math.nan, "x", 3, None],
    "facts.trust": [math.nan, "x", 3, "local"],
    "facts.rounds": [math.nan, math.inf, 0, 3, 5],
    "facts.noise.rounds": [math.nan, 10**9, 0, 3],
    "facts.noise.coefficients": [
        [math.nan, 1],
        [1, math.inf],
        [0, 1],
        [-1, 1],
        [1] * 5,
        [],
        "ab",
        [[1, 2]],
    ],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in CRAFTED.items() for value in values]
)
def test_crafted_plans_are_refused(path, value):
    raw = raw_plan(CORRELATED)
    *above, last = path.split(".")
    section = raw
    for name in above:
        section = section[name]
    section[last] = value
    with pytest.raises((ConfigError, PrivacyError)):
        read(raw, CORRELATED)


@pytest.mark.parametrize(
    "crafted",
    [
        *({"count": value} for value in (math.nan, 2.5, 0, "2")),
        *({"rate": value} for value in (math.nan, 0)),
        *({"batch": value} for value in (math.nan, math.inf, 0)),
    ],
    ids=str,
)
def test_crafted_steps_are_refused(crafted):
    raw = raw_plan(STEPS)
    raw["facts"]["steps"] |= crafted
    with pytest.raises(ConfigError):
        read(raw, STEPS)


def test_increasing_bands_cost_more_and_never_less():
    raw = raw_plan(CORRELATED)
    raw["facts"]["noise"]["coefficients"] = [1.0, 2.0]
    facts = read(raw, CORRELATED).facts
    assert facts.noise.sensitivity(2) >= math.sqrt(2) * math.hypot(1.0, 2.0) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("decays", "scales"), [([0.5] * 9, [0.01] * 9), ([0.5], [1.5]), ([0.5, 0.4], [0.5])]
)
def test_buffers_beyond_what_the_strategy_allows_are_refused(decays, scales):
    """Thousands of them over a million rounds would fill the memory of whoever reads the
    message."""
    with pytest.raises(ConfigError):
        Correlation.from_dict({"name": "blt", "rounds": 4, "decays": decays, "scales": scales})


def test_buffers_and_coefficients_are_of_one_matrix():
    """The noise is made by the buffers, what it costs is computed from the coefficients."""
    honest = correlation.get("blt", 6, buffers=1)
    with pytest.raises(ConfigError, match="do not follow from the buffers"):
        Correlation("blt", 6, honest.coefficients * 0.5, honest.decays, honest.scales)
    assert honest.leading(3).rounds == 3


def test_sampling_of_local_steps_amplifies_no_whole_update():
    facts = replace(STEPS, steps=LocalSteps(1, 0.001, 1.0))
    with pytest.raises(PrivacyError, match="local steps sample a client's examples"):
        ReleasePlan(LAYERS, np.ones(2), np.ones(2), facts, Guarantee("proven", "a test"))


ASSUMED = {
    "grouped": (
        replace(CORRELATED, sampling=Sampling("grouped-poisson", 10, 0.2, 2)),
        "one of 2 groups for the whole run, and who takes part in a group's round stays secret",
    ),
    "public": (
        CORRELATED,
        "nobody takes part twice within 2 rounds; who takes part when may be known",
    ),
    "clients": (
        RunFacts(1.0, Sampling("poisson", 10, 0.2)),
        "who takes part in a round stays secret",
    ),
    "steps": (STEPS, "which of its examples a client's step draws stays secret"),
}


@pytest.mark.parametrize("kind", ASSUMED)
def test_a_guarantee_says_unit_relation_trust_and_what_it_assumes(kind):
    facts, assumed = ASSUMED[kind]
    plan = read(raw_plan(facts), facts)
    said = plan.guarantee.sentence(noise_reproducible=False)
    unit, who = (
        ("example", "each client adds") if kind == "steps" else ("client", "a trusted server adds")
    )
    assert f"({unit}-level, add-remove, {who}" in said
    assert said.count(assumed) == 1  # and stays so when it travels


@pytest.mark.parametrize("name", mechanisms.names("example"))
def test_every_example_level_mechanism_says_what_must_stay_secret(name):
    facts = RunFacts(1.0, Sampling("poisson", 1000, 0.1))
    mechanism = mechanisms.get(name)
    guarantee = mechanism.plan(mechanism.table(LAYERS), facts, Transcript(0, ())).guarantee
    if guarantee.status != "none":
        assert (
            guarantee.sentence(noise_reproducible=False).count(
                "which examples a round draws stays secret"
            )
            == 1
        )
