from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedlgm.errors import ConfigError
from fedlgm.training.models import build, names, to_groupnorm

torch.set_num_threads(1)

Shape = tuple[int, int, int]
GREY, COLOUR, DIGIT = (1, 28, 28), (3, 32, 32), (1, 8, 8)
SMALL: list[tuple[str, Shape, dict[str, Any]]] = [
    ("logistic", DIGIT, {}),
    ("mlp", DIGIT, {"hidden": (32, 16)}),
    ("cnn", GREY, {}),
    ("cnn", GREY, {"activation": "sigmoid"}),
    ("cnn-small", GREY, {}),
    ("cnn-small", COLOUR, {}),
    ("cifar-cnn", COLOUR, {}),
    ("resnet20", (3, 16, 16), {}),
]


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "in_shape", "classes", "expected"),
    [
        ("logistic", DIGIT, 10, 650),
        ("mlp", DIGIT, 10, 2_410),
        ("cnn", GREY, 10, 26_010),
        ("cifar-cnn", COLOUR, 10, 550_570),
        ("cnn-small", COLOUR, 10, 94_538),
        ("cnn-small", COLOUR, 100, 106_148),
        ("cnn-small", GREY, 62, 100_670),
        ("resnet20", COLOUR, 10, 272_474),
        ("resnet18", COLOUR, 10, 11_173_962),
        ("resnet18", COLOUR, 100, 11_220_132),
        ("resnet152", COLOUR, 10, 58_156_618),
    ],
)
def test_published_sizes(name: str, in_shape: Shape, classes: int, expected: int) -> None:
    with torch.device("meta"):
        model = build(name, in_shape=in_shape, classes=classes)
        assert model(torch.empty(2, *in_shape)).shape == (2, classes)
    assert size(model) == expected


def test_cnn_layers_of_the_papers() -> None:
    model = build("cnn", in_shape=GREY, classes=10)
    layers = [
        sum(p.numel() for p in m.parameters()) for m in model.children() if list(m.parameters())
    ]
    assert layers == [1040, 8224, 16416, 330]


def test_cnn_small_has_the_sizes_that_the_noise_norms_of_ladp_imply() -> None:
    """Full DP adds one standard deviation everywhere: squared norms are proportional to parameter
    counts."""
    resnet = {10: [727_901, 505_266, 383_945, 203_968], 100: [787_542, 543_256, 436_562, 267_569]}
    small = {10: [61_523, 48_236, 34_717, 19_852], 100: [77_523, 52_652, 42_236, 25_786]}
    for classes, reference in ((10, 11_173_962), (100, 11_220_132)):
        implied = [
            reference * (a / b) ** 2 for a, b in zip(small[classes], resnet[classes], strict=True)
        ]
        ours = size(build("cnn-small", in_shape=COLOUR, classes=classes))
        assert ours == pytest.approx(sum(implied) / 4, rel=0.005)


def test_resnet20_is_the_residual_part_of_the_published_count() -> None:
    """He et al. count 0.27 M; the projections and their norms add 2,752, norms replace BatchNorm
    one for one."""
    model = build("resnet20", in_shape=COLOUR, classes=10)
    shortcuts = sum(p.numel() for name, p in model.named_parameters() if "downsample" in name)
    assert shortcuts == 16 * 32 + 32 * 64 + 2 * (32 + 64)
    assert size(model) - shortcuts == 269_722


@pytest.mark.parametrize("name", names())
def test_nothing_but_parameters_and_no_inplace_activation(name: str) -> None:
    with torch.device("meta"):
        model = build(
            name, in_shape=(16,) if name in ("gru", "transformer") else COLOUR, classes=10
        )
    assert list(model.buffers()) == []
    assert not any(
        isinstance(m, nn.modules.batchnorm._BatchNorm | nn.Dropout) for m in model.modules()
    )
    assert not any(getattr(m, "inplace", False) for m in model.modules())
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20"])
def test_weights_depend_on_the_seed_only(name: str) -> None:
    def weights(seed: int, world: int) -> torch.Tensor:
        torch.manual_seed(world)
        before = torch.get_rng_state()
        model = build(name, in_shape=GREY, classes=10, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(3, 1), weights(3, 2))
    assert not torch.equal(weights(3, 1), weights(4, 1))
    # Seeds that agree in their lowest 64 bits differ all the same.
    assert not torch.equal(weights(3, 1), weights(3 + 2**64, 1))


