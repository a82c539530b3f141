"""Inputs and targets of any finite size: norms and products neither vanish nor overflow
unnoticed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlgm.planning.clipping import Scaling
from fedlgm.planning.layers import LayerTable
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.rules.products import ghost_squares, row_squares
from fedlgm.training.example_level.scaling import PSAC, AutoS, FlatClip, PerLayerClip, Reweighted

ROUNDING = 1 + 2.0**-16


class Product:
    """A loss whose gradient by the output is the target, of whatever size."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).flatten(1).sum(1)


class Twice(nn.Module):
    """A weight that is used twice, so that its gradients are added up before they are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(2 * x)


class Scale(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Steps(nn.Module):
    """The hidden states of a recurrent layer."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], hidden: int) -> None:
        super().__init__()
        self.cell: nn.Module = kind(3, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x)[0]


MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "one row": (lambda: nn.Linear(6, 3), (6,)),
    "one long row": (lambda: nn.Linear(600, 2), (600,)),
    "ghost norms": (lambda: nn.Linear(32, 32), (2, 32)),
    "instantiated": (lambda: nn.Linear(3, 2), (7, 3)),
    "convolution": (lambda: nn.Conv2d(1, 3, 3), (1, 5, 5)),
    "ghost convolution": (lambda: nn.Conv2d(16, 16, 3), (16, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "LSTM": (lambda: Steps(nn.LSTM, 2), (5, 3)),
    "LSTM, ghost norms": (lambda: Steps(nn.LSTM, 12), (3, 3)),
    "GRU": (lambda: Steps(nn.GRU, 2), (5, 3)),
    "GRU, ghost norms": (lambda: Steps(nn.GRU, 12), (3, 3)),
    "used twice": (Twice, (6,)),
    "no rule": (Scale, (6,)),
}
PRODUCTS = list(MODULES)[:6]
SCALINGS: dict[str, Any] = {
    "per layer": lambda layers: PerLayerClip((0.5,) * layers),
    "flat": lambda layers: FlatClip(1.0),
    "small bound": lambda layers: FlatClip(1e-8),
    "least bound": lambda layers: FlatClip(2.0**-36),
    "auto-s": lambda layers: AutoS(1.0),
    "psac": lambda layers: PSAC(1.0),
    "reweighted": lambda layers: Reweighted(1.0, (1.0,) * layers),
}


def moved(module: nn.Module, scaling: Scaling, x: Tensor, y: Tensor, exact: bool) -> float:
    layers = LayerTable.from_module(module)
    engine = ExampleGradients(module, layers, Product(), exact_sums=exact)
    return float(engine.sum(x, y, scaling).total.double().norm()) / scaling.bound


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", SCALINGS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    of_x=st.floats(-38, 38) | st.floats(-26, -19),  # where squares vanish in float32
    of_product=st.floats(-12, 12) | st.floats(-7, -2),
    spread=st.sampled_from([0, 2, 20]),
    exact=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_no_finite_example_moves_a_step_by_more_than_its_bound(
    name, kind, of_x, of_product, spread, exact, biased, seed
):
    """Scales from 1e-38 to 1e38, also within one example."""
    make, shape = MODULES[name]
    generator = torch.Generator().manual_seed(seed)
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` took a fourth of the time
    module = make()
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(
            biased or "bias" not in key
        )  # a bias outweighs a weight of tiny inputs
    scaling = SCALINGS[kind](len(LayerTable.from_module(module)))
    x = torch.randn(1, *shape, generator=generator)
    y = torch.randn(module(x).shape, generator=generator)

    def stretched(values: Tensor, exponent: float) -> Tensor:
        powers = exponent - spread * torch.rand(values.shape, generator=generator).double()
        return (values.double() * 10**powers).clamp(-3e38, 3e38).float()

    assert (
        moved(module, scaling, stretched(x, of_x), stretched(y, of_product - of_x), exact)
        <= ROUNDING
    )


@pytest.mark.parametrize(
    "scaling", [PerLayerClip((1e-6,)), FlatClip(1e-6), AutoS(1e-6), PSAC(1e-6)]
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_tiny_input_with_a_large_target_counts_as_its_product(name, scaling):
    """The input's squares vanish in float32, the gradient does not."""
    make, shape = MODULES[name]
    module = make()
    nn.init.zeros_(module.weight)
    module.bias.requires_grad_(False)
    x = torch.full((1, *shape), 1e-22)
    y = torch.zeros(module(x).shape)
    y[0].view(-1)[0] = 1e18
    least = (
        0.9 if isinstance(scaling, (PerLayerClip, FlatClip)) else 1e-4
    )  # the others count short gradients less
    assert least < moved(module, scaling, x, y, False) <= ROUNDING


@pytest.mark.parametrize("exponent", range(-37, 19, 4))
@pytest.mark.parametrize("size", [1, 7, 256, 257, 5000])
def test_squares_of_rows_are_exact_at_every_scale(size, exponent):
    rows = (
        torch.randn(3, size, generator=torch.Generator().manual_seed(1)).double() * 10.0**exponent
    )
    rows = rows.float()
    rows[1] = 0
    exact = rows.double().square().sum(1)
    assert np.allclose(row_squares(rows), exact, rtol=2.0**-20, atol=0)


def test_gram_matrices_whose_entries_vanished_are_not_trusted():
    gram = torch.ones(1, 4, 4)
    for x, y in ((0.0, 1.0), (1e-30, 1.0), (1.0, 1e-30), (1e-20, 1e-20)):
        assert len(ghost_squares(x * gram, y * gram)[1]) == 1
    assert len(ghost_squares(gram, 1e-6 * gram)[1]) == 0


def test_embeddings_of_any_gradient_keep_their_bound():
    module = nn.Embedding(5, 4)
    for exponent in range(-38, 39, 4):
        y = torch.full((1, 3, 4), 10.0**exponent)
        found = moved(module, FlatClip(1.0), torch.tensor([[1, 1, 2]]), y, False)
        assert found <= ROUNDING
        assert math.isfinite(found)
