from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlgm import data
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, models
from fedlgm_lab.attacks.analytic import infer_labels
from fedlgm_lab.attacks.inversion import InversionSettings, invert
from fedlgm_lab.attacks.observation import Observation

ONE_STEP = LocalTraining(lr=0.1, epochs=1, batch_size=8)


def digits(count: int, size: int = 8, start: int = 5) -> tuple[Tensor, Tensor]:
    found = data.load("digits")
    rows = np.arange(count) * 7 + start
    x = torch.from_numpy(found.train_x[rows])
    if size != 8:
        x = nn.functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    return x, torch.from_numpy(found.train_y[rows])


def updated(
    name: str, x: Tensor, y: Tensor, training: LocalTraining, **options
) -> tuple[nn.Module, LayerTable, Tensor]:
    """A model, its layers, and the update of a client with these images."""
    module, own = (
        models.build(name, in_shape=tuple(x.shape[1:]), classes=10, seed=3, **options)
        for _ in range(2)
    )
    layers = LayerTable.from_module(module)
    task = ClientTask(x, y, torch.Generator(), training.epochs)
    update = next(
        iter(SequentialTrainer(own, layers, training).updates(layers.flatten(module), [task]))
    )[0].clone()
    return module, layers, update


@pytest.mark.parametrize("epochs", [1, 5])
def test_one_image_of_an_mlp_is_found_exactly(epochs):
    x, y = digits(1)
    training = LocalTraining(lr=0.5, epochs=epochs, batch_size=8)
    module, layers, update = updated("mlp", x, y, training)
    found = invert(
        module, Observation.unprotected(layers, update), training, images=1, shape=(1, 8, 8)
    )
    assert found.method == "analytic"
    assert found.labels.tolist() == y.tolist()
    assert found.score(x)[0]["ssim"] > 0.999


def test_several_images_of_an_mlp_are_found_by_optimisation():
    x, y = digits(3)
    module, layers, update = updated("mlp", x, y, ONE_STEP)
    settings = InversionSettings(iterations=200, restarts=1, lr=0.1, total_variation=1e-3)
    found = invert(
        module,
        Observation.unprotected(layers, update),
        ONE_STEP,
        images=3,
        shape=(1, 8, 8),
        settings=settings,
    )
    assert found.method == "optimised"
    assert sorted(found.labels.tolist()) == sorted(y.tolist())
    assert min(score["ssim"] for score in found.score(x)) > 0.8


