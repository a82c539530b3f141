from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.errors import ConfigError
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation, Workload
from fedlgm.planning.facts import RunFacts, Sampling

ALL = [
    correlation.get("identity", 12),
    correlation.get("square-root", 12),
    correlation.get("square-root", 12, bands=3),
    correlation.get("banded", 12, bands=4),
    correlation.get("blt", 12),
    correlation.get("blt", 12, min_separation=3, buffers=1),
]


@pytest.mark.parametrize("c", ALL, ids=lambda c: c.name)
def test_matrices(c):
    matrix = c.matrix()
    assert matrix.shape == (12, 12)
    np.testing.assert_array_equal(matrix, np.tril(matrix))
    np.testing.assert_allclose(c.inverse() @ matrix, np.eye(12), atol=1e-12)
    np.testing.assert_allclose(c.column_norms(), np.linalg.norm(matrix, axis=0))
    np.testing.assert_allclose(c.noise_std(), np.linalg.norm(np.linalg.inv(matrix), axis=1))
    np.testing.assert_array_equal(c.leading(7).matrix(), matrix[:7, :7])
    with pytest.raises(ValueError, match="read-only"):
        c.coefficients[0] = 2


@pytest.mark.parametrize("c", ALL, ids=lambda c: c.name)
def test_storage(c):
    again = Correlation.from_dict(json.loads(json.dumps(c.to_dict())))
    assert again == c
    assert hash(again) == hash(c)
    np.testing.assert_array_equal(again.coefficients, c.coefficients)
    assert again != c.leading(6)


@pytest.mark.parametrize(
    "workload",
    [
        Workload(),
        Workload(momentum=0.9),
        Workload(momentum=0.5, decay=0.9),
    ],
)
@pytest.mark.parametrize("c", ALL[:5], ids=lambda c: c.name)
def test_errors(c, workload):
    rows = np.linalg.norm(workload.matrix(12) @ np.linalg.inv(c.matrix()), axis=1)
    assert c.error(workload) == pytest.approx(math.sqrt(np.mean(rows**2)), rel=1e-10)
    assert c.error(workload, "max") == pytest.approx(rows.max(), rel=1e-10)
    assert rows.argmax() == 11


def test_workloads_are_optimizers():
    """A, entry by entry, is what a server with momentum and decay makes of unit releases."""
    workload = Workload(momentum=0.8, decay=0.9)
    a = np.zeros((4, 4))
    for r in range(4):
        model = moved = 0.0
        for t in range(4):
            moved = 0.8 * moved + (t == r)
            model = 0.9 * model + moved
            a[t, r] = model
    np.testing.assert_allclose(workload.matrix(4), a)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 24),
    st.data(),
    st.sampled_from(["mean", "max"]),
    st.sampled_from([Workload(), Workload(momentum=0.9), Workload(momentum=0.5, decay=0.8)]),
)
def test_optimal_coefficients_cannot_be_improved(rounds, data, reduce, workload):
    bands = data.draw(st.integers(1, rounds))
    c = correlation.get("banded", rounds, bands=bands, workload=workload, reduce=reduce)
    rng = np.random.default_rng(rounds)
    for scale in (1e-3, 1e-2, 0.1):
        other = c.coefficients + scale * rng.standard_normal(bands)
        other /= math.copysign(np.linalg.norm(other), other[0])
        if other[0] > 0:
            moved = Correlation("own", rounds, other)
            assert moved.error(workload, reduce) >= c.error(workload, reduce) * (1 - 1e-9)
    root = correlation.get("square-root", rounds, bands=bands)
    assert c.error(workload, reduce) <= root.error(workload, reduce) * (1 + 1e-9)


def test_more_buffers_than_are_of_use():
    """Those left over ended as decays and scales of 0, which was refused as if somebody had given
    them."""
    many, two = (correlation.get("blt", 3, buffers=buffers, min_separation=2) for buffers in (6, 2))
    assert len(many.decays) == 6
    costs = [c.sensitivity(2) * c.error() for c in (many, two)]
    assert costs[0] <= costs[1] * (1 + 1e-6)
    assert Correlation.from_dict(many.to_dict()) == many


def test_blt_is_its_filter():
    c = correlation.get("blt", 40, buffers=3)
    decays, scales = np.array(c.decays), np.array(c.scales)
    np.testing.assert_allclose(
        c.coefficients[1:], [scales @ decays**j for j in range(39)], rtol=1e-12
    )
    assert scales.sum() < 1


