"""Sums of many bounded gradients: what rounding does to the distance of two neighbouring sums."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedlgm.planning.layers import LayerTable
from fedlgm.training.example_level import ExampleGradients, FlatClip, PerLayerClip

SIDE = 64


class Product:
    """Loss sum(output * target): the gradient of a linear layer is the input."""

    def losses(self, outputs, y):
        return (outputs * y).flatten(1).sum(1)


def moved(lengths, exact_sums, micro_batch=None, scaling=None):
    """Distance of the sums of gradients of these lengths, all alike, with and without a first one
    that is cut to 1."""
    model = nn.Sequential(nn.Linear(SIDE**2, 1, bias=False))
    table = LayerTable.from_module(model)
    gradients = ExampleGradients(model, table, Product(), micro_batch, exact_sums)
    x = torch.tensor([1.01, *lengths], dtype=torch.float64)[:, None].expand(-1, SIDE**2) / SIDE
    y = torch.ones(len(x), 1)
    both = [
        gradients.sum(x[low:].float(), y[low:], scaling or FlatClip(1.0)).total.double()
        for low in (0, 1)
    ]
    return float(torch.linalg.vector_norm(both[0] - both[1]))


def rounding_up():
    """Lengths that float32 rounds up in a sum from 32 on and not at all below it, or hardly."""
    ulp = 2.0**-18  # of float32 numbers from 32 to 64; half of it from 16 to 32
    lengths = [0.98] * 32 + [(2**16 + 1.5) * ulp, -(2**16 + 0.5) * ulp] * 100
    return [round(length / ulp * 2) * ulp / 2 for length in lengths]


@pytest.mark.parametrize("scaling", [FlatClip(1.0), PerLayerClip((1.0,))])
@pytest.mark.parametrize("micro_batch", [1, 7, None])
def test_exact_sums_move_by_no_more_than_the_bound(micro_batch, scaling):
    assert 1 - 2**-15 < moved(rounding_up(), True, micro_batch, scaling) <= 1.0


def test_sums_in_single_precision_can_move_by_more():
    """Power: 233 examples, added up one after another, and one of them counts 1.0001 times its
    bound."""
    assert moved(rounding_up(), False, micro_batch=1) > 1 + 1e-4


LAYERS = {
    "linear": lambda: (nn.Linear(20, 4), torch.randn(6, 20)),
    "sequence": lambda: (nn.Linear(20, 4), torch.randn(6, 3, 20)),
    "sequence, by Gram matrices": lambda: (nn.Linear(64, 48), torch.randn(6, 4, 64)),
    "convolution": lambda: (nn.Conv2d(3, 8, 3, padding=1), torch.randn(6, 3, 8, 8)),
    "convolution, by Gram matrices": lambda: (
        nn.Conv2d(128, 128, 3, padding=1),
        torch.randn(4, 128, 4, 4),
    ),
    "normalisation": lambda: (nn.GroupNorm(2, 8), torch.randn(6, 8, 5)),
    "normalisation of channels": lambda: (nn.GroupNorm(2, 8), torch.randn(6, 8)),
    "embedding": lambda: (nn.Embedding(11, 5), torch.randint(11, (6, 7))),
    "generic": lambda: (nn.Bilinear(4, 4, 3), torch.randn(6, 4)),
}


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x) if isinstance(self.inner, nn.Bilinear) else self.inner(x)


@pytest.mark.filterwarnings("ignore:generic")
@pytest.mark.parametrize("style", ["per-layer", "flat"])
@pytest.mark.parametrize("name", LAYERS)
def test_exact_sums_are_those_of_the_same_gradients(name, style):
    """As in float64 throughout but for the gradients' own rounding; float32 sums of 6 examples are
    as near."""
    torch.manual_seed(0)
    module, x = LAYERS[name]()
    model = Twice(module)
    table = LayerTable.from_module(model)
    y = torch.randn(model(x).shape)
    found = []
    for exact_sums, own, dtype in (
        (True, model, torch.float32),
        (False, copy.deepcopy(model).double(), torch.float64),
    ):
        gradients = ExampleGradients(own, table, Product(), 4, exact_sums)
        inputs = x.to(dtype) if x.is_floating_point() else x
        norms = gradients.sum(inputs, y.to(dtype), FlatClip(1.0)).norms
        bound = float(norms.norm(dim=1).median())
        scaling = FlatClip(bound) if style == "flat" else PerLayerClip((bound,))
        found.append(gradients.sum(inputs, y.to(dtype), scaling).total)
    assert found[0].dtype == torch.float64
    torch.testing.assert_close(
        found[0], found[1], rtol=1e-4, atol=1e-5 * float(found[1].abs().max())
    )
