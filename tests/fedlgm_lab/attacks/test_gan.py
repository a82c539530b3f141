from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedlgm import data
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, models
from fedlgm_lab.attacks.frechet import PublicClassifier
from fedlgm_lab.attacks.gan import ClassReconstruction, GanSettings

TARGET = 0


def network() -> torch.nn.Module:
    return models.build(
        "mlp", in_shape=(1, 8, 8), classes=10, seed=1, hidden=[64], activation="relu"
    )


def federation(settings: GanSettings, *, held: bool, rounds: int = 10) -> tuple[Tensor, Tensor]:
    """Reconstructions by the last of four clients, and the victims' images; `held`: whether victims
    have the class."""
    digits = data.load("digits")
    x, y = torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    parts = [order[i::4] for i in range(4)]
    parts = [rows if held and i < 3 else rows[y[rows] != TARGET] for i, rows in enumerate(parts)]
    module = network()
    layers = LayerTable.from_module(module)
    model, trainer = (
        layers.flatten(module),
        SequentialTrainer(network(), layers, LocalTraining(lr=0.3)),
    )
    curious = ClassReconstruction(
        network(), target=TARGET, x=x[parts[3]], y=y[parts[3]], classes=10, settings=settings
    )
    batches = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        shares = [(x[rows], y[rows]) for rows in parts]
        tasks = [ClientTask(*share, batches, 1) for share in shares]
        model = model + torch.stack(
            [update[0].clone() for update in trainer.updates(model, tasks)]
        ).mean(0)
        curious.observe(model)
    return curious.samples(120), x[y == TARGET]


@pytest.fixture(scope="module")
def judge() -> PublicClassifier:
    digits = data.load("digits")
    return PublicClassifier.train(
        torch.from_numpy(digits.test_x), torch.from_numpy(digits.test_y), 10
    )


@pytest.mark.slow
def test_the_isolated_class_is_reconstructed(judge):
    settings = GanSettings()
    digits = data.load("digits")
    samples, private = federation(settings, held=True)
    nearest = min(
        judge.distance(torch.from_numpy(digits.train_x[digits.train_y == other]), private)
        for other in range(1, 10)
    )
    assert judge.agreement(samples, TARGET) > 0.7
    assert judge.distance(samples, private) < nearest / 2
    # The control: where no victim holds the class, the same attacker finds nothing, so what it
    # found was theirs.
    nothing, _ = federation(settings, held=False)
    assert judge.distance(nothing, private) > 2 * judge.distance(samples, private)


def test_a_model_drowned_in_noise_teaches_nothing(judge):
    digits = data.load("digits")
    own = digits.train_y != TARGET
    curious = ClassReconstruction(
        network(),
        target=TARGET,
        x=torch.from_numpy(digits.train_x[own]),
        y=torch.from_numpy(digits.train_y[own]),
        classes=10,
        settings=GanSettings(steps=5),
    )
    layers = LayerTable.from_module(network())
    curious.observe(torch.full((layers.size,), float("inf")))
    assert torch.isfinite(curious.samples(10)).all()


def test_the_same_seed_gives_the_same_images():
    digits = data.load("digits")
    own = digits.train_y != TARGET
    x, y = torch.from_numpy(digits.train_x[own]), torch.from_numpy(digits.train_y[own])
    before = torch.get_rng_state()
    first, second = (
        ClassReconstruction(
            network(), target=TARGET, x=x, y=y, classes=10, settings=GanSettings(steps=2)
        )
        for _ in range(2)
    )
    model = LayerTable.from_module(network()).flatten(network())
    assert first.observe(model) == second.observe(model)
    assert torch.equal(first.samples(3), second.samples(3))
    assert torch.equal(before, torch.get_rng_state())


def test_refuses():
    x, y = torch.zeros(4, 1, 8, 8), torch.tensor([1, 2, 3, 4])
    with pytest.raises(ConfigError, match="no image of class 1"):
        ClassReconstruction(network(), target=1, x=x, y=y, classes=10)
    with pytest.raises(ConfigError, match="must lie in"):
        ClassReconstruction(network(), target=10, x=x, y=y, classes=10)
    with pytest.raises(ConfigError, match="steps, batch and noise"):
        GanSettings(steps=0)