def test_meta_models_hold_no_memory_and_draw_nothing() -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = build("resnet152", in_shape=COLOUR, classes=100)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)
    same = build("cnn", in_shape=GREY, classes=10)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in build("cnn", in_shape=GREY, classes=10).named_parameters()}
    assert shapes == {n: p.shape for n, p in same.named_parameters()}


@pytest.mark.parametrize(("name", "in_shape", "options"), SMALL)
def test_vmap_over_stacked_parameters_equals_the_loop(
    name: str, in_shape: Shape, options: dict[str, Any]
) -> None:
    """In double precision: in single precision, rounding can turn a ReLU on in one computation and
    off in another."""
    models = [
        build(name, in_shape=in_shape, classes=10, seed=s, **options).double() for s in range(3)
    ]
    parameters, buffers = stack_module_state(models)
    assert buffers == {}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, *in_shape, generator=generator, dtype=torch.float64)
    y = torch.randint(10, (3, 4), generator=generator)

    def loss(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(models[0], p, (x,)), y)

    logits = vmap(lambda p, x: functional_call(models[0], p, (x,)))(parameters, x)
    gradients = vmap(grad(loss))(parameters, x, y)
    for i, model in enumerate(models):
        assert torch.allclose(logits[i], model(x[i]), rtol=1e-9, atol=1e-12)
        expected = torch.autograd.grad(
            nn.functional.cross_entropy(model(x[i]), y[i]), list(model.parameters())
        )
        for (key, _), g in zip(model.named_parameters(), expected, strict=True):
            assert torch.allclose(gradients[key][i], g, rtol=1e-9, atol=1e-12), key
    assert not torch.allclose(logits[0], models[1](x[0]))


