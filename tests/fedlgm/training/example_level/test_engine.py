"""Clipped sums against a float64 loop over examples, for every layer, model and style."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from fedlgm.errors import ConfigError, Notice
from fedlgm.planning.layers import LayerTable
from fedlgm.training import example_level, models, tasks
from fedlgm.training.example_level import ExampleGradients, FlatClip, PerLayerClip, clipped_sum


def looped(model, x, y, table, task=None):
    """Every example's gradient in float64, [n, D]."""
    model = copy.deepcopy(model).double()
    parameters = dict(model.named_parameters())
    rows = []
    for i in range(len(y)):
        one = x[i : i + 1]
        outputs = model(one.double() if one.is_floating_point() else one)
        losses = (
            task.losses(outputs, y[i : i + 1])
            if task
            else nn.functional.cross_entropy(outputs, y[i : i + 1])
        )
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
            (
                FlatClip(float(whole.median())),
                (whole.median() / whole).clamp(max=1)[:, None].expand_as(norms),
            ),
        ):
            result = gradients.sum(x, y, scaling)
            torch.testing.assert_close(result.norms, norms, rtol=1e-5, atol=1e-9)
            for j, (part, total) in enumerate(
                zip(table.split(rows), table.split(result.total.double()), strict=True)
            ):
                expected = (part * factors[:, j : j + 1]).sum(0)
                assert float((total - expected).norm()) <= 1e-5 * float(expected.norm()), (
                    table.names[j],
                    scaling,
                )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 32, batch_first=True, dropout=0.0, activation="gelu"
        )
        self.out = nn.Linear(16, 3)

    def forward(self, tokens):
        return self.out(self.layer(self.embed(tokens), torch.zeros(7, 7)).mean(1))


class Remembering(nn.Module):
    """An LSTM, or a GRU, that is read in one of three ways."""

    def __init__(self, read, hidden=5, kind=nn.LSTM, **options):
        super().__init__()
        self.read, self.embed = read, nn.Embedding(11, 6)
        self.cell = kind(6, hidden, batch_first=True, **options)
        self.out = nn.Linear(2 * hidden if read == "states" else hidden, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.read == "states":
            states = self.cell(x)[1]
            states = states if isinstance(states, tuple) else (states, states)
            return self.out(torch.cat([states[0][-1], states[1][0]], 1))
        if self.read == "in turn":
            _, states = self.cell(x[:, :3])
            return self.out(self.cell(x[:, 3:], hx=states)[0].mean(1))
        return self.out(self.cell(x)[0][:, -1])


class Unrolled(nn.Module):
    """A cell of its own, whose layers are called once for each token; the last call is in vain."""

    def __init__(self, hidden):
        super().__init__()
        self.embed, self.step = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6 + hidden, hidden)
        self.out, self.hidden = nn.Linear(hidden, 3), hidden

    def forward(self, tokens):
        state = torch.zeros(len(tokens), self.hidden, dtype=self.out.weight.dtype)
        for token in tokens.unbind(1):
            state = torch.tanh(self.step(torch.cat([self.embed(token), state], 1)))
        self.step(torch.cat([self.embed(token), state], 1))
        return self.out(state)


