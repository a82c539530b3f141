"""Stacks of layers differentiate themselves as autograd would."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlgm.planning.layout import pools_maxima, prefer_channels_last_
from fedlgm.training import models
from fedlgm.training.stack import Stack, tape
from fedlgm.training.tasks import Classification

STACKS = ("cifar-cnn", "cnn", "cnn-small", "logistic", "mlp")
ACTIVATIONS = (nn.Sigmoid, nn.Tanh, nn.ReLU)


def _by_autograd(module: nn.Module, x: Tensor, y: Tensor, rows: Tensor) -> list[Tensor]:
    loss = nn.functional.cross_entropy(module(x[rows]), y[rows])
    return list(torch.autograd.grad(loss, list(module.parameters())))


def _stack(module: nn.Module) -> tuple[Stack | None, list[Tensor]]:
    gradients = {name: torch.full_like(p, torch.nan) for name, p in module.named_parameters()}
    return Stack.of(module, gradients, Classification()), list(gradients.values())


def _agree(module: nn.Module, x: Tensor, y: Tensor, batches: list[Tensor]) -> None:
    _agree_on_all(module, [(x, y, rows) for rows in batches])


def _agree_on_all(module: nn.Module, batches: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """One stack for (inputs, targets, rows) after another."""
    module = module.double()
    stack, gradients = _stack(module)
    assert stack is not None
    for x, y, rows in batches:
        before = x.clone()
        stack.differentiate(x, y, rows)
        assert torch.equal(x, before)
        for ours, theirs in zip(gradients, _by_autograd(module, x, y, rows), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def _data(examples: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, *shape, dtype=torch.float64), torch.randint(0, 3, (examples,))


@pytest.mark.parametrize("bias", [None, torch.randn(96)])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_products_are_left_to_onednn_where_mkl_is_slow(
    monkeypatch: pytest.MonkeyPatch, bias: Tensor | None, transposed: bool
) -> None:
    """On processors of AMD with AVX-512; small products and double precision are MKL's."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(tape, "_is_of_amd", lambda: True)
    a = torch.randn(400, 128).t().contiguous().t() if transposed else torch.randn(400, 128)
    b, out = torch.randn(128, 96), torch.empty(400, 96)
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    recorded = tape.Tape(tape.Memory(torch.float32))
    assert recorded.multiply(a, b, bias, out=out) is out
    assert [call.func for call in recorded._calls] == [tape._multiply_by_onednn]
    for _ in range(2):
        recorded.replay()
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=5e-5)
        a.neg_()
        exact = 2 * (0 if bias is None else bias.double()) - exact
    others = tape.Tape(tape.Memory(torch.float32))
    others.multiply(a[:2], b, bias, out=out[:2])
    others.multiply(
        a.double(), b.double(), None if bias is None else bias.double(), out=out.double()
    )
    assert {call.func for call in others._calls} == {torch.mm if bias is None else torch.addmm}


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("name", STACKS)
def test_bundled_models_agree_whatever_batch_came_before(
    name: str, shape: tuple[int, int, int]
) -> None:
    module = models.build(name, in_shape=shape, classes=10, seed=1)
    x, y = _data(12, *shape)
    _agree(module, x, y, [torch.randperm(12)[:n] for n in (5, 2, 12, 1, 5)])


@settings(max_examples=60)
@given(
    channels=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4)),
    kernels=st.tuples(*[st.tuples(st.integers(1, 5), st.integers(1, 5))] * 2),
    strides=st.tuples(*[st.tuples(st.integers(1, 3), st.integers(1, 3))] * 2),
    paddings=st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
)
def test_any_two_convolutions_agree(
    channels: tuple[int, int, int],
    kernels: tuple[tuple[int, int], ...],
    strides: tuple[tuple[int, int], ...],
    paddings: tuple[tuple[int, int], ...],
    activation: type[nn.Module],
    bias: bool,
) -> None:
    convolutions = [
        nn.Conv2d(channels[i], channels[i + 1], kernels[i], strides[i], paddings[i], bias=bias)
        for i in range(2)
    ]
    features = nn.Sequential(convolutions[0], activation(), convolutions[1], nn.Flatten())
    x, y = _data(6, channels[0], 17, 19)
    with torch.no_grad():
        wide = features(x.float()).shape[1]
    _agree(
        nn.Sequential(*features, nn.Linear(wide, 3)),
        x,
        y,
        [torch.tensor([3, 0, 5]), torch.tensor([1])],
    )


