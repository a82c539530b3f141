"""The layer table: grouping, what is left out, round trips, norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable


class Odd(nn.Module):
    """A tied weight, a 0-d parameter, a frozen layer, buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight


def test_odd_parameters():
    table = LayerTable.from_module(Odd())
    # Root parameters come first in torch's order; the tied weight appears once, under its first
    # name.
    assert dict(zip(table.names, table.sizes.tolist(), strict=True)) == {
        "scale": 1,
        "embed": 9,
        "norm": 6,
    }
    assert {slot.name for slot in table.slots()} == {
        "scale",
        "embed.weight",
        "norm.weight",
        "norm.bias",
    }
    assert table.size == 16


def test_loading_leaves_frozen_parameters_and_buffers_alone():
    module = Odd()
    table = LayerTable.from_module(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    table.load_(module, torch.full((table.size,), 7.0))
    after = module.state_dict()
    assert module.head.weight is module.embed.weight
    assert after["head.weight"].unique().tolist() == after["scale"].unique().tolist() == [7.0]
    for name in (
        "frozen.weight",
        "frozen.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ):
        assert torch.equal(after[name], before[name])


@pytest.mark.parametrize(
    ("group_by", "names"),
    [
        ("module", ["0", "2"]),
        ("tensor", ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("all", ["all"]),
        (lambda name: name.rpartition(".")[2], ["weight", "bias"]),
    ],
)
def test_grouping(group_by, names):
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    table = LayerTable.from_module(module, group_by)
    assert list(table.names) == names
    assert table.size == 23
    assert table.offsets.tolist() == [0, *np.cumsum(table.sizes)]
    again = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    table.load_(again, table.flatten(module))
    x = torch.randn(5, 4)
    assert torch.equal(module(x), again(x))


def test_unknown_grouping_and_empty_models():
    with pytest.raises(ConfigError, match="module, tensor, all"):
        LayerTable.from_module(nn.Linear(1, 1), "channel")
    with pytest.raises(ConfigError, match="Tanh has no trainable"):
        LayerTable.from_module(nn.Tanh())


def test_meta_device():
    with torch.device("meta"):
        module = nn.Linear(10_000, 10_000)
    assert LayerTable.from_module(module).size == 100_010_000


def test_bfloat16_is_converted_both_ways_but_not_shared():
    module = nn.Linear(4, 3).to(torch.bfloat16)
    table = LayerTable.from_module(module)
    flat = table.flatten(module)
    assert flat.dtype == torch.float32
    table.load_(module, flat + 1)
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(table.flatten(module), (flat + 1).to(torch.bfloat16).float())
    with pytest.raises(ConfigError, match="float32"):
        table.bind_(module)


def test_a_bound_module_shares_the_vector():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    table = LayerTable.from_module(module)
    before = table.flatten(module)
    flat = table.bind_(module)
    assert torch.equal(flat, before)
    flat.fill_(0.5)
    assert module[1].bias.tolist() == [0.5, 0.5]
    with torch.no_grad():
        module[0].bias.fill_(3.0)
    assert flat[table.unflatten(torch.arange(table.size))["0.bias"]].tolist() == [3.0, 3.0]


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6)


class Shapes(nn.Module):
    def __init__(self, dims):
        super().__init__()
        for i, shape in enumerate(dims):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(tuple(shape))))


@settings(max_examples=50)
@given(shapes)
def test_round_trips(dims):
    module = Shapes(dims)
    table = LayerTable.from_module(module)
    flat = table.flatten(module)
    for name, view in table.unflatten(flat).items():
        assert torch.equal(view, getattr(module, name))
    other = Shapes(dims)
    table.load_(other, flat)
    assert torch.equal(table.flatten(other), flat)
    assert torch.equal(table.bind_(other), flat)
    assert torch.cat(table.split(flat)).equal(flat)
    stacked = table.unflatten(torch.stack([flat, flat]))
    assert all(value.shape == (2, *getattr(module, name).shape) for name, value in stacked.items())


@pytest.mark.parametrize("p", [1, 2])
def test_norms_against_float64(p):
    generator = torch.Generator().manual_seed(0)
    table = LayerTable.from_sizes(
        {"a": 1, "b": 4095, "c": 4096, "d": 4097, "e": 3_000_001, "zero": 10}
    )
    flat = (
        torch.randn(table.size, generator=generator)
        * torch.rand(table.size, generator=generator) ** 8
    )
    flat[-10:] = 0
    expected = [torch.linalg.vector_norm(part.double(), p).item() for part in table.split(flat)]
    assert table.norms(flat, p).tolist() == pytest.approx(expected, rel=1e-6, abs=0)


def test_norms_of_one_huge_and_many_small_values():
    table = LayerTable.from_sizes({"a": 3_000_000})
    flat = torch.full((table.size,), 1e-3)
    flat[0] = 1e3
    assert table.norms(flat).item() == pytest.approx(flat.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("p", [1, 2])
def test_norms_show_what_is_not_finite(value, p):
    table = LayerTable.from_sizes({"a": 5000, "b": 2})
    flat = torch.zeros(table.size)
    flat[4999] = value
    norms = table.norms(flat, p)
    assert not torch.isfinite(norms[0])
    assert norms[1] == 0


def test_norms_are_l1_or_l2():
    with pytest.raises(ValueError, match="l1 or l2"):
        LayerTable.from_sizes({"a": 2}).norms(torch.tensor([3.0, 4.0]), 3)


def test_a_vector_of_another_model_is_refused():
    table = LayerTable.from_sizes({"a": 3})
    for call in (lambda flat: table.norms(flat), lambda flat: table.load_(nn.Linear(1, 1), flat)):
        with pytest.raises(ValueError, match=r"expected a flat vector of shape \(3,\)"):
            call(torch.zeros(4))


def test_a_bare_module_is_one_layer():
    assert LayerTable.from_module(nn.Linear(3, 2)).names == ("model",)
    assert LayerTable.from_module(nn.Linear(3, 2), "tensor").names == ("weight", "bias")


def test_sizes_cannot_be_changed_in_place():
    """A mechanism that sorted the sizes of a run's layers would move noise to other layers'
    coordinates."""
    table = LayerTable.from_sizes({"wide": 7, "narrow": 2})
    for array in (table.sizes, table.offsets):
        with pytest.raises(ValueError, match="read-only"):
            array.sort()
    assert table.sizes.tolist() == [7, 2]


@pytest.mark.parametrize(
    ("slot", "layer"),
    [
        ({"offset": 0}, {"offset": 0}),  # upon the first layer, whose noise would protect both
        ({}, {"offset": 0}),
        ({}, {"size": 2}),
        ({"size": 2}, {"size": 2}),
        ({"offset": 5}, {"offset": 5}),
    ],
)
def test_a_table_of_ones_own_has_neither_overlaps_nor_gaps(slot, layer):
    first, second = LayerTable.from_sizes({"a": 4, "b": 3}).layers
    moved = replace(second, slots=(replace(second.slots[0], **slot),), **layer)
    with pytest.raises(ConfigError, match="layer table"):
        LayerTable((first, moved))
