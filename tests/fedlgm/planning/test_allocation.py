"""Allocations are the optima they claim to be, and spend the budget exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.errors import ConfigError
from fedlgm.planning import allocation
from fedlgm.planning.allocation import allocate, effective_multiplier, shares

SMALL = ["federation.rounds=1", "federation.clients=20", "privacy.accountant=rdp"]

# The objective sum_j w_j sigma_j^2 that each rule minimises.
WEIGHTS = {
    "sensitivity-proportional": lambda s, d: 1 / s**2,
    "dimension-adjusted": lambda s, d: d**2 / s**2,
    "min-total-noise": lambda s, d: d,
    "snr-consistent": lambda s, d: d / s**2,
    "uniform": lambda s, d: s**2,
}
layer = st.tuples(st.floats(1e-3, 1e3), st.integers(1, 10**7), st.floats(-2, 2))
models = st.lists(layer, min_size=2, max_size=8)


def unpack(model):
    s, d, direction = (np.array(column) for column in zip(*model, strict=True))
    return s, d.astype(float), direction


@pytest.mark.parametrize("name", WEIGHTS)
@settings(max_examples=30)
@given(model=models, size=st.floats(1e-3, 1.0))
def test_no_other_split_of_the_budget_does_better(name, model, size):
    s, d, direction = unpack(model)
    p = shares(name, s, d)
    other = p * np.exp(size * direction)
    other /= other.sum()
    weights = WEIGHTS[name](s, d)

    def objective(share):
        return np.sum(weights * allocation.spread(share, s, 1.0) ** 2)

    assert objective(p) <= objective(other) * (1 + 1e-12)


@given(models, st.floats(1e-3, 1.0))
def test_max_snr_sum_is_a_vertex(model, size):
    s, d, direction = unpack(model)
    p = shares("max-snr-sum", s, d)
    other = np.full(len(d), 1 / len(d)) * np.exp(size * direction)
    other /= other.sum()
    assert np.sum(p / d) >= np.sum(other / d) * (1 - 1e-12)
    assert np.sum(p / d) == pytest.approx(1 / d.min())


@pytest.mark.parametrize("name", allocation.names())
@settings(max_examples=30)
@given(model=models, multiplier=st.floats(0.05, 50))
def test_every_rule_spends_the_budget_exactly(name, model, multiplier):
    s, d, _ = unpack(model)
    sigma = allocate(name, s, d, multiplier)
    assert np.sum((s / sigma) ** 2) == pytest.approx(1 / multiplier**2, rel=1e-9)
    released = np.isfinite(sigma)
    assert effective_multiplier(s[released], sigma[released]) == pytest.approx(multiplier, rel=1e-9)
    assert shares(name, s, d).sum() == pytest.approx(1)


@given(models)
def test_identities_between_the_rules(model):
    s, d, _ = unpack(model)
    sigma = {name: allocate(name, s, d, 1.0) for name in WEIGHTS}
    total = {name: np.sum(d * sigma[name] ** 2) for name in WEIGHTS}
    inverse = {name: np.sum(d * sigma[name] ** 2 / s**2) for name in WEIGHTS}
    assert total["uniform"] == pytest.approx(d.sum() * np.sum(s**2))
    assert total["dimension-adjusted"] == pytest.approx(total["uniform"])
    assert inverse["sensitivity-proportional"] == pytest.approx(len(d) * d.sum())
    assert inverse["dimension-adjusted"] == pytest.approx(inverse["sensitivity-proportional"])
    assert s**2 / (d * sigma["dimension-adjusted"] ** 2) == pytest.approx(
        np.full(len(d), 1 / d.sum())
    )


@pytest.mark.parametrize("name", allocation.names())
@settings(max_examples=30)
@given(model=models, factor=st.floats(1e-3, 1e3))
def test_scaling_all_bounds_scales_the_noise(name, model, factor):
    s, d, _ = unpack(model)
    assert shares(name, factor * s, d) == pytest.approx(shares(name, s, d), rel=1e-9)
    assert allocate(name, factor * s, d, 1.0) == pytest.approx(
        factor * allocate(name, s, d, 1.0), rel=1e-9
    )


@pytest.mark.parametrize(
    "name", ["sensitivity-proportional", "dimension-adjusted", "snr-consistent"]
)
@settings(max_examples=30)
@given(model=models)
def test_shares_that_do_not_depend_on_the_bounds(name, model):
    s, d, _ = unpack(model)
    assert shares(name, s, d) == pytest.approx(shares(name, s[::-1].copy(), d), rel=1e-9)


@given(st.lists(st.integers(1, 10**7), min_size=2, max_size=8))
def test_equal_bounds(dims):
    clip = np.full(len(dims), 0.3)
    assert allocate("uniform", clip, dims, 1.0) == pytest.approx(
        allocate("sensitivity-proportional", clip, dims, 1.0)
    )
    assert allocate("min-total-noise", clip, dims, 1.0) == pytest.approx(
        allocate("snr-consistent", clip, dims, 1.0)
    )


def test_a_layer_without_noise_is_no_privacy():
    assert effective_multiplier([1.0, 1.0], [1.0, 0.0]) == 0.0
    assert effective_multiplier([0.0, 0.0], [1.0, 0.0]) == float("inf")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="snr-consistent") as caught:
        allocate("typo", [1], [1], 1.0)
    assert all(name in str(caught.value) for name in allocation.names())


@pytest.mark.parametrize(
    ("clip", "dims", "multiplier"),
    [
        ([1, -1], [2, 2], 1.0),
        ([1, 0], [2, 2], 1.0),
        ([1, float("nan")], [2, 2], 1.0),
        ([1, float("inf")], [2, 2], 1.0),
        ([1], [2, 2], 1.0),
        ([], [], 1.0),
        ([1, 1], [2, 0], 1.0),
        ([1, 1], [2, float("nan")], 1.0),
        ([1, 1], [2, float("inf")], 1.0),
        ([1, 1], [2, 2], 0.0),
        ([1, 1], [2, 2], float("inf")),
        ([1, 1], [2, 2], float("nan")),
    ],
)
def test_bad_arguments_are_refused(clip, dims, multiplier):
    with pytest.raises(ConfigError):
        allocate("snr-consistent", clip, dims, multiplier)


def cubed(s, d):
    return d**3


@pytest.fixture
def own_rules(monkeypatch):
    from fedlgm import mechanisms

    monkeypatch.setattr(allocation._SHARES, "_items", dict(allocation._SHARES._items))
    monkeypatch.setattr(mechanisms._REGISTRY, "_items", dict(mechanisms._REGISTRY._items))


@pytest.mark.usefixtures("own_rules")
def test_a_rule_of_ones_own_is_a_mechanism_too(tmp_path):
    import simulations
    from fedlgm import mechanisms

    allocation.register("cubed", cubed)
    allocation.register("cubed", cubed)
    assert shares("cubed", [1, 1], [1, 2]).tolist() == [1 / 9, 8 / 9]
    assert "cubed" in mechanisms.names()
    assert "bound" in mechanisms.options("cubed")
    runs = {
        name: simulations.simulate(mechanism=name, overrides=SMALL, run_dir=tmp_path / name[:3])
        for name in ("cubed", f"{__name__}:cubed", "uniform")
    }
    named, referred, uniform = (run["model_sha256"] for run in runs.values())
    assert named == referred != uniform
    assert runs["cubed"].epsilon == pytest.approx(8, abs=1e-3)


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (lambda s, d: d[:1], "one finite share"),
        (lambda s, d: d * np.nan, "one finite share"),
        (lambda s, d: -d, "one finite share"),
        (lambda s, d: d * 0, "not only zeros"),
        (lambda s, d: d / 0 if len(d) > 2 else undefined, "undefined"),  # noqa: F821
    ],
)
def test_a_rule_whose_shares_are_no_shares_is_refused(rule, wrong):
    allocation.register("mine", rule)
    with pytest.raises(ConfigError, match=wrong):
        shares("mine", [1.0, 2.0], [3, 4])


@pytest.mark.usefixtures("own_rules")
def test_names_that_are_taken_and_what_is_no_rule_are_refused():
    from fedlgm import mechanisms

    with pytest.raises(ConfigError, match="'uniform' already"):
        allocation.register("uniform", cubed)
    with pytest.raises(ConfigError, match="'gaussian' already"):
        allocation.register("gaussian", cubed)
    with pytest.raises(ConfigError, match="a rule must be a function"):
        allocation.register("three", 3)
    allocation.register("cubed", cubed)
    with pytest.raises(ConfigError, match="'cubed' already"):
        mechanisms.register("cubed", mechanisms.AdaptiveAllocation)
