"""Clipped sums of small layers and of one network against recorded numbers."""

import copy
import math

import pytest
import torch
from torch import nn

from fedlgm.planning.layers import LayerTable
from fedlgm.training import example_level
from fedlgm.training.example_level import ExampleGradients, FlatClip, PerLayerClip, clipped_sum


def fill(shape, a, m, s):
    k = torch.arange(math.prod(shape), dtype=torch.float64)
    return (((a * k) % m - (m - 1) / 2) / s).reshape(shape)


class Product:
    """Loss sum(output * target)."""

    def losses(self, outputs, y):
        return (outputs * y).flatten(1).sum(1)


def with_known_parameters(model):
    for i, parameter in enumerate(model.parameters()):
        parameter.data = fill(parameter.shape, 5 + 2 * i, 11, 8)
    return model


TOKENS = torch.tensor([[1, 1, 4], [0, 2, 0]])


KNOWN = {  # module, x, g, c, norms, {parameter: (first elements, sum, l2)}
    "linear": (
        nn.Linear(4, 2),
        fill((3, 4), 3, 7, 4),
        fill((3, 2), 2, 5, 2),
        1.5,
        (1.47902, 1.629801, 1.530931),
        {
            "0.weight": (
                (1.210179, -0.0927555, -0.642385, -0.1953195, -0.2300895, -0.5047574),
                -0.4699874,
                1.506485,
            ),
            "0.bias": ((0.4102559, -1.439975), -1.029719, 1.497277),
        },
    ),
    "sequence": (
        nn.Linear(3, 2),
        fill((2, 3, 3), 3, 7, 4),
        fill((2, 3, 2), 2, 5, 2),
        1.5,
        (2.190177, 2.44949),
        {
            "0.weight": (
                (0.5811407, -0.4502164, -0.4733624, 0.2205767, 0.2658915, 0.2477656),
                0.3917957,
                0.9722302,
            ),
            "0.bias": ((-0.5761206, -0.1087556), -0.6848762, 0.5862957),
        },
    ),
    "convolution": (
        nn.Conv2d(2, 3, 3, padding=1),
        fill((2, 2, 4, 5), 3, 7, 4),
        fill((2, 3, 4, 5), 3, 11, 4),
        11.2,
        (11.3011, 11.17632),
        {
            "0.weight": (
                (-1.989936, 4.165135, -0.6233226, 3.670726, -3.117172, -3.488258),
                -7.358785,
                19.81478,
            ),
            "0.bias": ((-0.7432905, -0.245527, 0.2522365), -0.7365811, 0.8224279),
        },
    ),
    "strided": (
        nn.Conv2d(1, 2, (3, 2), stride=(2, 1), bias=False),
        fill((3, 1, 5, 4), 3, 7, 4),
        fill((3, 2, 2, 3), 2, 5, 2),
        2.0,
        (4.461642, 2.934174, 2.934174),
        {
            "0.weight": (
                (2.486216, -0.6455347, -0.3745935, 0.260221, -0.6455347, -0.8274713),
                0.8428039,
                3.503191,
            )
        },
    ),
    "group-norm": (
        nn.GroupNorm(2, 4),
        fill((2, 4, 2, 3), 3, 7, 4),
        fill((2, 4, 2, 3), 2, 5, 2),
        4.0,
        (5.874611, 4.238483),
        {
            "0.weight": ((3.22783, 1.397006, 1.519261, -2.791266), 3.352831, 4.740235),
            "0.bias": ((-0.2090292, -0.9437339, 0.6808961, 0.6032858), 0.1314189, 1.327366),
        },
    ),
    "layer-norm": (
        nn.LayerNorm(4),
        fill((2, 3, 4), 3, 7, 4),
        fill((2, 3, 4), 2, 5, 2),
        2.0,
        (4.109569, 3.131285),
        {
            "0.weight": ((0.4419165, -0.2067873, 0.6360451, -1.702718), -0.8315441, 1.881981),
            "0.bias": ((-0.486669, 0.0760232, 0.6387154, -0.3953808), -0.1673113, 0.8982815),
        },
    ),
    "embedding": (
        nn.Embedding(5, 3),
        TOKENS,
        fill((2, 3, 3), 2, 7, 2),
        2.5,
        (2.44949, 2.738613),
        {"0.weight": ((0, 1.825742, 0.4564355, 0, -1.5, 0.5), -0.1742581, 3.5)},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KNOWN)
def test_layers_give_the_known_answers(name, dtype):
    module, x, g, clip, norms, parameters = KNOWN[name]
    model = with_known_parameters(nn.Sequential(copy.deepcopy(module)).double()).to(dtype)
    x = x if x.dtype == torch.int64 else x.to(dtype)
    table = LayerTable.from_module(model)
    total, found = clipped_sum(model, x, g.to(dtype), clip=clip, layers=table, task=Product())
    torch.testing.assert_close(
        found[:, 0], torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=0
    )
    for key, value in table.unflatten(total.double()).items():
        first, summed, norm = parameters[key]
        expected = torch.tensor(first, dtype=torch.float64)
        torch.testing.assert_close(value.flatten()[:6], expected, rtol=4e-5, atol=1e-6)
        assert float(value.sum()) == pytest.approx(summed, rel=4e-5, abs=2e-5)
        assert float(value.norm()) == pytest.approx(norm, rel=4e-5)


A8_NORMS = [
    [1.595397, 1.339165],
    [0.548504, 1.443856],
    [0.9717544, 1.212129],
    [0.4501976, 0.6998776],
]


A8 = {
    "per-layer": (
        PerLayerClip((0.5, 0.3)),
        (-0.0210168, -0.0265791, 0.2176857),
        (-0.0335246, -0.1209068, -0.0833207),
        (-0.2355547, -0.029203, 0.0759024),
        (-0.0548819, 0.0548819),
    ),
    "flat": (
        FlatClip(0.6),
        (-0.0514461, 0.0322791, 0.1207216),
        (0.0281321, -0.1610824, -0.1283584),
        (-0.3485748, -0.0172512, 0.0753397),
        (-0.025527, 0.025527),
    ),
    "reweighted": (
        example_level.Reweighted(0.6, (0.8, 0.6)),
        (-0.0201761, -0.025516, 0.2089782),
        (-0.0131475, -0.1470822, -0.1109995),
        (-0.2826656, -0.0350436, 0.0910828),
        (-0.0658583, 0.0658583),
    ),
}


@pytest.mark.parametrize("name", A8)
def test_a_network_gives_the_known_answers(name):
    scaling, *expected = A8[name]
    model = with_known_parameters(
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    )
    x = fill((4, 3), 3, 7, 2)
    x[3] = 0
    table = LayerTable.from_module(model)
    result = ExampleGradients(model, table).sum(x, torch.tensor([0, 1, 1, 0]), scaling)
    torch.testing.assert_close(
        result.norms, torch.tensor(A8_NORMS, dtype=torch.float64), rtol=1e-6, atol=0
    )
    for value, first in zip(table.unflatten(result.total).values(), expected, strict=True):
        torch.testing.assert_close(
            value.flatten()[: len(first)], value.new_tensor(first), rtol=4e-5, atol=2e-7
        )
