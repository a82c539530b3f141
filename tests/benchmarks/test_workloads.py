"""The plain loop that recipes are timed against trains what our trainers train."""

from __future__ import annotations

import pytest
import torch

from benchmarks import workloads
from fedlgm.training import ClientTask
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly


@pytest.mark.parametrize(
    "overrides",
    [[], ["training.optimizer=adam", "training.lr=0.01"], ["training.gradient_clip=0.1"]],
)
def test_both_sides_give_the_same_update(overrides: list[str]) -> None:
    assembly = Assembly(recipes.load("digits", ["privacy.accountant=rdp", *overrides]))
    settings, module = assembly.recipe.training.local, assembly.model.module()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    x, y = workloads.blocks(assembly)[0][0]
    tasks = [ClientTask(x, y, torch.Generator().manual_seed(1), settings.epochs) for _ in range(2)]
    (update,) = assembly.model.trainer(vectorized=False, compiled=False).updates(
        assembly.model.initial(), tasks[:1]
    )
    workloads.plain(module, start, tasks[1], settings, assembly.data.task)
    moved = assembly.model.layers.flatten(module) - assembly.model.initial()
    assert torch.allclose(update[0], moved, rtol=1e-3, atol=1e-5)  # type: ignore[index]
    assert bool(moved.abs().max() > 1e-3)


def test_every_recipe_whose_clients_train_is_there() -> None:
    names = workloads.client_level()
    assert {
        "digits",
        "text-transformer",
        "inid-resnet20-cifar10",
        "ladp-cifar100-resnet152",
    } <= set(names)
    assert "dp-sgd-digits" not in names


def test_figures_of_a_recipe() -> None:
    row = workloads.measure("digits", turns=1)
    assert row["own_data"]
    assert row["least"] <= row["ratio"] <= row["most"]
    assert len(row["seconds"]["ours"]) == 1