class BothWays(Remembering):
    """An LSTM that has no rule."""

    def __init__(self):
        super().__init__("last", bidirectional=True)
        self.out = nn.Linear(10, 3)


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
            nn.Conv1d(3, 8, 3, padding=1, padding_mode="circular"),
            nn.Tanh(),
            nn.Conv1d(8, 8, 4, stride=2, dilation=2, padding="valid"),
            nn.Tanh(),
            nn.Conv1d(8, 8, 3, padding="same"),
            nn.Flatten(),
            nn.Tanh(),
            nn.Linear(56, 3),
        ),
        *images(5, 3, 20),
    ),
    "conv2d": lambda: (
        nn.Sequential(
            nn.Conv2d(6, 8, 3, padding=2, dilation=(2, 1)),
            nn.Tanh(),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 8, (2, 3), stride=(1, 2), padding="valid", bias=False),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 1, stride=2),
            nn.Flatten(),
            nn.LayerNorm(32),
            nn.Linear(32, 3),
        ),
        *images(5, 6, 10, 12),
    ),
    "ghost": lambda: (
        nn.Sequential(
            nn.Conv2d(32, 64, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(64, 256, 3, stride=2),
            nn.Tanh(),
            nn.Conv2d(256, 256, 1),
            nn.Flatten(),
            nn.Linear(256, 3),
        ),
        *images(4, 32, 4, 4),
    ),
    "grouped convolution": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(128, 3)),
        *images(4, 4, 6, 6),
    ),
    "pooling": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(8, 6, 2),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 3),
        ),
        *images(4, 1, 14, 14),
    ),
    "transformer": lambda: (Transformer(), *tokens(5)),
    "bidirectional LSTM": lambda: (BothWays(), *tokens(5)),
    "cell of its own": lambda: (Unrolled(4), *tokens(5)),
    "cell of its own, by Gram matrices": lambda: (Unrolled(40), *tokens(5)),
    "tied": lambda: (Tied(), *tokens(5)),
    "convolution used twice": lambda: (TwiceConvolved(), *images(5, 4, 6, 6)),
    "few positions": lambda: (
        nn.Sequential(
            nn.Conv2d(16, 256, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(2304, 3),
        ),
        *images(3, 16, 3, 3),
    ),
    "strips": lambda: (
        nn.Sequential(
            nn.Conv2d(6, 8, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
            nn.Tanh(),
            nn.Conv2d(8, 8, 5, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, padding=(0, 2), dilation=(1, 2)),
            nn.Flatten(),
            nn.Linear(160, 3),
        ),
        *images(5, 6, 8, 12),
    ),
    "bare parameter": lambda: (Scaled(), *images(4, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_a_loop_over_examples(name):
    torch.manual_seed(1)
    compare(*LAYERS[name]())


def test_a_parameter_with_two_names_in_one_layer_has_the_gradients_of_both():
    torch.manual_seed(3)
    model = Remembering("last")
    model.cell.bias_hh_l0 = model.cell.bias_ih_l0
    compare(model, *tokens(5))
    norm = nn.LayerNorm(4)
    norm.bias = norm.weight
    compare(nn.Sequential(norm, nn.Linear(4, 3)), *images(5, 4))


RECURRENT = {
    "short": {"read": "last"},
    "by Gram matrices": {"read": "last", "hidden": 40},
    "of two layers": {"read": "states", "num_layers": 2, "bias": False},
    "given states": {"read": "in turn", "num_layers": 2},
}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_equal_a_loop_over_examples(options, kind):
    torch.manual_seed(1)
    model, (x, y) = Remembering(kind=kind, **options), tokens(5)
    compare(model, x, y)
    model = model.double()
    table = LayerTable.from_module(model)
    rows, result = (
        looped(model, x, y, table),
        ExampleGradients(model, table).sum(x, y, FlatClip(99.0)),
    )
    norms = torch.stack([part.norm(dim=1) for part in table.split(rows)], dim=1)
    torch.testing.assert_close(result.norms, norms, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(result.total, rows.sum(0), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("hidden", [5, 40])
@pytest.mark.parametrize("style", [FlatClip(0.1), PerLayerClip((0.1, 0.1))])
def test_an_example_that_is_not_finite_leaves_recurrent_layers_to_the_others(kind, hidden, style):
    torch.manual_seed(1)
    model = Remembering("last", hidden, kind)
    model.embed = nn.Identity()
    x, y = torch.randn(4, 7, 6), torch.randint(3, (4,))
    x[1, 3, 2] = math.nan
    gradients = ExampleGradients(model, LayerTable.from_module(model))
    result, others = (gradients.sum(x[rows], y[rows], style) for rows in ([0, 1, 2, 3], [0, 2, 3]))
    assert result.discarded == 1
    torch.testing.assert_close(result.total, others.total)


def test_sequence_layers_equal_a_loop_by_any_of_the_three_ways():
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
    )
    compare(model, torch.randn(6, 5, 64), torch.randint(3, (6,)))


@pytest.mark.parametrize("group_by", ["tensor", "all", lambda name: "ab"[name.startswith("fc")]])
def test_layers_of_any_grouping(group_by):
    torch.manual_seed(3)
    model = models.build("cnn", in_shape=(1, 28, 28), classes=3)
    compare(model, *images(5, 1, 28, 28), group_by=group_by)


SHAPES = {
    "logistic": (1, 8, 8),
    "mlp": (1, 8, 8),
    "cnn": (1, 28, 28),
    "s-cnn": (1, 28, 28),
    "cnn-small": (3, 32, 32),
    "cifar-cnn": (3, 32, 32),
    "d-cnn": (3, 32, 32),
    "resnet20": (3, 16, 16),
    "resnet18": (3, 16, 16),
    "resnet152": (3, 8, 8),
    "vgg16": (3, 32, 32),
    "gru": (7,),
    "transformer": (7,),
}


SLOW = {"cifar-cnn", "d-cnn", "resnet20", "resnet18", "resnet152", "vgg16"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in models.names()
    ],
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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_frozen_parameters_of_a_recurrent_layer_are_left_out_and_its_input_is_not(kind):
    torch.manual_seed(6)
    model = Remembering("last", kind=kind)
    for name in ("weight_ih_l0", "bias_hh_l0"):
        getattr(model.cell, name).requires_grad_(False)
    compare(model, *tokens(5))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_has_a_rule_in_one_direction_and_without_dropout(kind):
    def generic(**options):
        model = kind(2, 3, **{"batch_first": True} | options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ExampleGradients(model, LayerTable.from_module(model)).generic

    assert generic() == generic(num_layers=2) == generic(dropout=0.0) == ()
    slow = {"bidirectional": True}, {"batch_first": False}, {"num_layers": 2, "dropout": 0.5}
    assert all(generic(**options) for options in slow)


def test_an_lstm_with_projections_has_no_rule():
    model = nn.LSTM(2, 3, proj_size=2, batch_first=True)
    with pytest.warns(Notice, match="slower"):
        ExampleGradients(model, LayerTable.from_module(model))


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
    options = {
        "clip": 1.0,
        "layers": LayerTable.from_module(model),
        "task": task and tasks.get(task),
    }
    with pytest.raises(ConfigError, match=f"as many inputs as targets, got 2 and {targets}"):
        clipped_sum(model, torch.ones(2, 3), y, **options)


def test_several_inputs_have_as_many_examples():
    model = nn.Bilinear(3, 3, 2)
    layers = LayerTable.from_module(model)
    with pytest.raises(ConfigError, match="as many inputs as targets, got 2, 4 and 2"):
        clipped_sum(
            model,
            (torch.ones(2, 3), torch.ones(4, 3)),
            torch.zeros(2).long(),
            clip=1.0,
            layers=layers,
        )


def test_an_empty_batch_gives_zero_without_a_forward_pass():
    model = nn.Sequential(nn.Linear(3, 2))
    table = LayerTable.from_module(model)
    total, norms = clipped_sum(
        model, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), clip=1.0, layers=table
    )
    assert torch.equal(total, torch.zeros(8))
    assert norms.shape == (0, 1)


@pytest.mark.parametrize("style", ["per-layer", "flat"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_an_example_that_is_not_finite_counts_as_zero(style, bad):
    torch.manual_seed(8)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 40, 3), nn.Flatten(), nn.Linear(160, 3)
    )
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
        model,
        *images(4, 3)[:1],
        torch.zeros(4, dtype=torch.int64),
        clip=1.0,
        layers=LayerTable.from_module(model),
    )
    assert "forward" not in vars(model[0])
    assert all(
        parameter.grad is None and parameter.requires_grad for parameter in model.parameters()
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_generic_layers_are_announced_once():
    model = Scaled()
    with pytest.warns(
        Notice, match=r"slower, generic per-example gradients are used for the module \(Scaled\)"
    ):
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
    theirs = torch.stack(
        [p.grad_sample.flatten(1).double().norm(dim=1) for p in wrapped.parameters()], dim=1
    )
    torch.testing.assert_close(norms, theirs, rtol=1e-5, atol=0)
