"""No example contributes more than its bound, whatever its gradient is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training.example_level import (
    PSAC,
    AutoS,
    ExampleGradients,
    FlatClip,
    PerLayerClip,
    Reweighted,
    clipped_sum,
)
from fedlgm.training.example_level.scaling import SAFETY, clip_factors

finite = st.floats(0.0, 1e30)
norms = st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=5)
bounds = st.floats(2.0**-36, 1e6)


@given(norms=norms, clip=bounds, small=st.floats(1e-6, 10.0))
def test_factors_keep_the_stated_bounds(norms, clip, small):
    g = torch.tensor(norms, dtype=torch.float64)
    weights = (0.6, 0.8, 0.0)
    for scaling in (
        PerLayerClip((clip, 0.0, math.inf)),
        FlatClip(clip),
        AutoS(clip, small),
        PSAC(clip, small),
        Reweighted(clip, weights),
    ):
        counted = scaling.factors(g) * g
        limits = torch.from_numpy(scaling.bounds(3))
        assert (counted >= 0).all()
        assert (counted <= limits).all()
        assert (torch.linalg.vector_norm(counted, dim=1) <= scaling.bound).all()


@given(norms=st.lists(st.floats(0.0, 1e150), min_size=1, max_size=5), clip=bounds)
def test_the_only_layers_norm_is_that_of_the_whole_to_the_bit(norms, clip):
    g = torch.tensor(norms, dtype=torch.float64)[:, None]
    for scaling in (FlatClip(clip), AutoS(clip), PSAC(clip)):
        assert torch.equal(
            scaling.factors(g)[:, 0], scaling.of_whole(torch.linalg.vector_norm(g, dim=1))
        )


@given(norm=st.floats(0.0, 1e300), clip=bounds)
def test_clip_factors_are_one_formula_for_any_shape(norm, clip):
    one = torch.tensor(norm, dtype=torch.float64)
    limit = torch.tensor(SAFETY * clip, dtype=torch.float64)
    assert torch.equal(clip_factors(one, clip), limit / one.clamp(min=limit))
    assert torch.equal(
        clip_factors(one.expand(2, 3), clip), (limit / one.clamp(min=limit)).expand(2, 3)
    )


def test_small_gradients_are_counted_whole_or_as_the_rule_says():
    g = torch.tensor([[3e-3, 4e-3]], dtype=torch.float64)
    assert torch.equal(FlatClip(1.0).factors(g), torch.ones(1, 2, dtype=torch.float64))
    assert torch.equal(
        PerLayerClip((1.0, math.inf)).factors(g), torch.ones(1, 2, dtype=torch.float64)
    )
    assert AutoS(1.0, 0.01).factors(g)[0, 0] == pytest.approx(1 / 0.015, rel=1e-5)
    assert PSAC(1.0, 0.1).factors(g)[0, 0] == pytest.approx(1 / (0.005 + 0.1 / 0.105), rel=1e-5)
    reweighted = Reweighted(1.0, (0.6, 0.8)).factors(g)[0] * g[0]
    assert reweighted.tolist() == pytest.approx([0.6 * 0.005, 0.8 * 0.005], rel=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FlatClip(-1.0),
        lambda: FlatClip(1e-20),
        lambda: PerLayerClip((1.0, math.nan)),
        lambda: AutoS(1.0, 0.0),
        lambda: PSAC(math.inf, 0.1),
        lambda: Reweighted(1.0, (0.8, 0.8)),
    ],
)
def test_bounds_out_of_range_are_refused(make):
    with pytest.raises(ConfigError):
        make()


class Product:
    def losses(self, outputs, y):
        return (outputs * y).flatten(1).sum(1)


def cancelling(seed, spread, size, balanced):
    """Inputs that hardly differ and output gradients that add up to 0: ghost norms cancel."""
    generator = torch.Generator().manual_seed(seed)
    x = size * (1 + spread * torch.randn(1, 4, 32, generator=generator))
    g = torch.randn(1, 4, 32, generator=generator)
    return x, g - balanced * g.mean(1, keepdim=True)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, 1e-2, 1.0]),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
    balanced=st.sampled_from([0.0, 0.999, 1.0]),
    clip=st.sampled_from([1e-6, 1e-3, 1.0]),
    kind=st.sampled_from(["linear", "convolution"]),
)
def test_no_contribution_exceeds_its_bound_under_cancellation(
    seed, spread, size, balanced, clip, kind
):
    x, g = cancelling(seed, spread, size, balanced)
    if kind == "linear":
        model = nn.Sequential(nn.Linear(32, 32))
    else:
        model = nn.Sequential(nn.Conv2d(32, 32, 1))
        x, g = (value.transpose(1, 2).reshape(1, 32, 2, 2) for value in (x, g))
    table = LayerTable.from_module(model)
    gradients = ExampleGradients(model, table, Product())
    for scaling in (
        PerLayerClip((clip,)),
        FlatClip(clip),
        Reweighted(clip, (1.0,)),
        AutoS(clip),
        PSAC(clip),
    ):
        counted = float(gradients.sum(x, g, scaling).total.double().norm())
        assert counted <= clip, scaling


def test_without_the_guard_a_norm_would_be_too_small():
    """Power check: the Gram matrices alone miss the norm of such an example."""
    x, g = cancelling(0, 1e-3, 1.0, 1.0)
    exact = float((g[0].double().t() @ x[0].double()).norm())
    ghost = float((x[0] @ x[0].t() * (g[0] @ g[0].t())).sum().clamp(min=0).sqrt())
    assert abs(ghost / exact - 1) > 1e-3
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    _, norms = clipped_sum(
        model, x, g, clip=1.0, layers=LayerTable.from_module(model), task=Product()
    )
    assert float(norms[0, 0]) == pytest.approx(exact, rel=1e-4)
