"""Models without a gradient per example are refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import simulations
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training.example_level import clipped_sum


def images(n, *shape):
    return torch.randn(n, *shape), torch.randint(3, (n,))


def tokens(n):
    return torch.randint(11, (n, 7)), torch.randint(3, (n,))


def refused(model, x, y, task=None):
    with pytest.raises(ConfigError) as caught:
        clipped_sum(model, x, y, clip=1.0, layers=LayerTable.from_module(model), task=task)
    return str(caught.value)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x - x.mean(0))


class Sideways(nn.Module):
    """Rows are not examples: [n, T, d] is flattened to [n T, d]."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x.flatten(0, 1)).view(len(x), -1, 3).mean(1)


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.linear(x, self.out.weight) + self.out(x)


class Packed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.out = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True)
        return self.out(self.cell(packed)[0].data.view(-1, len(x), 5)[-1])


class Penalised:
    def __init__(self, model):
        self.model = model

    def losses(self, outputs, y):
        return outputs.square().sum(1) + self.model[0].weight.square().sum()


def test_what_has_no_gradient_per_example_is_refused():
    assert "to_groupnorm" in refused(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), *images(4, 2, 3, 3)
    )
    assert "first dimension" in refused(Sideways(), *images(4, 5, 4))
    assert "outside the module" in refused(Outside(), *images(4, 4))
    model = nn.Sequential(nn.Linear(4, 3))
    assert "'0.weight' is used outside" in refused(model, *images(4, 4), task=Penalised(model))
    assert "max_norm" in refused(nn.Sequential(nn.Embedding(11, 3, max_norm=1.0)), *tokens(4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_are_refused(kind):
    assert "packed sequence" in refused(Packed(kind), *images(4, 6, 4))


class Given(nn.Module):
    """An LSTM, or a GRU, that is given its states."""

    def __init__(self, kind, hidden):
        super().__init__()
        self.cell, self.out = kind(4, 5, batch_first=True), nn.Linear(5, 3)
        self.hidden = hidden

    def forward(self, x):
        states = x.new_zeros(1, len(x), self.hidden)
        if isinstance(self.cell, nn.LSTM):
            states = states, states
        return self.out(self.cell(x, states)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    ("shape", "hidden", "reason"),
    [
        ((6, 4, 1), 5, "2D or 3D"),
        ((6, 2), 5, "input.size"),
        ((6, 4), 4, "Expected hidden"),
    ],
)
def test_a_recurrent_layer_takes_sequences_and_states_of_its_own_shape(kind, shape, hidden, reason):
    assert reason in refused(Given(kind, hidden), *images(3, *shape))


class Checkpointed(nn.Module):
    """Reentrant checkpointing differentiates the layer out of autograd's sight."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True))


class Unrecorded(Checkpointed):
    def forward(self, x):
        with torch.no_grad():
            x = self.inner(x)
        return self.out(x)


class TakingGradients(Checkpointed):
    """A force field: the gradient of an energy is an input of the next layer."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = torch.tanh(self.inner(x))
            (force,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return self.out(energy + force)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Checkpointed(), "inner is trained, but its forward pass records no gradient"),
        (Unrecorded(), "inner is trained, but its forward pass records no gradient"),
        (TakingGradients(), "the forward pass takes a gradient through inner"),
    ],
)
def test_gradients_that_the_pass_would_lose_or_count_twice_are_refused(model, reason):
    assert reason in refused(model, *images(4, 4))


def test_a_layer_that_also_runs_without_gradients_is_trained():
    class Teacher(Unrecorded):
        def forward(self, x):
            return self.out(self.inner(x)) + super().forward(x)

    model, (x, y) = Teacher(), images(4, 4)
    total, _ = clipped_sum(model, x, y, clip=1e6, layers=LayerTable.from_module(model))
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    plain = torch.cat([value.grad.flatten() for value in model.parameters()])
    torch.testing.assert_close(total, plain, rtol=1e-4, atol=1e-5)


def test_a_model_that_fails_on_one_example_is_refused_in_one_sentence():
    """One value per group, which torch refuses in training."""
    model = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(6, 6), nn.Linear(6, 3))
    x, y = np.random.default_rng(1).random((9, 4)), np.arange(9) % 3
    with pytest.raises(ConfigError, match="the model fails on one example: ValueError: Expected"):
        simulations.simulate(
            "dp-sgd-digits",
            model=model,
            data={"train": (x, y), "test": (x, y)},
            overrides={"training.batch_size": 4},
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_keep_the_bounds(dtype):
    """A gradient cut to a bound of 0.1 in bfloat16 was up to 0.9 % longer, and the sums round to
    its few digits."""
    x, y = images(5, 30)
    assert "must be float32 or float64" in refused(nn.Linear(30, 3).to(dtype), x.to(dtype), y)
