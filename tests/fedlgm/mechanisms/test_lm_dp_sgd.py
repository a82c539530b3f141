"""LM-DP-SGD: what an example moves, as published and with weights that do not depend on the
batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedlgm.errors import ConfigError
from fedlgm.mechanisms import lm_dp_sgd
from fedlgm.mechanisms.lm_dp_sgd import aggregate, bias_minimising_weights, risk_weights


def probe(canary, weights=None, error_rates=None, emphasis=1.0, batch=100, angle=0.01):
    """How far a canary (0, M u_2) moves the sum of a batch of (cos u_1, sin u_2)."""
    u = torch.eye(3, dtype=torch.float64)
    others = [math.cos(angle) * u[0].repeat(batch, 1), math.sin(angle) * u[1].repeat(batch, 1)]
    with_it = [
        torch.cat([g, canary * c * u[1][None]]) for g, c in zip(others, (0.0, 1.0), strict=True)
    ]
    sums = [torch.cat(aggregate(g, 1.0, error_rates, emphasis, weights)) for g in (others, with_it)]
    return float((sums[1] - sums[0]).norm())


def test_the_published_rule_moves_by_the_known_distances():
    assert probe(10.0) == pytest.approx(10.06152, rel=1e-5)
    assert probe(10.0, error_rates=(1.0, 1.0)) == pytest.approx(10.06152, rel=1e-5)
    assert probe(10.0, error_rates=(0.404, 0.269), emphasis=3.0) == pytest.approx(2.98333, rel=1e-5)
    assert 100 < probe(1e6) < math.sqrt(100**2 + 101**2)


def test_fixed_weights_move_by_at_most_the_bound():
    angle = 0.01
    assert probe(10.0, weights=(math.cos(angle), math.sin(angle))) == pytest.approx(0.01, rel=1e-2)
    for canary in (0.1, 10.0, 1e6):
        for weights in ((0.6, 0.8), (1.0, 0.0), (0.0, 1.0)):
            assert probe(canary, weights=weights) <= 1 + 1e-9


@given(seed=st.integers(0, 2**31), clip=st.floats(1e-3, 10.0), size=st.floats(1e-3, 1e6))
def test_no_example_moves_the_sum_by_more_than_the_bound_for_fixed_weights(seed, clip, size):
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(6, d, generator=generator, dtype=torch.float64) for d in (3, 1, 5)]
    canary = [size * torch.randn(1, d, generator=generator, dtype=torch.float64) for d in (3, 1, 5)]
    weights = risk_weights(torch.rand(3, generator=generator).numpy(), (0.4, 0.1, 0.5), 3.0)
    before = torch.cat(aggregate(grads, clip, weights=weights))
    after = torch.cat(
        aggregate(
            [torch.cat(pair) for pair in zip(grads, canary, strict=True)], clip, weights=weights
        )
    )
    assert float((after - before).norm()) <= clip * (1 + 1e-9)


def test_an_example_that_is_not_finite_counts_as_zero():
    grads = [torch.ones(2, 3), torch.tensor([[1.0], [math.nan]])]
    expected = aggregate([torch.ones(1, 3), torch.ones(1, 1)], 1.0, weights=(0.6, 0.8))
    for found, wanted in zip(aggregate(grads, 1.0, weights=(0.6, 0.8)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert [part.tolist() for part in aggregate([torch.zeros(0, 2)], 1.0)] == [[0.0, 0.0]]


def test_the_multiplier_is_the_root_below_the_least_square():
    w = bias_minimising_weights([4.0, 1.0], [1.0, 2.0])
    assert w.tolist() == pytest.approx([0.19839, 0.98012], abs=1e-5)
    assert float(np.sum(w**2 * [4.0, 1.0] - 2 * w * [1.0, 2.0])) == pytest.approx(
        -3.19920, abs=1e-5
    )


def test_another_root_of_the_papers_equation_is_where_the_bias_is_largest():
    """A = (4, 1), B = (1, 2): lambda = 5.14195 solves it, too, where the objective is 6.98337
    instead of -3.19920."""
    a, b = np.array([4.0, 1.0]), np.array([1.0, 2.0])
    w = bias_minimising_weights(a, b, root="greatest")
    assert w.tolist() == pytest.approx((b / (a - 5.14195)).tolist(), rel=1e-4)
    assert float(w @ w) == pytest.approx(1.0)
    assert float(np.sum(w**2 * a - 2 * w * b)) == pytest.approx(6.98337, abs=1e-5)
    with pytest.raises(ConfigError, match="known: least, greatest"):
        bias_minimising_weights(a, b, root="middle")


@given(
    a=st.lists(st.floats(0.0, 100.0), min_size=3, max_size=3),
    b=st.lists(st.floats(-10.0, 10.0), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
@example(a=[7.055162504646646e-63, 0.0, 2.0], b=[7.055162504646646e-63, 0.0, 1.0], seed=0)
def test_no_other_weights_have_less_bias(a, b, seed):
    w = bias_minimising_weights(a, b)
    assert float(w @ w) == pytest.approx(1.0, abs=1e-6)
    others = np.random.default_rng(seed).normal(size=(200, 3))
    others /= np.linalg.norm(others, axis=1, keepdims=True)

    def objective(w):
        return (w**2) @ np.array(a) - 2 * w @ np.array(b)

    assert objective(w) <= objective(others).min() + 1e-6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"emphasis": 0.5}, "at least 1"),
        ({"error_rates": (0.7, 0.1)}, r"\[0, 0.5\]"),
        ({"error_rates": (0.4,)}, "1 error rates for 2"),
        ({"weights": (0.9, 0.9)}, "squares adding up to 1"),
        ({"weights": (1.0,)}, "1 layer weights for 2"),
        ({"clip": -1.0}, "clip must be finite and positive"),
    ],
)
def test_bad_input_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        lm_dp_sgd.aggregate([torch.ones(2, 3), torch.ones(2, 1)], **({"clip": 1.0} | values))