@given(
    pool=st.sampled_from(
        [
            nn.MaxPool2d(2),
            nn.MaxPool2d(2, stride=1),
            nn.MaxPool2d((2, 2), (2, 2)),
            nn.AvgPool2d(2),
            nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
            nn.AvgPool2d(2, ceil_mode=True),
        ]
    ),
    activation=st.sampled_from(ACTIVATIONS),
    size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    ties=st.booleans(),
)
def test_pooling_agrees_also_where_values_are_equal(
    pool: nn.Module, activation: type[nn.Module], size: tuple[int, int], ties: bool
) -> None:
    convolution = nn.Conv2d(1, 2, 1)
    if ties:  # few distinct values: the first of equal ones is the maximum
        convolution.weight.data.fill_(1.0)
    x, y = _data(4, 1, *size)
    x = x.round() if ties else x
    with torch.no_grad():
        wide = pool(convolution(x.float())).flatten(1).shape[1]
    module = nn.Sequential(
        convolution, activation(), copy.deepcopy(pool), nn.Flatten(), nn.Linear(wide, 3)
    )
    _agree(module, x, y, [torch.arange(4), torch.tensor([2, 1])])


def test_other_ways_to_stack_agree() -> None:
    x, y = _data(4, 2, 6, 6)
    rows = [torch.arange(4)]
    _agree(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)), x, y, rows)
    _agree(
        nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        x,
        y,
        rows,
    )
    _agree(nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(72, 3)), x, y, rows)
    _agree(
        nn.Sequential(nn.Linear(7, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)), *_data(4, 7), rows
    )
    _agree(nn.Sequential(nn.Linear(7, 4), nn.Flatten(), nn.Linear(4, 3)), *_data(4, 7), rows)


def test_images_of_another_size_get_a_memory_of_their_own() -> None:
    """The zero border of padded images must not hold what larger images left there."""
    module = nn.Sequential(
        nn.Conv2d(1, 2, 4, 2, 2), nn.AvgPool2d(2), nn.Flatten(), nn.LazyLinear(3)
    )
    module(torch.zeros(1, 1, 9, 9))
    _agree_on_all(module, [(*_data(3, 1, size, size), torch.arange(3)) for size in (9, 8, 9)])


def test_what_it_does_not_know_is_left_to_autograd() -> None:
    linear = nn.Linear(3, 3)
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda *_: None)
    frozen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    frozen[0].weight.requires_grad_(False)
    tied = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3)))
    tied.b.weight = tied.a.weight  # type: ignore[union-attr]

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    for module in (
        linear,
        hooked,
        frozen,
        tied,
        nn.Sequential(linear, linear),
        nn.Sequential(Own(3, 3)),
        nn.Sequential(
            nn.Linear(3, 3), nn.Sigmoid(), nn.Tanh()
        ),  # the second would overwrite what the first needs
        nn.Sequential(nn.Sigmoid(), nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(3, 3), nn.Dropout()),
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.Flatten(), nn.Linear(4, 3)),
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(4, 3)
        ),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(4, 3)),
        nn.Sequential(nn.Flatten()),
        models.build("resnet20", in_shape=(3, 32, 32), classes=10),
    ):
        assert _stack(module)[0] is None, module


@pytest.mark.parametrize("name", ["cnn-small", "resnet20"])
def test_channels_last_activations_change_nothing_but_the_speed(name: str) -> None:
    module = models.build(name, in_shape=(3, 32, 32), classes=10, seed=1).double()
    fast = copy.deepcopy(module)
    prefer_channels_last_(fast)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(fast(images), module(images), rtol=1e-10, atol=1e-12)
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in module.named_parameters()]


class Functional(nn.Module):
    """A model as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 2, 3), nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.max_pool2d(self.conv(x), 2).flatten(1))


def test_only_models_that_pool_maxima_are_given_another_layout() -> None:
    images = torch.randn(3, 3, 32, 32)
    for name, pools in (
        ("cnn-small", True),
        ("vgg16", True),
        ("resnet20", False),
        ("logistic", False),
    ):
        assert (
            pools_maxima(models.build(name, in_shape=(3, 32, 32), classes=10), images) is pools
        ), name
    assert pools_maxima(Functional(), torch.randn(4, 1, 8, 8))


class Squares(nn.Flatten):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square()


class Halves(nn.MaxPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


class Thirds(nn.AvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 3


@pytest.mark.parametrize("kind", [Squares, lambda: Halves(2), lambda: Thirds(2)])
def test_layers_with_a_forward_of_their_own_are_left_to_autograd(
    kind: Callable[[], nn.Module],
) -> None:
    """A subclass of a known layer may compute something else."""
    layer = kind()
    rest = [] if isinstance(layer, nn.Flatten) else [nn.Flatten()]
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), layer, *rest, nn.LazyLinear(3))
    module(torch.zeros(1, 1, 8, 8))
    assert _stack(module)[0] is None
