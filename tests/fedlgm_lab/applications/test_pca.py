"""Private PCA: sensitivities, noise, recovery."""

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedlgm.errors import ConfigError, DataError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.privacy.gaussian import gaussian_epsilon, gaussian_mu
from fedlgm_lab.applications.datasets import fully_random_rows
from fedlgm_lab.applications.pca import (
    covariance_plan,
    covariance_sum,
    methods,
    subspace_recovery_error,
    top_subspace,
)
from fedlgm_lab.studies.tables.pca_trials import perturb, recovery_errors

M = 12
MU = gaussian_mu(1.0, 1e-6)
rows = hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.just(M)), elements=st.floats(-3, 3))
SPECIAL = {
    "axis": np.eye(M)[0],
    "flat": np.full(M, M**-0.5),
    "two": (np.eye(M)[0] + np.eye(M)[1]) / math.sqrt(2),
    "signs": np.resize([1.0, -1.0], M) / math.sqrt(M),
    "zero": np.zeros(M),
}


def plan_of(method, dimension=M, epsilon=1.0):
    return covariance_plan(
        method, dimension, epsilon, 1e-6 if method.startswith("gaussian") else 0.0
    )


def moved(plan, row):
    """What one row's addition spends: mu of Gaussian noise, epsilon of Laplace noise."""
    outer = covariance_sum(row[None], plan)
    diagonal, above = np.diag(outer), outer[np.triu_indices(plan.dimension, 1)]
    if plan.family == "gaussian":
        return math.sqrt(
            (diagonal**2).sum() / plan.diagonal**2 + (above**2).sum() / plan.off_diagonal**2
        )
    return np.abs(diagonal).sum() / plan.diagonal + np.abs(above).sum() / plan.off_diagonal


def budget(plan):
    return MU if plan.family == "gaussian" else 1.0


@given(
    hnp.arrays(np.float64, M, elements=st.floats(-1, 1)).filter(lambda v: np.linalg.norm(v) > 1e-3)
)
def test_symmetric_noise_is_tight_for_every_unit_row(row):
    assert moved(plan_of("gaussian-symmetric"), row / np.linalg.norm(row)) == pytest.approx(
        MU, rel=1e-12
    )


@pytest.mark.parametrize("method", [m for m in methods() if m != "gaussian-inid-unclipped"])
@given(data=st.data())
def test_no_row_spends_more_than_the_budget(method, data):
    plan = plan_of(method)
    row = data.draw(
        hnp.arrays(np.float64, M, elements=st.floats(-10, 10))
        | st.sampled_from(list(SPECIAL.values()))
    )
    assert moved(plan, row) <= budget(plan) * (1 + 1e-9)


def test_which_rows_attain_the_bounds():
    assert moved(plan_of("gaussian-iid"), SPECIAL["axis"]) == pytest.approx(MU)
    assert moved(plan_of("laplace-iid"), SPECIAL["flat"]) == pytest.approx(1.0)
    assert moved(plan_of("laplace-iid"), SPECIAL["axis"]) < 0.5


def test_without_clipping_the_published_noise_is_not_private():
    plan = plan_of("gaussian-inid-unclipped", 100)
    spent = moved(plan, np.eye(100)[0])
    assert spent / MU == pytest.approx(1.18436, abs=1e-5)
    assert gaussian_epsilon(spent, 1e-6) == pytest.approx(1.200, abs=1e-3)
    assert plan.guarantee.status == "none"
    assert isinstance(plan.event, dp_accounting.NonPrivateDpEvent)
    assert moved(plan_of("gaussian-inid", 100), np.eye(100)[0]) < MU


def test_the_published_rule():
    plan = plan_of("gaussian-inid", 100)
    assert plan.entry_clip == pytest.approx((0.0140720, 0.0099504), abs=1e-7)
    assert (plan.diagonal * MU) ** 2 == pytest.approx(0.712907, abs=1e-6)
    assert (plan.off_diagonal * MU) ** 2 == pytest.approx(0.504101, abs=1e-6)


