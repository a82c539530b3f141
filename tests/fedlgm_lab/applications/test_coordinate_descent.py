"""Private coordinate descent: convergence, sensitivities, budgets, smoothness constants, data."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.linear_model import Lasso as SkLasso
from sklearn.linear_model import LogisticRegression

from fedlgm.errors import ConfigError, DataError
from fedlgm.mechanisms.inid import noise_scales
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.privacy.gaussian import gaussian_mu
from fedlgm_lab.applications.coordinate_descent import (
    coordinate_gradient_sum,
    descend,
    pass_budget,
    plan_descent,
)
from fedlgm_lab.applications.datasets import load_tabular
from fedlgm_lab.applications.objectives import Lasso, Logistic
from fedlgm_lab.applications.smoothness import smoothness
from fedlgm_lab.studies.tables.private_smoothness import private_smoothness

M = np.array([0.2, 1.0, 3.0, 10.0])
ARGUMENTS = {"budget": 0.1, "rule": "inid", "clip": 0.5, "rate": 0.8, "passes": 3, "rows": 50}
constants = hnp.arrays(np.float64, st.integers(1, 6), elements=st.floats(1e-4, 1e4))
OBJECTIVES = [Lasso(0.02), Logistic(0.02)]


def rng(*path):
    return KeyRing.from_seed(5).numpy_generator(Purpose.NOISE, *path)


def noiseless(objective, x, y, passes=600):
    m = smoothness(objective, x)
    plan = plan_descent(m, **ARGUMENTS | {"passes": passes, "rate": 1.0, "rows": len(y)})
    plan = replace(plan, clip=np.full(m.size, np.inf), noise=np.zeros(m.size))
    return descend(objective, x, y, plan, rng())


# --- optimisation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.02, 0.3])
def test_without_noise_it_finds_scikit_learns_lasso(strength):
    data = load_tabular("diabetes")
    path = noiseless(Lasso(strength), data.features, data.targets)
    known = SkLasso(alpha=strength, fit_intercept=False, tol=1e-12, max_iter=100_000).fit(
        data.features, data.targets
    )
    assert path[-1] == pytest.approx(known.coef_, abs=1e-8)
    assert np.array_equal(path[-1] == 0, known.coef_ == 0)
    values = [Lasso(strength).value(theta, data.features, data.targets) for theta in path]
    assert np.all(np.diff(values) <= 1e-12)  # every pass descends


def test_without_noise_it_finds_scikit_learns_logistic_regression():
    data = load_tabular("breast-cancer")
    path = noiseless(Logistic(0.05), data.features, data.targets, passes=1000)
    known = LogisticRegression(
        C=1 / (0.05 * len(data.targets)), fit_intercept=False, tol=1e-10, max_iter=10_000
    )
    known.fit(data.features, data.targets)
    assert path[-1] == pytest.approx(known.coef_[0], abs=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_gradients_and_prox_belong_to_the_objective(objective):
    stream = rng(1)
    x, y, theta = (
        stream.normal(size=(30, 3)),
        np.sign(stream.normal(size=30)),
        stream.normal(size=3),
    )
    smooth = replace(objective, strength=0.0)
    for i, step in enumerate(np.eye(3) * 1e-5):
        slope = (smooth.value(theta + step, x, y) - smooth.value(theta - step, x, y)) / 2e-5
        total = coordinate_gradient_sum(objective, x, y, x @ theta, i, math.inf)
        assert total / 30 == pytest.approx(slope, rel=1e-6)
    grid = np.linspace(-3, 3, 6001)
    penalty = np.array(
        [objective.value(np.array([w]), np.zeros((1, 1)), np.zeros(1)) for w in grid]
    )
    for value in (-2.0, -0.005, 0.0, 0.7):
        best = grid[np.argmin((grid - value) ** 2 / 2 + 0.9 * penalty)]
        assert objective.prox(value, 0.9) == pytest.approx(best, abs=1e-3)


# --- the private step --------------------------------------------------------------------------------------------

features = hnp.arrays(
    np.float64, st.tuples(st.integers(2, 6), st.just(2)), elements=st.floats(-1e6, 1e6)
)


@given(features, st.floats(1e-3, 10), st.sampled_from(OBJECTIVES), st.data())
def test_one_row_moves_a_sum_by_its_clip_and_a_replacement_by_twice(x, clip, objective, data):
    targets = data.draw(hnp.arrays(np.float64, len(x), elements=st.sampled_from([-1.0, 1.0])))
    theta = data.draw(hnp.arrays(np.float64, 2, elements=st.floats(-100, 100)))

    def total(rows, labels):
        return coordinate_gradient_sum(objective, rows, labels, rows @ theta, 1, clip)

    assert abs(total(x, targets) - total(x[1:], targets[1:])) <= clip * (1 + 1e-9)
    other = x.copy()
    other[0] = data.draw(hnp.arrays(np.float64, 2, elements=st.floats(-1e6, 1e6)))
    assert abs(total(x, targets) - total(other, targets)) <= 2 * clip * (1 + 1e-9)
    parts = total(x[:1], targets[:1]) + total(x[1:], targets[1:])
    assert total(x, targets) == pytest.approx(
        parts, rel=1e-9, abs=1e-9
    )  # clients may each send theirs


def test_a_replacement_can_move_a_sum_by_the_whole_double_clip():
    x, margins = np.array([[1e3], [0.0]]), np.array([1e3, 0.0])
    sums = [
        coordinate_gradient_sum(Lasso(0.0), x, np.array([y, 1.0]), margins, 0, 0.5)
        for y in (1.0, 1e6)
    ]
    assert sums[0] - sums[1] == pytest.approx(1.0)


def test_a_non_finite_derivative_counts_as_zero():
    x, margins = np.ones((3, 1)), np.array([np.nan, np.inf, 2.0])
    assert coordinate_gradient_sum(Lasso(0.0), x, np.zeros(3), margins, 0, 5.0) == 2.0


# --- plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("relation", "factor"), [("replace-one", 2), ("add-remove", 1)])
@pytest.mark.parametrize("rule", ["inid", "spr"])
@given(m=constants)
def test_a_pass_spends_its_budget_exactly(relation, factor, rule, m):
    for family, norm in (("gaussian", 2), ("laplace", 1)):
        plan = plan_descent(m, **ARGUMENTS | {"rule": rule, "family": family, "relation": relation})
        assert np.linalg.norm(factor * plan.clip / plan.noise, norm) == pytest.approx(
            0.1, rel=1e-10
        )
        assert np.linalg.norm(plan.clip) == pytest.approx(0.5)
        assert plan.rates * m == pytest.approx(np.full(m.size, 0.8))
        assert (plan.guarantee.status, plan.guarantee.relation) == ("proven", relation)


@given(constants)
def test_noise_on_sums_is_the_papers_noise_on_updates(m):
    plan = plan_descent(m, **ARGUMENTS)
    profile = 2 * plan.rates * plan.clip / plan.rows  # sensitivity of the update, replace-one
    assert plan.noise * plan.rates / plan.rows == pytest.approx(
        noise_scales("gaussian", "inid", profile, 0.1), rel=1e-9
    )
    plan = plan_descent(m, **ARGUMENTS | {"family": "laplace"})
    assert plan.noise * plan.rates / plan.rows == pytest.approx(
        noise_scales("laplace", "inid", profile, 0.1), rel=1e-9
    )
    plan = plan_descent(m, **ARGUMENTS | {"rule": "spr"})
    updates = plan.noise * plan.rates / plan.rows
    assert updates == pytest.approx(math.sqrt(m.size) * profile / 0.1, rel=1e-9)


@given(constants)
def test_dp_cd_is_optimal_for_the_smoothness_weighted_error(m):
    """The objective rises by at most sum_i M_i t_i^2 / 2; weighting by M_i turns the i.n.i.d. rule
    into SPR."""
    spr = plan_descent(m, **ARGUMENTS | {"rule": "spr"})
    profile = 2 * spr.rates * spr.clip / spr.rows
    assert spr.noise * spr.rates / spr.rows == pytest.approx(
        noise_scales("gaussian", "inid", profile, 0.1, weights=m), rel=1e-9
    )


@pytest.mark.parametrize("rule", ["inid", "spr"])
def test_events_are_worth_the_budget(rule):
    plan = plan_descent(
        M, **ARGUMENTS | {"budget": pass_budget("gaussian", 1.0, 1e-5, 3), "rule": rule}
    )
    assert PLDAccountant().compose(plan.event).get_epsilon(1e-5) == pytest.approx(1.0, rel=1e-3)
    laplace = {"budget": pass_budget("laplace", 1.0, 0.0, 3), "rule": rule, "family": "laplace"}
    plan = plan_descent(M, **ARGUMENTS | laplace)
    assert 0.8 < PLDAccountant().compose(plan.event).get_epsilon(1e-9) <= 1.0 + 1e-3


def test_a_pass_gets_its_share():
    assert pass_budget("gaussian", 2.0, 1e-6, 16) == pytest.approx(gaussian_mu(2.0, 1e-6) / 4)
    assert pass_budget("laplace", 2.0, 0.0, 16) == pytest.approx(1 / 8)


def test_a_run_depends_on_its_stream_only_and_its_noise_has_the_planned_scale():
    x, y = np.zeros((50, 4)), np.zeros(50)  # no signal: theta moves by noise alone
    plan = plan_descent(M, **ARGUMENTS | {"passes": 4000})
    path = descend(Lasso(0.0), x, y, plan, rng(2))
    assert np.array_equal(path, descend(Lasso(0.0), x, y, plan, rng(2)))
    steps = np.diff(path, axis=0)
    assert steps.std(axis=0) == pytest.approx(plan.noise * plan.rates / plan.rows, rel=0.05)
    assert abs(np.corrcoef(steps.T) - np.eye(4)).max() < 0.08


def test_private_runs_come_close_to_the_optimum_when_the_budget_is_large():
    data = load_tabular("diabetes")
    objective = Lasso(0.02)
    m, rows = smoothness(objective, data.features), len(data.targets)
    best = objective.value(
        noiseless(objective, data.features, data.targets)[-1], data.features, data.targets
    )

    def error(epsilon):
        budget = pass_budget("gaussian", epsilon, 1e-5, 20)
        plan = plan_descent(m, budget=budget, rule="spr", clip=3.0, rate=1.0, passes=20, rows=rows)
        runs = [
            descend(objective, data.features, data.targets, plan, rng(3, seed))[-1]
            for seed in range(5)
        ]
        return np.mean(
            [objective.value(theta, data.features, data.targets) / best - 1 for theta in runs]
        )

    assert error(100.0) < 0.05 < error(1.0)


# --- smoothness --------------------------------------------------------------------------------------------------


def test_smoothness_constants():
    x = np.array([[1.0, 2.0], [3.0, 0.0]])
    assert smoothness(Lasso(0.1), x) == pytest.approx([5, 2])
    assert smoothness(Logistic(0.1), x) == pytest.approx([1.25, 0.5])
    with pytest.raises(DataError, match=r"\[1\] are zero"):
        smoothness(Lasso(0.1), np.array([[1.0, 0.0]]))


def test_private_smoothness_has_the_stated_noise_floor_and_clipping():
    x = np.tile([0.5, 4.0], (1000, 1))
    bounds = np.array([1.0, 2.0])
    draws = np.stack(
        [
            private_smoothness(
                Lasso(0.0), x, bounds, epsilon=0.5, rows=1000, rng=rng(4, i), floor=1e-9
            )
            for i in range(4000)
        ]
    )
    assert draws.mean(axis=0) == pytest.approx(
        [0.25, 4.0], rel=0.01
    )  # the second feature is clipped to its bound
    assert draws.std(axis=0) == pytest.approx(math.sqrt(2) * bounds**2 * 2 / (0.5 * 1000), rel=0.08)
    starved = [
        private_smoothness(
            Logistic(0.0), x, bounds, epsilon=1e-4, rows=1000, rng=rng(5, i), floor=0.02
        )
        for i in range(20)
    ]
    assert np.min(starved, axis=0) == pytest.approx(0.25 * 0.02 * bounds**2)
    plan_descent(starved[0], **ARGUMENTS)  # usable


@given(hnp.arrays(np.float64, (3, 2), elements=st.floats(-1e3, 1e3)))
def test_one_row_moves_a_smoothness_sum_by_at_most_its_squared_bound(x):
    bounds = np.array([0.5, 3.0])

    def estimate(rows):
        return private_smoothness(
            Lasso(0.0), rows, bounds, epsilon=1e12, rows=1, rng=rng(6), floor=1e-12
        )

    assert np.all(np.abs(estimate(x) - estimate(x[1:])) <= bounds**2 * (1 + 1e-6) + 1e-9)


# --- data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [("diabetes", (442, 10)), ("breast-cancer", (569, 30))])
def test_bundled_data(name, shape):
    for scaling in ("range", "standardized", "centered"):
        data = load_tabular(name, scaling=scaling)
        assert data.features.shape == shape
        assert data.features.mean(axis=0) == pytest.approx(np.zeros(shape[1]), abs=1e-9)
        if data.classification:
            assert set(data.targets) == {-1.0, 1.0}
        else:
            assert (data.targets.mean(), data.targets.std()) == pytest.approx((0, 1))
    assert np.abs(load_tabular(name).features).max(axis=0) == pytest.approx(np.ones(shape[1]))
    assert load_tabular(name, scaling="standardized").features.std(axis=0) == pytest.approx(
        np.ones(shape[1])
    )


@pytest.mark.filterwarnings("ignore:Retry downloading", "ignore:A network error")
@pytest.mark.slow  # scikit-learn tries three times
@pytest.mark.parametrize("name", ["california", "electricity"])
def test_an_unreachable_set_is_a_clear_error(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path))
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(DataError, match=f"{name} could not be downloaded"):
        load_tabular(name)


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"smoothness": [1.0, 0.0]}, "smoothness constants must be"),
        ({"smoothness": [1.0, math.nan]}, "smoothness constants must be"),
        ({"smoothness": []}, "smoothness constants must be"),
        ({"budget": 0.0}, "budget must be"),
        ({"clip": -1.0}, "clip must be"),
        ({"rate": math.inf}, "rate must be"),
        ({"passes": 0}, "passes must be a whole number"),
        ({"passes": 2.5}, "passes must be a whole number"),
        ({"rows": 0}, "rows must be a whole number"),
        ({"rows": 1.5}, "rows must be a whole number"),
        ({"rows": -1}, "rows must be a whole number"),
        ({"rule": "uniform"}, "rule: inid, spr"),
        ({"family": "cauchy"}, "family: gaussian, laplace"),
        ({"relation": "swap-out"}, "relation: add-remove, replace-one, zero-out"),
    ],
    ids=str,
)
def test_bad_plans(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan_descent(**{"smoothness": M} | ARGUMENTS | changes)


def test_bad_input():
    plan = plan_descent(M, **ARGUMENTS)
    with pytest.raises(DataError, match="4 coordinates"):
        descend(Lasso(0.1), np.ones((5, 3)), np.ones(5), plan, rng())
    with pytest.raises(DataError, match="finite"):
        descend(Lasso(0.1), np.full((5, 4), np.nan), np.ones(5), plan, rng())
    with pytest.raises(DataError, match="shape"):
        descend(Lasso(0.1), np.ones((5, 4)), np.ones(6), plan, rng())
    with pytest.raises(ConfigError, match="strength"):
        Lasso(-1.0)
    with pytest.raises(ConfigError, match="strength"):
        Logistic(math.nan)
    with pytest.raises(ConfigError, match="passes"):
        pass_budget("gaussian", 1.0, 1e-5, 0)
    with pytest.raises(ConfigError, match="delta must be 0"):
        pass_budget("laplace", 1.0, 1e-5, 3)
    with pytest.raises(ConfigError, match="known: diabetes"):
        load_tabular("iris")
    with pytest.raises(ConfigError, match="known: range"):
        load_tabular("diabetes", scaling="log")
    x = np.ones((5, 2))
    for changes, message in (
        ({"bounds": [1.0]}, "bounds must be 2"),
        ({"bounds": [1.0, 0.0]}, "bounds must be 2"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"floor": 0.0}, "floor must lie"),
        ({"rows": 0}, "rows must be"),
    ):
        arguments = {
            "bounds": [1.0, 1.0],
            "epsilon": 1.0,
            "rows": 5,
            "rng": rng(),
            "floor": 0.1,
        } | changes
        with pytest.raises(ConfigError, match=message):
            private_smoothness(Lasso(0.0), x, **arguments)
    with pytest.raises(DataError, match="finite matrix"):
        private_smoothness(Lasso(0.0), np.ones(3), [1.0], epsilon=1.0, rows=5, rng=rng())
