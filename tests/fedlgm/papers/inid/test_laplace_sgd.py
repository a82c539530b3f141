"""Laplace noise on examples' gradients: l1 bounds, plans and a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import simulations
from fedlgm import RunFacts, Sampling, Transcript
from fedlgm.errors import ConfigError
from fedlgm.extension.testing import check_mechanism
from fedlgm.mechanisms.group_noise import GroupNoise
from fedlgm.papers.inid.laplace_sgd import L1Clip, LaplaceSGD
from fedlgm.planning.layers import LayerTable
from fedlgm.training.example_level import ExampleGradients, PerLayerClip
from fedlgm.training.example_level.bounding import scaled_sum

NAME = "fedlgm.papers.inid.laplace_sgd:LaplaceSGD"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 5))


def gradients(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every example's gradient by plain autograd, [n, D]."""
    rows = []
    for one, target in zip(x.split(1), y.split(1), strict=True):
        found = torch.autograd.grad(
            nn.functional.cross_entropy(module(one), target), list(module.parameters())
        )
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


def test_every_layer_of_every_example_is_clipped_in_l1_norm() -> None:
    module, x, y = network(), torch.randn(9, 1, 8, 8), torch.arange(9) % 5
    layers, scaling = LayerTable.from_module(module), L1Clip((0.5, 2.0))
    own = gradients(module, x, y).double()
    norms = torch.stack([part.abs().sum(dim=1) for part in layers.split(own)], dim=1)
    assert (norms > torch.tensor([0.5, 2.0])).any(dim=0).all()
    factors = (torch.tensor([0.5, 2.0]) / norms).clamp(max=1)
    wanted = torch.cat(
        [(part * factors[:, j : j + 1]).sum(dim=0) for j, part in enumerate(layers.split(own))]
    )
    found = ExampleGradients(module, layers).sum(x, y, scaling)
    torch.testing.assert_close(found.norms, norms, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.total.double(), wanted, rtol=1e-4, atol=1e-5)
    again, measured = scaled_sum(own, scaling, layers)
    torch.testing.assert_close(again, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(measured, norms)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_an_example_moves_the_sum_by_at_most_the_l1_bounds(scale: float) -> None:
    module, x, y = network(), scale * torch.randn(16, 1, 8, 8), torch.arange(16) % 5
    layers, bounds = LayerTable.from_module(module), (0.25, 1.0)
    engine = ExampleGradients(module, layers, exact_sums=True)

    def moves(scaling: PerLayerClip) -> list[torch.Tensor]:
        whole = engine.sum(x, y, scaling).total
        moved = []
        for i in range(len(y)):
            rest = [j for j in range(len(y)) if j != i]
            difference = whole - engine.sum(x[rest], y[rest], scaling).total
            moved.append(torch.stack([part.abs().sum() for part in layers.split(difference[None])]))
        return moved

    assert all((one <= torch.tensor(bounds)).all() for one in moves(L1Clip(bounds)))
    if scale == 1.0:  # power: bounds in l2 norm do not give that
        assert any((one > torch.tensor(bounds)).any() for one in moves(PerLayerClip(bounds)))


def test_an_example_without_finite_gradient_counts_as_zero() -> None:
    module, x, y = network(), torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 2])
    x[1] = torch.nan
    engine = ExampleGradients(module, LayerTable.from_module(module))
    found, without = (
        engine.sum(x, y, L1Clip((1.0, 1.0))),
        engine.sum(x[[0, 2]], y[[0, 2]], L1Clip((1.0, 1.0))),
    )
    assert found.discarded == 1
    torch.testing.assert_close(found.total, without.total)


@pytest.mark.parametrize("rule", ["inid", "spr", "iid"])
def test_a_step_has_the_noise_and_the_cost_of_a_clients_release(rule: str) -> None:
    layers = LayerTable.from_sizes({"a": 20, "b": 3})
    facts = RunFacts(0.0, Sampling("poisson", 1000, 0.05), rounds=20, epsilon=3.0, delta=1e-5)
    mechanism, of_clients = (
        LaplaceSGD("mine", bound=0.5, rule=rule),
        GroupNoise(f"laplace-{rule}", bound=0.5),
    )
    assert mechanism.calibrate(facts) == of_clients.calibrate(facts)
    facts = RunFacts(2.0, Sampling("poisson", 1000, 0.05), rounds=20, epsilon=3.0, delta=1e-5)
    own, other = (one.plan(layers, facts, Transcript(0, ())) for one in (mechanism, of_clients))
    assert (own.clip.tolist(), own.sigma.tolist()) == (other.clip.tolist(), other.sigma.tolist())
    assert own.event == other.event
    assert (own.bounded_by, own.guarantee.status, own.guarantee.unit) == (
        "trainer",
        "proven",
        "example",
    )


def test_the_whole_gradient_may_have_one_bound() -> None:
    layers = LayerTable.from_sizes({"a": 20, "b": 3})
    facts, mechanism = (
        RunFacts(2.0, Sampling("poisson", 1000, 0.05)),
        LaplaceSGD("mine", rule="global"),
    )
    plan = mechanism.plan(mechanism.table(layers), facts, Transcript(0, ()))
    assert (plan.clip.tolist(), plan.sigma.tolist()) == ([1.0], [2.0])


@pytest.mark.parametrize("rule", ["inid", "global"])
def test_it_passes_the_kit(rule: str) -> None:
    check_mechanism(LaplaceSGD("mine", rule=rule))


@pytest.mark.parametrize("options", [{"rule": "spread"}, {"bound": 0.0}])
def test_options_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError):
        LaplaceSGD("mine", **options)


def test_a_run_spends_its_budget(tmp_path: Path) -> None:
    changes = {
        "mechanism.name": NAME,
        "mechanism.rule": "inid",
        "mechanism.bound": 1.0,
        "federation.rounds": 3,
        "privacy.epsilon": 1.0,
    }
    result = simulations.simulate("dp-sgd-digits", overrides=changes, run_dir=tmp_path / "run")
    assert 0.97 < result.epsilon <= 1.0
    assert result.guarantee.startswith("proven")
    assert "l1 norm" in result.guarantee
