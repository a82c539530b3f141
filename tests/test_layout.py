"""The CPU's training layout changes how fast a model is computed, not what is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedlgm import models
from fedlgm.training.layout import prefer_channels_last_


@given(
    channels=st.integers(1, 4),
    kernel=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    bias=st.booleans(),
    examples=st.integers(1, 3),
)
def test_a_convolution_of_images_keeps_its_values_and_gradients(
    channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    bias: bool,
    examples: int,
) -> None:
    plain = nn.Conv2d(channels, 5, kernel, stride, padding, bias=bias).double()
    fast = copy.deepcopy(plain)
    prefer_channels_last_(fast)
    images = torch.randn(examples, channels, 11, 9, dtype=torch.float64)
    expected, ours = plain(images), fast(images)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((expected * weight).sum(), list(plain.parameters())),
        torch.autograd.grad((ours * weight).sum(), list(fast.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_images_that_need_a_gradient_get_it() -> None:
    fast = nn.Conv2d(1, 3, 3)
    prefer_channels_last_(fast)
    images = torch.randn(2, 1, 8, 8, requires_grad=True)
    fast(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(1, 4, 3, dilation=2),
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
    ],
    ids=["groups", "dilation", "same", "circular"],
)
def test_unusual_convolutions_are_left_to_torch(convolution: nn.Conv2d) -> None:
    fast = copy.deepcopy(convolution)
    prefer_channels_last_(fast)
    images = torch.randn(2, convolution.in_channels, 9, 9)
    assert torch.equal(fast(images), convolution(images))


@pytest.mark.parametrize("name", ["cnn", "cnn-small", "resnet20"])
def test_a_whole_model_agrees(name: str) -> None:
    module = models.build(name, in_shape=(3, 32, 32), classes=10, seed=1).double()
    fast = copy.deepcopy(module)
    prefer_channels_last_(fast)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(fast(images), module(images), rtol=1e-10, atol=1e-12)
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in module.named_parameters()]
