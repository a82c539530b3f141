"""Clipped sums against a float64 loop over examples, for every layer, model and style."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from fedlgm import example_level, models, tasks
from fedlgm.errors import ConfigError, Notice
from fedlgm.example_level import ExampleGradients, FlatClip, PerLayerClip, clipped_sum
from fedlgm.layers import LayerTable


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
        nn.Linear(4, 2), fill((3, 4), 3, 7, 4), fill((3, 2), 2, 5, 2), 1.5, (1.47902, 1.629801, 1.530931),
        {"0.weight": ((1.210179, -0.0927555, -0.642385, -0.1953195, -0.2300895, -0.5047574), -0.4699874, 1.506485),
         "0.bias": ((0.4102559, -1.439975), -1.029719, 1.497277)},
    ),
    "sequence": (
        nn.Linear(3, 2), fill((2, 3, 3), 3, 7, 4), fill((2, 3, 2), 2, 5, 2), 1.5, (2.190177, 2.44949),
        {"0.weight": ((0.5811407, -0.4502164, -0.4733624, 0.2205767, 0.2658915, 0.2477656), 0.3917957, 0.9722302),
         "0.bias": ((-0.5761206, -0.1087556), -0.6848762, 0.5862957)},
    ),
    "convolution": (
        nn.Conv2d(2, 3, 3, padding=1), fill((2, 2, 4, 5), 3, 7, 4), fill((2, 3, 4, 5), 3, 11, 4), 11.2,
        (11.3011, 11.17632),
        {"0.weight": ((-1.989936, 4.165135, -0.6233226, 3.670726, -3.117172, -3.488258), -7.358785, 19.81478),
         "0.bias": ((-0.7432905, -0.245527, 0.2522365), -0.7365811, 0.8224279)},
    ),
    "strided": (
        nn.Conv2d(1, 2, (3, 2), stride=(2, 1), bias=False), fill((3, 1, 5, 4), 3, 7, 4), fill((3, 2, 2, 3), 2, 5, 2),
        2.0, (4.461642, 2.934174, 2.934174),
        {"0.weight": ((2.486216, -0.6455347, -0.3745935, 0.260221, -0.6455347, -0.8274713), 0.8428039, 3.503191)},
    ),
    "group-norm": (
        nn.GroupNorm(2, 4), fill((2, 4, 2, 3), 3, 7, 4), fill((2, 4, 2, 3), 2, 5, 2), 4.0, (5.874611, 4.238483),
        {"0.weight": ((3.22783, 1.397006, 1.519261, -2.791266), 3.352831, 4.740235),
         "0.bias": ((-0.2090292, -0.9437339, 0.6808961, 0.6032858), 0.1314189, 1.327366)},
    ),
    "layer-norm": (
        nn.LayerNorm(4), fill((2, 3, 4), 3, 7, 4), fill((2, 3, 4), 2, 5, 2), 2.0, (4.109569, 3.131285),
        {"0.weight": ((0.4419165, -0.2067873, 0.6360451, -1.702718), -0.8315441, 1.881981),
         "0.bias": ((-0.486669, 0.0760232, 0.6387154, -0.3953808), -0.1673113, 0.8982815)},
    ),
    "embedding": (
        nn.Embedding(5, 3), TOKENS, fill((2, 3, 3), 2, 7, 2), 2.5, (2.44949, 2.738613),
        {"0.weight": ((0, 1.825742, 0.4564355, 0, -1.5, 0.5), -0.1742581, 3.5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KNOWN)
def test_layers_give_the_known_answers(name, dtype):
    module, x, g, clip, norms, parameters = KNOWN[name]
    model = with_known_parameters(nn.Sequential(copy.deepcopy(module)).double()).to(dtype)
    x = x if x.dtype == torch.int64 else x.to(dtype)
    table = LayerTable.from_module(model)
    total, found = clipped_sum(model, x, g.to(dtype), clip=clip, layers=table, task=Product())
    torch.testing.assert_close(found[:, 0], torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=0)
    for key, value in table.unflatten(total.double()).items():
        first, summed, norm = parameters[key]
        expected = torch.tensor(first, dtype=torch.float64)
        torch.testing.assert_close(value.flatten()[:6], expected, rtol=4e-5, atol=1e-6)
        assert float(value.sum()) == pytest.approx(summed, rel=4e-5, abs=2e-5)
        assert float(value.norm()) == pytest.approx(norm, rel=4e-5)


A8_NORMS = [[1.595397, 1.339165], [0.548504, 1.443856], [0.9717544, 1.212129], [0.4501976, 0.6998776]]
A8 = {
    "per-layer": (
        PerLayerClip((0.5, 0.3)), (-0.0210168, -0.0265791, 0.2176857), (-0.0335246, -0.1209068, -0.0833207),
        (-0.2355547, -0.029203, 0.0759024), (-0.0548819, 0.0548819),
    ),
    "flat": (
        FlatClip(0.6), (-0.0514461, 0.0322791, 0.1207216), (0.0281321, -0.1610824, -0.1283584),
        (-0.3485748, -0.0172512, 0.0753397), (-0.025527, 0.025527),
    ),
    "reweighted": (
        example_level.Reweighted(0.6, (0.8, 0.6)), (-0.0201761, -0.025516, 0.2089782),
        (-0.0131475, -0.1470822, -0.1109995), (-0.2826656, -0.0350436, 0.0910828), (-0.0658583, 0.0658583),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", A8)
def test_a_network_gives_the_known_answers(name):
    scaling, *expected = A8[name]
    model = with_known_parameters(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double())
    x = fill((4, 3), 3, 7, 2)
    x[3] = 0
    table = LayerTable.from_module(model)
    result = ExampleGradients(model, table).sum(x, torch.tensor([0, 1, 1, 0]), scaling)
    torch.testing.assert_close(result.norms, torch.tensor(A8_NORMS, dtype=torch.float64), rtol=1e-6, atol=0)
    for value, first in zip(table.unflatten(result.total).values(), expected, strict=True):
        torch.testing.assert_close(value.flatten()[: len(first)], value.new_tensor(first), rtol=4e-5, atol=2e-7)


def looped(model, x, y, table, task=None):
    """Every example's gradient in float64, [n, D]."""
    model = copy.deepcopy(model).double()
    parameters = dict(model.named_parameters())
    rows = []
    for i in range(len(y)):
        one = x[i : i + 1]
        outputs = model(one.double() if one.is_floating_point() else one)
        losses = task.losses(outputs, y[i : i + 1]) if task else nn.functional.cross_entropy(outputs, y[i : i + 1])
        wanted = [parameters[slot.name] for slot in table.slots()]
        found = torch.autograd.grad(losses.sum(), wanted, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)