@pytest.mark.parametrize(("name", "in_shape", "options"), SMALL)
def test_per_example_gradients_equal_the_loop(
    name: str, in_shape: Shape, options: dict[str, Any]
) -> None:
    model = build(name, in_shape=in_shape, classes=10, **options).double()
    parameters = {key: p.detach() for key, p in model.named_parameters()}
    x = torch.randn(3, *in_shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([0, 5, 9])

    def loss(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, p, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    for i in range(3):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for key, p in model.named_parameters():
            assert p.grad is not None
            assert torch.allclose(gradients[key][i], p.grad, rtol=1e-9, atol=1e-12), key


def test_activation_option() -> None:
    x = torch.randn(2, *GREY, generator=torch.Generator().manual_seed(0))
    logits = {
        a: build("cnn", in_shape=GREY, classes=10, activation=a)(x)
        for a in ("tanh", "sigmoid", "relu")
    }
    model = build("cnn", in_shape=GREY, classes=10, activation="sigmoid")
    assert sum(isinstance(m, nn.Sigmoid) for m in model.modules()) == 3
    assert not torch.allclose(logits["tanh"], logits["sigmoid"])
    assert not torch.allclose(logits["tanh"], logits["relu"])


def test_hidden_option() -> None:
    assert (
        size(build("mlp", in_shape=DIGIT, classes=10, hidden=[20, 5])) == 65 * 20 + 21 * 5 + 6 * 10
    )
    assert size(build("mlp", in_shape=DIGIT, classes=10, hidden=[])) == 650


@pytest.mark.parametrize(("groups", "expected"), [(32, {16, 32}), (2, {2}), (24, {8})])
def test_group_norm_divides_the_channels(groups: int, expected: set[int]) -> None:
    with torch.device("meta"):
        model = build("resnet20", in_shape=COLOUR, classes=10, groups=groups)
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert {m.num_groups for m in norms} == expected
    assert all(m.num_groups == math.gcd(groups, m.num_channels) for m in norms)


def test_resnet_stems() -> None:
    with torch.device("meta"):
        cifar = build("resnet18", in_shape=(1, 32, 32), classes=10)
        imagenet = build("resnet18", in_shape=COLOUR, classes=1000, stem="imagenet")
    assert isinstance(cifar.conv1, nn.Conv2d)
    assert (cifar.conv1.kernel_size, cifar.conv1.stride, cifar.conv1.in_channels) == (
        (3, 3),
        (1, 1),
        1,
    )
    assert size(imagenet) == 11_689_512  # torchvision's own ResNet-18


@pytest.mark.parametrize(("name", "in_shape", "options"), SMALL)
def test_every_parameter_takes_part(name: str, in_shape: Shape, options: dict[str, Any]) -> None:
    model = build(name, in_shape=in_shape, classes=10, **options)
    x = torch.randn(8, *in_shape, generator=torch.Generator().manual_seed(2))
    nn.functional.cross_entropy(model(x), torch.arange(8)).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.abs().max() > 0, key


@pytest.mark.parametrize(
    ("name", "in_shape", "options", "message"),
    [
        ("lenet", GREY, {}, r"unknown model 'lenet'; known: logistic, mlp, cnn"),
        (
            "logistic",
            GREY,
            {"hidden": 3},
            r"model 'logistic': unknown option 'hidden'; its options: none",
        ),
        (
            "resnet18",
            COLOUR,
            {"norm": "batch"},
            r"unknown option 'norm'; its options: groups, stem",
        ),
        ("mlp", DIGIT, {"hidden": 32}, r"hidden must be a list of integers >= 1"),
        ("mlp", DIGIT, {"hidden": [32, 0]}, r"hidden must be a list of integers >= 1"),
        ("mlp", DIGIT, {"hidden": "32"}, r"hidden must be a list of integers >= 1"),
        (
            "cnn",
            GREY,
            {"activation": "gelu"},
            r"unknown activation 'gelu'; known: tanh, sigmoid, relu",
        ),
        (
            "cnn",
            DIGIT,
            {},
            r"model 'cnn' cannot take inputs of shape \(1, 8, 8\): they are too small",
        ),
        ("cifar-cnn", (3, 4, 4), {}, r"too small"),
        ("resnet18", COLOUR, {"groups": 0}, r"groups must be a whole number of at least 1, got 0"),
        ("resnet152", COLOUR, {"stem": "none"}, r"unknown stem 'none'; known: cifar, imagenet"),
        ("cnn", (8, 8), {}, r"in_shape \(C, H, W\)"),
        ("gru", (8, 8), {}, r"in_shape \(length,\)"),
        ("transformer", (8,), {"heads": 3}, r"heads must divide width"),
        ("transformer", (8,), {"layers": 10**7}, r"layers must be at most 1000"),
        ("mlp", (1, 8, 8), {"seed": -1}, r"seed must be"),
    ],
)
def test_bad_arguments_are_refused(
    name: str, in_shape: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, in_shape=in_shape, classes=10, **options)


def test_no_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="classes of at least 1"):
        build("mlp", in_shape=DIGIT, classes=0)


@pytest.mark.parametrize(("channels", "groups"), [(16, 2), (64, 8), (256, 32), (20, 2), (7, 1)])
def test_group_norm_after_a_linear_layer_sees_several_values(channels: int, groups: int) -> None:
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm):
        model = to_groupnorm(nn.Sequential(nn.Linear(3, channels), kind(channels)))
        assert model[1].num_groups == groups
        for rows in (1, 4):
            assert model(torch.randn(rows, 3)).abs().max() > 0.5
