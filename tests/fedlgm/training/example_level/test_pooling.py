"""Maxima over 2 x 2 windows: those of torch, whatever number of images is worked on at a time."""

import pytest
import torch
from torch import nn

from fedlgm.training.example_level import pooling


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("height", "width"), [(5, 6), (8, 8), (2, 3)])
def test_pieces_change_no_bit(step, height, width, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (7, 3, height, width), generator=generator).float()  # with ties
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    module = nn.MaxPool2d(2, step)
    expected = module(x)
    dy = torch.randn(expected.shape, generator=generator)
    (gradient,) = torch.autograd.grad(expected, x, dy)
    found = {}
    for images in (1, 2, 7, 100):
        monkeypatch.setattr(pooling, "FEW_BYTES", images * 4 * x[0].numel())
        out = pooling.max_pool(module, x)
        assert torch.equal(out, expected)
        (found[images],) = torch.autograd.grad(out, x, dy)
        torch.testing.assert_close(found[images], gradient)
    assert all(torch.equal(other, found[100]) for other in found.values())