def compare(model, x, y, group_by="module", task=None, micro_batch=None, dtype=torch.float32):
    """Assert that norms and sums of both styles agree with the loop to 1e-5."""
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    table = LayerTable.from_module(model, group_by)
    rows = looped(model, x, y, table, task)
    norms = torch.stack([part.norm(dim=1) for part in table.split(rows)], dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = ExampleGradients(model, table, task, micro_batch)
        bounds = norms.median(dim=0).values
        whole = norms.norm(dim=1)
        for scaling, factors in (
            (PerLayerClip(tuple(bounds.tolist())), (bounds / norms).clamp(max=1).nan_to_num(1.0)),
            (FlatClip(float(whole.median())), (whole.median() / whole).clamp(max=1)[:, None].expand_as(norms)),
        ):
            result = gradients.sum(x, y, scaling)
            torch.testing.assert_close(result.norms, norms, rtol=1e-5, atol=1e-9)
            for j, (part, total) in enumerate(zip(table.split(rows), table.split(result.total.double()), strict=True)):
                expected = (part * factors[:, j : j + 1]).sum(0)
                assert float((total - expected).norm()) <= 1e-5 * float(expected.norm()), (table.names[j], scaling)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0, activation="gelu")
        self.out = nn.Linear(16, 3)

    def forward(self, tokens):
        return self.out(self.layer(self.embed(tokens), torch.zeros(7, 7)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(11, 16), nn.GRU(16, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.out(self.gru(self.embed(tokens))[1][0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.twice = nn.Embedding(11, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.twice(torch.tanh(self.twice(self.embed(tokens).mean(1))))))


class TwiceConvolved(nn.Module):
    """A convolution that is called twice, for images of two sizes."""

    def __init__(self):
        super().__init__()
        self.twice, self.out = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(36, 3)

    def forward(self, x):
        pooled = nn.functional.avg_pool2d(torch.tanh(self.twice(x)), 2)
        return self.out(torch.tanh(self.twice(pooled)).flatten(1))


class Scaled(nn.Module):
    """A parameter of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.inner(x) * self.scale


def images(n, *shape):
    return torch.randn(n, *shape), torch.randint(3, (n,))


def tokens(n):
    return torch.randint(11, (n, 7)), torch.randint(3, (n,))


LAYERS = {
    "conv1d": lambda: (
        nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1, padding_mode="circular"), nn.Tanh(),
            nn.Conv1d(8, 8, 4, stride=2, dilation=2, padding="valid"), nn.Tanh(),
            nn.Conv1d(8, 8, 3, padding="same"), nn.Flatten(), nn.Tanh(), nn.Linear(56, 3),
        ),
        *images(5, 3, 20),
    ),
    "conv2d": lambda: (
        nn.Sequential(
            nn.Conv2d(6, 8, 3, padding=2, dilation=(2, 1)), nn.Tanh(), nn.GroupNorm(2, 8),
            nn.Conv2d(8, 8, (2, 3), stride=(1, 2), padding="valid", bias=False), nn.Tanh(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 1, stride=2), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 3),
        ),
        *images(5, 6, 10, 12),
    ),
    "ghost": lambda: (
        nn.Sequential(
            nn.Conv2d(32, 64, 3, padding=1), nn.Tanh(), nn.Conv2d(64, 256, 3, stride=2), nn.Tanh(),
            nn.Conv2d(256, 256, 1), nn.Flatten(), nn.Linear(256, 3),
        ),
        *images(4, 32, 4, 4),
    ),
    "grouped convolution": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(128, 3)), *images(4, 4, 6, 6)
    ),
    "pooling": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1), nn.Conv2d(8, 6, 2), nn.Tanh(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 3),
        ),
        *images(4, 1, 14, 14),
    ),
    "transformer": lambda: (Transformer(), *tokens(5)),
    "recurrent": lambda: (Recurrent(), *tokens(5)),
    "tied": lambda: (Tied(), *tokens(5)),
    "convolution used twice": lambda: (TwiceConvolved(), *images(5, 4, 6, 6)),
    "few positions": lambda: (
        nn.Sequential(
            nn.Conv2d(16, 256, 3, padding=1), nn.Tanh(), nn.Conv2d(256, 256, 3, padding=1), nn.Tanh(), nn.Flatten(),
            nn.Linear(2304, 3),
        ),
        *images(3, 16, 3, 3),
    ),
    "strips": lambda: (
        nn.Sequential(
            nn.Conv2d(6, 8, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), nn.Tanh(),
            nn.Conv2d(8, 8, 5, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=(0, 2), dilation=(1, 2)),
            nn.Flatten(), nn.Linear(160, 3),
        ),
        *images(5, 6, 8, 12),
    ),
    "bare parameter": lambda: (Scaled(), *images(4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_a_loop_over_examples(name):
    torch.manual_seed(1)
    compare(*LAYERS[name]())


def test_sequence_layers_equal_a_loop_by_any_of_the_three_ways():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))
    compare(model, torch.randn(6, 5, 64), torch.randint(3, (6,)))


@pytest.mark.parametrize("group_by", ["tensor", "all", lambda name: "ab"[name.startswith("fc")]])
def test_layers_of_any_grouping(group_by):
    torch.manual_seed(3)
    model = models.build("cnn", in_shape=(1, 28, 28), classes=3)
    compare(model, *images(5, 1, 28, 28), group_by=group_by)


SHAPES = {
    "logistic": (1, 8, 8), "mlp": (1, 8, 8), "cnn": (1, 28, 28), "s-cnn": (1, 28, 28), "cnn-small": (3, 32, 32),
    "cifar-cnn": (3, 32, 32), "d-cnn": (3, 32, 32), "resnet20": (3, 16, 16), "resnet18": (3, 16, 16),
    "resnet152": (3, 8, 8), "vgg16": (3, 32, 32), "gru": (7,), "transformer": (7,),
}  # fmt: skip
SLOW = {"cifar-cnn", "d-cnn", "resnet20", "resnet18", "resnet152", "vgg16"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in models.names()]
)
def test_bundled_models_equal_a_loop(name):
    torch.manual_seed(4)
    shape = SHAPES[name]
    options = {"activation": "tanh"} if "cnn" in name else {}
    model = models.build(name, in_shape=shape, classes=11 if len(shape) == 1 else 3, **options)
    # A pre-activation near 0 makes ReLU networks differ in float32 between any two implementations.
    dtype = torch.float64 if name.startswith(("resnet", "vgg")) else torch.float32
    if len(shape) == 1:
        text = torch.randint(11, (5, 8))
        compare(model, text[:, :-1], text[:, 1:], task=tasks.get("next-token"), dtype=dtype)
    else:
        compare(model, *images(2 if name in ("vgg16", "resnet152") else 4, *shape), dtype=dtype)


def test_frozen_parameters_are_left_out():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    compare(model, *images(4, 2, 6, 6))


def test_micro_batches_change_rounding_only():
    torch.manual_seed(7)
    model = models.build("cnn", in_shape=(1, 28, 28), classes=3)
    compare(model, *images(7, 1, 28, 28), micro_batch=3)


@pytest.mark.parametrize("targets", [0, 1, 3, 5])
@pytest.mark.parametrize("task", [None, "regression"])
def test_every_example_has_one_target(task, targets):
    """Else a target too many is left out, and the only one of a regression stands for all."""
    model = nn.Linear(3, 2 if task is None else 1)
    y = torch.zeros(targets, dtype=torch.long) if task is None else torch.zeros(targets, 1)
    options = {"clip": 1.0, "layers": LayerTable.from_module(model), "task": task and tasks.get(task)}
    with pytest.raises(ConfigError, match=f"as many inputs as targets, got 2 and {targets}"):
        clipped_sum(model, torch.ones(2, 3), y, **options)


def test_several_inputs_have_as_many_examples():
    model = nn.Bilinear(3, 3, 2)
    layers = LayerTable.from_module(model)
    with pytest.raises(ConfigError, match="as many inputs as targets, got 2, 4 and 2"):
        clipped_sum(model, (torch.ones(2, 3), torch.ones(4, 3)), torch.zeros(2).long(), clip=1.0, layers=layers)


def test_an_empty_batch_gives_zero_without_a_forward_pass():
    model = nn.Sequential(nn.Linear(3, 2))
    table = LayerTable.from_module(model)
    total, norms = clipped_sum(model, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), clip=1.0, layers=table)
    assert torch.equal(total, torch.zeros(8))
    assert norms.shape == (0, 1)


@pytest.mark.parametrize("style", ["per-layer", "flat"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_an_example_that_is_not_finite_counts_as_zero(style, bad):
    torch.manual_seed(8)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 40, 3), nn.Flatten(), nn.Linear(160, 3))
    x, y = images(4, 2, 6, 6)
    table = LayerTable.from_module(model)
    scaling = example_level.scaling.of_style(style, 0.5, len(table))
    gradients = ExampleGradients(model, table)
    good = gradients.sum(x[[0, 1, 3]], y[[0, 1, 3]], scaling)
    x[2, 1, 3, 3] = bad
    result = gradients.sum(x, y, scaling)
    assert result.discarded == 1
    assert not torch.isfinite(result.norms[2]).all()
    torch.testing.assert_close(result.total, good.total, rtol=1e-5, atol=1e-6)


def test_the_module_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(3, 2))
    before = copy.deepcopy(model.state_dict())
    clipped_sum(
        model, *images(4, 3)[:1], torch.zeros(4, dtype=torch.int64), clip=1.0, layers=LayerTable.from_module(model)
    )
    assert "forward" not in vars(model[0])
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_generic_layers_are_announced_once():
    model = Scaled()
    with pytest.warns(Notice, match=r"slower, for the module \(Scaled\)"):
        gradients = ExampleGradients(model, LayerTable.from_module(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients.sum(*images(4, 6), PerLayerClip((1.0, 1.0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "d-cnn"])
def test_opacus_finds_the_same_norms(name):
    from opacus import GradSampleModule

    torch.manual_seed(9)
    shape = (1, 28, 28) if name == "cnn" else (3, 32, 32)
    model = models.build(name, in_shape=shape, classes=3)
    x, y = images(4, *shape)
    table = LayerTable.from_module(model, "tensor")
    _, norms = clipped_sum(model, x, y, clip=1.0, layers=table)
    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
    theirs = torch.stack([p.grad_sample.flatten(1).double().norm(dim=1) for p in wrapped.parameters()], dim=1)
    torch.testing.assert_close(norms, theirs, rtol=1e-5, atol=0)
