"""Examples with NaN, Inf or huge numbers: each changes a step by at most its bound, and stops
nobody's training."""

from __future__ import annotations

import math

import pytest
import torch

from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.training.example_level.trainer import ExampleTrainer

COUNT = 24
FACTS = RunFacts(1.0, Sampling("poisson", COUNT, 0.5), rounds=3)
CASES = [
    ("dp-sgd", {}),
    ("dp-sgd", {"style": "per-layer"}),
    ("auto-s", {}),
    ("dp-psac", {}),
    *(("lm-dp-sgd", {"weights": kind}) for kind in ("public", "stale", "privatised")),
    (
        "lm-dp-sgd",
        {"weights": "privatised", "error_rates": (0.1, 0.0, 0.5), "strengths": (1e-30, 0.0, 1e30)},
    ),
]


def dense() -> torch.nn.Module:
    torch.manual_seed(1)
    parts = (
        torch.nn.Linear(16, 6),
        torch.nn.Tanh(),
        torch.nn.Linear(6, 5),
        torch.nn.Tanh(),
        torch.nn.Linear(5, 3),
    )
    return torch.nn.Sequential(*parts)


def images() -> torch.nn.Module:
    torch.manual_seed(1)
    parts = torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 2), torch.nn.Flatten()
    return torch.nn.Sequential(torch.nn.Unflatten(1, (1, 4, 4)), *parts, torch.nn.Linear(2, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(COUNT, 16, generator=generator),
        torch.randint(3, (COUNT,), generator=generator),
    )
    x[3], x[5, 0], x[7], x[9], x[11] = math.nan, math.inf, 1e38, 0.0, 1e6 * x[11]
    x[13] *= 1e-30
    return x, y


def summed(trainer: ExampleTrainer, plan, rows: list[int]) -> torch.Tensor:
    total = BoundedSum.empty(plan)
    total.add(trainer.sum(*batch(), torch.tensor(rows, dtype=torch.int64), plan))
    return total.total


@pytest.mark.parametrize("module", [dense, images])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_one_example_moves_a_step_by_its_bound_at_most(module, name, options):
    mechanism, made = mechanisms.get(name, **options), module()
    layers = mechanism.table(LayerTable.from_module(made))
    plan, trainer = (
        mechanism.plan(layers, FACTS, Transcript(0, ())),
        ExampleTrainer(made, layers, mechanism),
    )
    everything = summed(trainer, plan, list(range(COUNT)))
    assert everything.isfinite().all()
    worst = 0.0
    for one in (0, 3, 5, 7, 9, 11, 13):
        alone = summed(trainer, plan, [one])
        without = everything - summed(trainer, plan, [row for row in range(COUNT) if row != one])
        for moved in (alone, without):
            parts = zip(plan.parts, moved.split([part.size for part in plan.parts]), strict=True)
            worst = max(
                worst, math.hypot(*(float(part.norm()) / planned.sigma for planned, part in parts))
            )
    assert 0.5 < worst * plan.effective_multiplier <= 1.0
    assert not summed(trainer, plan, []).any()
    assert not summed(trainer, plan, [3]).any()  # a batch of nothing but broken examples is one
