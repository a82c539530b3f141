"""Layer risk: an overfitted shadow model gives its members away, and private data cannot enter."""

import inspect

import pytest
import torch
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.risk.exposure import (
    ShadowTraining,
    gradient_errors,
    layer_errors,
    layer_risk,
    public_bias_weights,
)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def public(n=1200):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 40, generator=generator), torch.randint(4, (n,), generator=generator)


def test_a_model_that_memorises_noise_leaks_and_an_untrained_one_does_not():
    x, y = public()
    trained = layer_risk(
        network(), x, y, keys=KeyRing.from_seed(1), training=ShadowTraining(epochs=40, lr=3e-3)
    )
    fresh = layer_risk(
        network(), x, y, keys=KeyRing.from_seed(1), training=ShadowTraining(epochs=1, lr=1e-9)
    )
    assert [risk.layer for risk in trained] == ["0", "2", "4"]
    assert trained[2].held_out_error < 0.4 < min(risk.held_out_error for risk in fresh)
    assert all(risk.training_error <= risk.held_out_error + 0.05 for risk in trained + fresh)
    # Outputs give members away in the last layer, gradients in every one of them.
    assert max(risk.gradient_error for risk in trained) < trained[0].held_out_error - 0.1
    assert (
        max(risk.gradient_error for risk in trained)
        < 0.3
        < min(risk.gradient_error for risk in fresh)
    )


def test_a_threshold_is_chosen_on_other_examples_than_it_is_counted_on():
    generator = torch.Generator().manual_seed(3)
    alike = torch.rand(400, 2, generator=generator), torch.rand(400, 2, generator=generator)
    assert min(gradient_errors(*alike, generator)) > 0.42
    apart = torch.rand(400, 1, generator=generator), 1 + torch.rand(400, 1, generator=generator)
    assert gradient_errors(*apart, generator)[0] < 0.02
    assert gradient_errors(*reversed(apart), generator) == [
        0.5
    ]  # members with larger gradients are not looked for


def test_the_same_keys_give_the_same_risks():
    x, y = public(80)
    settings = ShadowTraining(epochs=2, adversary_epochs=2)
    one, other = (
        layer_risk(network(), x, y, keys=KeyRing.from_seed(2), training=settings) for _ in range(2)
    )
    assert one == other


def test_only_public_data_can_enter():
    names = list(inspect.signature(layer_risk).parameters)
    assert names == ["shadow", "public_x", "public_y", "keys", "training", "task", "progress"]


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="at least 40"):
        layer_risk(network(), *public(10), keys=KeyRing.from_seed(1))
    with pytest.raises(ConfigError, match="out of range"):
        ShadowTraining(members=1.0)


def test_strengths_are_shares_of_the_gradients_length():
    x, y = public(200)
    risks = layer_risk(
        network(),
        x,
        y,
        keys=KeyRing.from_seed(1),
        training=ShadowTraining(epochs=3, adversary_epochs=1),
    )
    strengths = torch.tensor([risk.strength for risk in risks])
    assert (strengths > 0).all()
    assert 0.8 < float(strengths.norm()) <= 1  # a mean of unit vectors


def test_progress_counts_passes_and_layers():
    seen = []
    settings = ShadowTraining(epochs=2, adversary_epochs=1)
    x, y = public(60)
    layer_risk(
        network(),
        x,
        y,
        keys=KeyRing.from_seed(1),
        training=settings,
        progress=lambda *found: seen.append(found),
    )
    assert [done for done, _, _ in seen] == [1, 2, 3, 4, 5]
    assert {total for _, total, _ in seen} == {5}
    assert [what for _, _, what in seen] == ["shadow model"] * 2 + ["0", "2", "4"]


def test_errors_against_a_model_are_not_cut_at_a_coin_toss():
    """Held out, an adversary of nothing errs in a half on average, and above it as often as
    below."""
    x, _ = public(400)
    rows = torch.arange(400)
    settings = ShadowTraining(adversary_epochs=5)
    errors = [
        error
        for seed in range(4)
        for _, error in layer_errors(
            network(), x, rows[::2], rows[1::2], keys=KeyRing.from_seed(seed), training=settings
        ).values()
    ]
    assert max(errors) > 0.5
    assert abs(sum(errors) / len(errors) - 0.5) < 0.06


def test_public_weights_for_convergence_have_the_least_bias():
    model, (x, y) = network(), public(64)
    layers = LayerTable.from_module(model)
    found = torch.from_numpy(public_bias_weights(model, layers, x, y, 0.7))
    assert float(found.norm()) == pytest.approx(1, abs=1e-6)
    per_example = []
    for i in range(len(y)):
        grads = torch.autograd.grad(
            nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), model.parameters()
        )
        per_example.append(torch.cat([g.flatten() for g in grads]).double())
    gradients = torch.stack(per_example)
    parts = layers.split(gradients)
    kept = gradients.norm(dim=1, keepdim=True).clamp(max=0.7)
    directions = [(kept * part / part.norm(dim=1, keepdim=True)).mean(0) for part in parts]

    def bias(w):
        return sum(
            float((w[j] * u - g.mean(0)).norm() ** 2)
            for j, (u, g) in enumerate(zip(directions, parts, strict=True))
        )

    others = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)).double().abs()
    assert bias(found) <= min(bias(w / w.norm()) for w in others) + 1e-9


class CalledTwice(nn.Module):
    """A layer that is called for each half of an example, as a recurrent cell is for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(1, 4)

    def forward(self, x):
        return self.cell(x[:, :1]) + self.cell(x[:, 1:])


def test_a_layer_that_is_called_several_times_has_one_adversary():
    x, inside, outside = (
        torch.linspace(-1, 1, 60)[:, None].expand(-1, 2),
        torch.arange(30),
        torch.arange(30, 60),
    )
    errors = layer_errors(CalledTwice(), x, inside, outside, keys=KeyRing.from_seed(1))
    assert list(errors) == ["cell"]
    assert errors["cell"][1] < 0.3  # members lie apart from the others
