from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedlgm import models
from fedlgm.attacks.mia import LayerAdversary, ShadowModel, attack_outputs, output_scores, representations
from fedlgm.errors import ConfigError
from fedlgm.layers import LayerTable


def test_output_scores_known_answers():
    p, y = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([1])
    found = {name: float(score[0]) for name, score in output_scores(nn.Identity(), p.log(), y).items()}
    assert found["loss"] == pytest.approx(math.log(0.2), rel=1e-6)
    assert found["confidence"] == pytest.approx(math.log(0.7), rel=1e-6)
    assert found["entropy"] == pytest.approx(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1), rel=1e-6)
    # Song and Mittal: Mentr = -(1 - p_y) ln p_y - sum over the others of p ln(1 - p); the score is its negative.
    modified = 0.8 * math.log(0.2) + 0.7 * math.log(0.3) + 0.1 * math.log(0.9)
    assert found["modified-entropy"] == pytest.approx(modified, rel=1e-6)


def test_sure_outputs_do_not_overflow():
    scores = output_scores(nn.Identity(), torch.tensor([[1000.0, 0.0]]), torch.tensor([1]))
    assert all(np.isfinite(values).all() for values in scores.values())


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20"])
def test_representations_have_the_layers_names(name):
    module = models.build(name, in_shape=(1, 28, 28), classes=10)
    found = representations(module, torch.zeros(3, 1, 28, 28), batch_size=2)
    assert set(found) == set(LayerTable.from_module(module).names)
    assert all(values.shape[0] == 3 and values.ndim == 2 for values in found.values())


class _Remembers(nn.Module):
    """Its second layer marks the inputs it was trained on; its first one knows nothing of them."""

    def __init__(self, members: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)  # neurons mean the same in all models, as where training starts from one public model
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self._members = members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = (x[:, None] == self._members[None]).all(-1).any(1).float()
        return self.second(self.first(x) * 0 + 3 * own[:, None])


def test_the_layer_that_remembers_is_found():
    generator = torch.Generator().manual_seed(0)

    def shadow() -> ShadowModel:
        x = torch.randn(300, 4, generator=generator)
        return ShadowModel(_Remembers(x[:150]), x[:150], x[150:])

    adversary = LayerAdversary([shadow(), shadow()])
    victim = shadow()
    results = adversary.attack(victim.module, victim.members, victim.others)
    assert adversary.layers == ("first", "second")
    assert abs(results["first"].auc - 0.5) < 0.1
    rates = adversary.error_rates()
    assert rates["second"] < 0.05
    assert rates["first"] > 0.3


@pytest.mark.parametrize("count", [20, 60, 200, 400])
def test_few_examples_are_enough_where_members_lie_apart(count):
    torch.manual_seed(0)
    model = models.build("mlp", in_shape=(1,), classes=2, hidden=[8])
    inside, outside = torch.linspace(4, 6, count)[:, None], torch.linspace(-6, -4, count)[:, None]
    adversary = LayerAdversary([ShadowModel(model, inside, outside)])
    assert [result.auc for result in adversary.attack(model, inside, outside).values()] == [1.0, 1.0]
    assert max(adversary.error_rates().values()) <= 0.1


@pytest.mark.parametrize("count", [60, 200, 400])
def test_few_examples_without_a_difference_are_not_told_apart(count):
    torch.manual_seed(0)
    model = models.build("mlp", in_shape=(4,), classes=2, hidden=[8])
    inside, outside, new = (torch.randn(n, 4) for n in (count, count, 2000))
    adversary = LayerAdversary([ShadowModel(model, inside, outside)])
    assert all(abs(result.auc - 0.5) < 0.05 for result in adversary.attack(model, new[:1000], new[1000:]).values())
    assert min(adversary.error_rates().values()) > 0.3


def test_output_attack_on_a_model_that_remembers():
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    module, y = _Remembers(x[:50]), torch.zeros(50, dtype=torch.int64)
    results = attack_outputs(module, (x[:50], y), (x[50:], y))
    assert results["loss"].auc in (0.0, 1.0)


def test_refuses():
    with pytest.raises(ConfigError, match="shadow models"):
        LayerAdversary([])
