"""Layer risk: an overfitted shadow model gives its members away, and private data cannot enter."""

import inspect

import pytest
import torch
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.example_level.risk import ShadowTraining, layer_risk
from fedlgm.keys import KeyRing


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))


def public(n=1200):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 40, generator=generator), torch.randint(4, (n,), generator=generator)


def test_a_model_that_memorises_noise_leaks_and_an_untrained_one_does_not():
    x, y = public()
    trained = layer_risk(network(), x, y, keys=KeyRing.from_seed(1), training=ShadowTraining(epochs=40, lr=3e-3))
    fresh = layer_risk(network(), x, y, keys=KeyRing.from_seed(1), training=ShadowTraining(epochs=1, lr=1e-9))
    assert [risk.layer for risk in trained] == ["0", "2", "4"]
    assert trained[2].held_out_error < 0.4 < min(risk.held_out_error for risk in fresh)
    assert all(risk.training_error <= risk.held_out_error + 0.05 for risk in trained + fresh)


def test_the_same_keys_give_the_same_risks():
    x, y = public(80)
    settings = ShadowTraining(epochs=2, adversary_epochs=2)
    one, other = (layer_risk(network(), x, y, keys=KeyRing.from_seed(2), training=settings) for _ in range(2))
    assert one == other


def test_only_public_data_can_enter():
    names = list(inspect.signature(layer_risk).parameters)
    assert names == ["shadow", "public_x", "public_y", "keys", "training", "task", "progress"]


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="at least 40"):
        layer_risk(network(), *public(10), keys=KeyRing.from_seed(1))
    with pytest.raises(ConfigError, match="out of range"):
        ShadowTraining(members=1.0)