def test_a_digit_is_found_in_the_update_of_a_cnn():
    x, y = digits(1, size=28)
    module, layers, update = updated("cnn", x, y, ONE_STEP)
    seen: list[tuple[int, int]] = []
    found = invert(
        module,
        Observation.unprotected(layers, update),
        ONE_STEP,
        images=1,
        shape=(1, 28, 28),
        settings=InversionSettings(iterations=250, restarts=1),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.score(x)[0]["ssim"] > 0.9
    assert seen[-1] == (250, 250)


def test_more_layers_of_a_cnn_give_more_away_together_than_each_by_itself():
    """One cosine over all that is seen, and steps by signs: 0.72 with a cosine for each layer."""
    x, y = digits(1, size=28, start=12)
    module, layers, update = updated("cnn", x, y, ONE_STEP)
    settings = InversionSettings(iterations=200, restarts=1)
    found = invert(
        module,
        Observation.unprotected(layers, update),
        ONE_STEP,
        images=1,
        shape=(1, 28, 28),
        settings=settings,
    )
    assert found.score(x)[0]["ssim"] > 0.85


@pytest.mark.slow
def test_an_image_is_found_in_the_update_of_a_cnn_with_relu():
    """Four starts and longer steps end nearer to the observed update than one start: SSIM 0.97
    instead of 0.92."""
    x, y = digits(1, size=28, start=12)
    module, layers, update = updated("cnn-small", x, y, ONE_STEP)
    seen = Observation.unprotected(layers, update)
    found, short = (
        invert(module, seen, ONE_STEP, images=1, shape=(1, 28, 28), settings=settings)
        for settings in (None, InversionSettings(restarts=1, lr=0.1, total_variation=2e-2))
    )
    assert found.score(x)[0]["ssim"] > 0.95
    assert found.loss < short.loss / 2


def test_noise_degrades_the_reconstruction():
    x, y = digits(1)
    module, layers, update = updated("mlp", x, y, ONE_STEP)
    scores = []
    for scale in (0.0, 1e-3, 1e-1, 10.0):
        generator = torch.Generator().manual_seed(0)
        size = float(torch.linalg.vector_norm(update)) / layers.size**0.5
        noisy = update + scale * 10 * size * torch.randn(layers.size, generator=generator)
        seen = Observation(layers, noisy, np.full(len(layers), scale * 10 * size))
        settings = InversionSettings(iterations=100)
        scores.append(
            invert(module, seen, ONE_STEP, images=1, shape=(1, 8, 8), settings=settings).score(x)[
                0
            ]["ssim"]
        )
    assert scores[0] > 0.999
    assert scores[1] > 0.9
    assert scores[0] >= scores[1] > scores[2] - 0.05 > scores[3]
    assert scores[3] < 0.3


def test_a_layer_in_the_clear_gives_the_image_away():
    """Noise on one layer hides that layer only: what LaDP-FL's unselected layers do."""
    x, y = digits(1)
    module, layers, update = updated("mlp", x, y, ONE_STEP)
    noisy = update + torch.randn(layers.size, generator=torch.Generator().manual_seed(0))
    seen = {}
    for clear in layers.names:
        keep = np.array([name == clear for name in layers.names])
        mixed = torch.cat(
            [
                u if k else n
                for u, n, k in zip(layers.split(update), layers.split(noisy), keep, strict=True)
            ]
        )
        observation = Observation(layers, mixed, np.where(keep, 0.0, 1.0))
        settings = InversionSettings(iterations=150)
        found = invert(
            module,
            observation,
            ONE_STEP,
            images=1,
            shape=(1, 8, 8),
            labels=y.tolist(),
            settings=settings,
        )
        seen[clear] = found.score(x)[0]["ssim"]
    assert seen["fc1"] > 0.9
    assert seen["fc2"] > 0.5


def test_signal_share_and_single_layers():
    layers = LayerTable.from_sizes({"a": 1000, "b": 1000, "c": 1000})
    update = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    observation = Observation(layers, update, np.array([0.0, 1.0, np.inf]))
    share = observation.signal_share
    assert share[0] == 1.0
    assert share[1] < 0.1
    assert share[2] == 0.0
    only = observation.only(["b"])
    assert only.visible.tolist() == [False, True, False]
    assert not only.update[:1000].any()
    with pytest.raises(ConfigError, match="no layer 'z'"):
        observation.only(["z"])


def test_labels_of_several_images():
    x, y = digits(6)
    module, layers, update = updated("mlp", x, y, ONE_STEP)
    found = infer_labels(module, Observation.unprotected(layers, update), 6, (1, 8, 8))
    assert sorted(found.tolist()) == sorted(y.tolist())


def test_refuses():
    x, y = digits(1)
    module, layers, update = updated("mlp", x, y, ONE_STEP)
    seen = Observation.unprotected(layers, update)
    with pytest.raises(ConfigError, match="optimizer 'sgd'"):
        invert(module, seen, LocalTraining("adam"), images=1, shape=(1, 8, 8))
    with pytest.raises(ConfigError, match="images >= 1"):
        invert(module, seen, ONE_STEP, images=2, shape=(1, 8, 8), labels=[1])
    with pytest.raises(ConfigError, match="cannot hold"):
        Observation(layers, update[1:], np.zeros(len(layers)))
    hidden = Observation(layers, update, np.full(len(layers), np.inf))
    with pytest.raises(ConfigError, match="sees no layer"):
        invert(module, hidden, ONE_STEP, images=2, shape=(1, 8, 8), labels=[1, 2])
