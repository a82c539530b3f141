"""Decoupled weight decay of clients' training: the steps of torch's AdamW, in every trainer or
refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import simulations
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.ladp_frame import bound_by_training
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, VectorizedTrainer
from fedlgm.training.native import NativeTrainer, reason
from simulations.config.recipe import load

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
SETTINGS = [
    LocalTraining(optimizer="adam", lr=0.05, batch_size=4, weight_decay=0.3),
    LocalTraining(lr=0.5, batch_size=4, weight_decay=0.3),
    LocalTraining(lr=0.5, batch_size=4, weight_decay=0.3, momentum=0.9, gradient_clip=0.5),
]


def module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def task(**more) -> ClientTask:
    return ClientTask(X, Y, torch.Generator().manual_seed(1), epochs=3, **more)


def update(kind: type, settings: LocalTraining, given: ClientTask, **options) -> torch.Tensor:
    made = module()
    layers = LayerTable.from_module(made)
    return next(
        iter(kind(made, layers, settings, **options).updates(layers.flatten(made), [given]))
    )[0].clone()


@pytest.mark.parametrize("kind", [SequentialTrainer, VectorizedTrainer])
def test_adam_with_weight_decay_is_adamw(kind: type) -> None:
    settings, made = SETTINGS[0], module()
    start = torch.cat([value.detach().flatten() for value in made.parameters()])
    optimizer = torch.optim.AdamW(
        made.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    for order in task().permutations():
        for rows in order.split(settings.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(made(X[rows]), Y[rows]).backward()
            optimizer.step()
    moved = torch.cat([value.detach().flatten() for value in made.parameters()]) - start
    options = {"width": 2} if kind is VectorizedTrainer else {}
    assert torch.allclose(update(kind, settings, task(), **options), moved, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_trainers_agree_and_what_is_not_trained_does_not_decay(settings: LocalTraining) -> None:
    trained = torch.zeros(26)
    trained[:16] = 1.0
    for given in ({}, {"trained": trained}):
        one = update(SequentialTrainer, settings, task(**given))
        other = update(VectorizedTrainer, settings, task(**given), width=2)
        assert torch.allclose(one, other, atol=1e-6)
        plain = update(
            SequentialTrainer, dataclasses.replace(settings, weight_decay=None), task(**given)
        )
        assert not torch.allclose(one, plain, atol=1e-3)
        if given:
            assert not one[16:].any()


def test_where_weights_cannot_decay_it_is_refused() -> None:
    made = module()
    layers = LayerTable.from_module(made)
    if reason() is None:
        with pytest.raises(
            ConfigError,
            match=r"kernel has no training\.weight_decay: use training\.kernel = 'torch'",
        ):
            NativeTrainer(made, layers, SETTINGS[0])
    with pytest.raises(ConfigError, match=r"training\.weight_decay cannot be 0\.1"):
        load("example-level-federation", ["training.weight_decay=0.1"])
    with pytest.raises(ConfigError, match="without momentum and weight decay only"):
        bound_by_training(LocalTraining(lr=0.1, gradient_clip=1.0, weight_decay=0.1))
    for lr, decay in ((1.0, 1.0), (0.1, -1.0), (0.1, float("nan")), (0.1, float("inf"))):
        with pytest.raises(ConfigError, match=r"training\.weight_decay: every step multiplies"):
            LocalTraining(lr=lr, weight_decay=decay)


def test_facts_without_a_decay_are_written_as_before() -> None:
    facts = RunFacts(1.0, Sampling("poisson", 10, 0.5))
    assert "weight_decay" not in facts.to_dict()["training"]
    decaying = dataclasses.replace(facts, training=SETTINGS[0])
    assert RunFacts.from_dict(decaying.to_dict()).training == SETTINGS[0]


def test_a_recipe_states_it(tmp_path) -> None:
    changes = ["federation.rounds=1", "training.optimizer=adam", "training.lr=0.01"]
    made = [
        simulations.simulate("digits", overrides=[*changes, *more], run_dir=tmp_path / str(number))[
            "model_sha256"
        ]
        for number, more in enumerate(([], ["training.weight_decay=0.1"]))
    ]
    assert made[0] != made[1]
    with pytest.raises(ConfigError, match=r"between 0 and 1, got lr 0\.01 and weight_decay 200"):
        simulations.simulate(
            "digits",
            overrides=[*changes, "training.weight_decay=200"],
            run_dir=tmp_path / "refused",
        )
    assert not (tmp_path / "refused").exists()