@pytest.mark.parametrize("method", [m for m in methods() if m != "gaussian-inid-unclipped"])
def test_events_are_worth_the_budget(method):
    plan = plan_of(method)
    delta = 1e-6 if plan.family == "gaussian" else 1e-12
    assert PLDAccountant().compose(plan.event).get_epsilon(delta) == pytest.approx(1.0, rel=1e-3)
    assert plan.guarantee.status == "proven"
    assert (plan.guarantee.relation, plan.guarantee.unit) == ("add-remove", "example")


@settings(max_examples=40)
@given(rows, rows)
def test_sums_add_up_over_clients(first, second):
    for method in ("gaussian-iid", "gaussian-inid"):
        plan = plan_of(method)
        whole = covariance_sum(np.concatenate((first, second)), plan)
        assert whole == pytest.approx(covariance_sum(first, plan) + covariance_sum(second, plan))
        assert np.array_equal(whole, whole.T)


def test_short_rows_are_kept_and_long_ones_are_scaled():
    plan = plan_of("gaussian-symmetric")
    x = np.stack((0.5 * SPECIAL["flat"], 7 * SPECIAL["axis"]))
    expected = 0.25 * np.outer(SPECIAL["flat"], SPECIAL["flat"]) + np.outer(
        SPECIAL["axis"], SPECIAL["axis"]
    )
    assert covariance_sum(x, plan) == pytest.approx(expected)


def test_entries_are_clipped():
    plan = plan_of("gaussian-inid")
    diagonal, off = plan.entry_clip
    total = covariance_sum(np.stack([SPECIAL["two"]] * 3), plan)
    assert total[0, 0] == pytest.approx(3 * diagonal)
    assert total[0, 1] == pytest.approx(3 * off)
    assert np.abs(total).sum() == pytest.approx(6 * diagonal + 6 * off)


@pytest.mark.parametrize("method", ["gaussian-symmetric", "laplace-inid"])
def test_noise_is_symmetric_with_the_planned_scales(method):
    plan = plan_of(method, 40)
    noise = [
        perturb(np.zeros((40, 40)), plan, KeyRing(3).numpy_generator(Purpose.NOISE, i))
        for i in range(60)
    ]
    stack = np.stack(noise)
    assert np.array_equal(stack, stack.swapaxes(1, 2))
    unit = 1.0 if plan.family == "gaussian" else 2.0
    diagonal = np.diagonal(stack, axis1=1, axis2=2).ravel() ** 2 / unit
    above = stack[:, *np.triu_indices(40, 1)].ravel() ** 2 / unit
    for squares, scale in ((diagonal, plan.diagonal), (above, plan.off_diagonal)):
        spread = squares.std() / math.sqrt(squares.size)
        assert abs(squares.mean() - scale**2) < 4.5 * spread
    spread = above.std() / math.sqrt(above.size)
    assert (
        abs(above.mean() - (1.08 * plan.off_diagonal) ** 2) > 4.5 * spread
    )  # 8 % too much would be noticed


def test_recovery_error():
    basis = np.eye(6)[:, :2]
    assert subspace_recovery_error(basis, basis) == 0
    assert subspace_recovery_error(np.eye(6)[:, 2:4], basis) == pytest.approx(1)
    rotated = basis @ np.array([[0.6, 0.8], [-0.8, 0.6]])
    assert subspace_recovery_error(rotated, basis) == pytest.approx(0, abs=1e-15)
    tilted = np.stack(
        (np.eye(6)[0], math.cos(0.3) * np.eye(6)[1] + math.sin(0.3) * np.eye(6)[2]), axis=1
    )
    assert subspace_recovery_error(np.stack((tilted, basis)), basis) == pytest.approx(
        [math.sin(0.3) / math.sqrt(2), 0]
    )