@pytest.mark.parametrize("name", correlation.names())
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_short_runs(name, rounds):
    c = correlation.get(name, rounds)
    assert c.sensitivity(1) >= 1
    assert c.error() > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: correlation.get("bands", 4), "unknown correlation 'bands'; did you mean 'banded'"),
        (
            lambda: correlation.get("identity", 4, bands=2),
            "'identity' has no option bands; its options: none",
        ),
        (
            lambda: correlation.get("square-root", 40_000),
            "40,000 coefficients over 40,000 rounds take too long",
        ),
        (
            lambda: Correlation.from_dict(
                {"name": "blt", "rounds": 10**6, "decays": [0.5], "scales": [0.5]}
            ),
            "take too long",
        ),
        (
            lambda: correlation.get("banded", 0, bands=1),
            "rounds must be a whole number, 1 to 1000000, got 0",
        ),
        (
            lambda: correlation.get("banded", 4, bands=5),
            "bands must be a whole number, 1 to 4, got 5",
        ),
        (lambda: correlation.get("banded", 4, bands=True), "bands must be a whole number"),
        (
            lambda: correlation.get("blt", 4, buffers=0),
            "buffers must be a whole number, 1 to 8, got 0",
        ),
        (
            lambda: correlation.get("banded", 4, reduce="sum"),
            "unknown reduce 'sum'; known: mean, max",
        ),
        (lambda: correlation.get("banded", 4, workload="adam"), "unknown workload 'adam'"),
        (lambda: Workload(momentum=1.0), r"momentum must lie in \[0, 1\), got 1.0"),
        (lambda: Workload(decay=0), r"decay must lie in \(0, 1\], got 0"),
        (lambda: Correlation("own", 2, [1, 0.5, 0.2]), "a list of 1 to 2 numbers"),
        (lambda: Correlation("own", 2, [0.0, 1.0]), "the first one be at least 1e-06"),
        (lambda: Correlation("own", 2, [1.0, math.nan]), "must be finite"),
        (
            lambda: Correlation("own", 2, [1e-320, 0.5]),
            r"first one be at least 1e-06, got 0.5 and .*e-32\d: .* scale",
        ),
        (lambda: Correlation("own", 2, [1e60]), r"within 1e\+06 .* got 1e\+60"),
        (lambda: Correlation("own", 2, [1.0, -1e200]), r"got -1e\+200 and 1:"),
        (lambda: Correlation.from_buffers(4, (1.5,), (0.5,)), r"decays in \(0, 1\)"),
        (lambda: Correlation.from_dict({"name": "own"}), "not a correlation"),
        (
            lambda: Correlation.from_dict({"name": "own", "rounds": 2, "coefficients": ["x"]}),
            "not a correlation",
        ),
        (
            lambda: Correlation.from_dict({"name": "own", "rounds": 2.5, "coefficients": [1]}),
            "1 to 1000000, got 2.5",
        ),
        (
            lambda: Correlation.from_dict(
                {"name": "blt", "rounds": 10**12, "decays": [0.5], "scales": [0.5]}
            ),
            "1 to 1000000, got 1000000000000",
        ),
        (
            lambda: ALL[0].sensitivity(0),
            "between participations must be a whole number of at least 1, got 0",
        ),
        (
            lambda: ALL[0].sensitivity(2, 0),
            "max_participations must be a whole number of at least 1, got 0",
        ),
        (
            lambda: ALL[0].prefix_sensitivity(13, 1),
            "rounds must be a whole number, 0 to 12, got 13",
        ),
        (lambda: ALL[0].leading(0), "rounds must be a whole number, 1 to 12, got 0"),
        (lambda: ALL[0].row_bound(12, 1), "t must be a whole number, 0 to 11, got 12"),
        (lambda: ALL[0].error(reduce="rms"), "unknown reduce 'rms'"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_no_class_states_another_cost_of_its_coefficients():
    """It was equal to the correlation of its coefficients, whose runs were then charged at its
    cost, too."""
    with pytest.raises(ConfigError, match="Free cannot be derived from Correlation"):

        class Free(Correlation):
            def sensitivity(self, min_separation, max_participations=None):
                return 1e-3


def test_noise_that_grows_beyond_what_can_be_represented_is_refused_where_a_run_is_described():
    """It grows a thousandfold a round and would be infinite in round 13."""
    steep = Correlation("own", 20, [1e-3, 1.0])
    with pytest.raises(
        ConfigError, match=r"correlation 'own' makes more than 1e\+12 .* in round 4: "
    ):
        RunFacts(1.0, Sampling("cyclic", 20, 0.25, 4), rounds=20, noise=steep)
    for name in correlation.names():
        correlation.get(name, 200).check_noise()