def test_without_noise_the_subspace_is_recovered():
    x, basis = fully_random_rows(30, 4, 200, KeyRing(1).numpy_generator(Purpose.PROBE))
    assert np.linalg.norm(x, axis=1) == pytest.approx(np.ones(200))
    plan = replace(plan_of("gaussian-symmetric", 30), diagonal=0.0, off_diagonal=0.0)
    noiseless = perturb(covariance_sum(x, plan), plan, KeyRing(1).numpy_generator(Purpose.NOISE))
    assert subspace_recovery_error(top_subspace(noiseless, 4), basis) < 1e-10


def test_recovery_in_the_papers_setting():
    """M=100, N=1000, r=10, delta=1e-6; a standard error of these means is about 1 %."""
    plans = {
        f"{m} {e}": plan_of(m, 100, e)
        for m in ("gaussian-iid", "gaussian-symmetric")
        for e in (1.0, 5.0)
    }
    plans["clipping"] = replace(plan_of("gaussian-inid", 100), diagonal=0.0, off_diagonal=0.0)
    errors = recovery_errors(plans, rank=10, rows=1000, trials=8, keys=KeyRing(5))
    means = {name: x.mean() for name, x in errors.items()}
    assert means["gaussian-iid 1.0"] == pytest.approx(0.405, rel=0.05)
    assert means["gaussian-iid 5.0"] == pytest.approx(0.094, rel=0.05)
    assert means["gaussian-symmetric 1.0"] < 0.8 * means["gaussian-iid 1.0"]
    assert means["gaussian-symmetric 5.0"] < 0.8 * means["gaussian-iid 5.0"]
    assert (
        means["clipping"] > 0.1 > 0.0752
    )  # the published i.n.i.d. figure at epsilon 5 lies below clipping alone


def test_trials_depend_on_their_keys_only():
    plans = {"a": plan_of("gaussian-iid", 10), "b": plan_of("laplace-iid", 10)}

    def run(trials, seed):
        return recovery_errors(plans, rank=2, rows=20, trials=trials, keys=KeyRing(seed))

    assert np.array_equal(run(3, 0)["b"], run(5, 0)["b"][:3])
    assert not np.array_equal(run(3, 0)["b"], run(3, 1)["b"])


def test_one_feature():
    for method in methods():
        plan = plan_of(method, 1)
        assert covariance_sum([[0.5]], plan) == pytest.approx(np.array([[0.25]]))
        assert moved(plan, np.ones(1)) <= budget(plan) * (1 + 1e-9)


def test_bad_input():
    plan = plan_of("gaussian-iid")
    with pytest.raises(ConfigError, match="known: gaussian-iid"):
        covariance_plan("wishart", 5, 1.0, 1e-6)
    with pytest.raises(ConfigError, match="dimension"):
        covariance_plan("gaussian-iid", 0, 1.0, 1e-6)
    with pytest.raises(ConfigError, match="delta must lie"):
        covariance_plan("gaussian-iid", 5, 1.0)
    with pytest.raises(ConfigError, match="delta must be 0"):
        covariance_plan("laplace-iid", 5, 1.0, 1e-6)
    with pytest.raises(DataError, match=r"shape \[N, 12\]"):
        covariance_sum(np.ones((3, 5)), plan)
    with pytest.raises(DataError, match="finite"):
        covariance_sum(np.full((3, M), np.nan), plan)
    with pytest.raises(ConfigError, match="rank"):
        top_subspace(np.eye(3), 4)
    with pytest.raises(ConfigError, match="rank"):
        fully_random_rows(3, 4, 10, KeyRing(0).numpy_generator(Purpose.PROBE))
    with pytest.raises(ConfigError, match="one dimension"):
        recovery_errors(
            {"a": plan, "b": plan_of("gaussian-iid", 3)}, rank=1, rows=5, trials=1, keys=KeyRing(0)
        )
