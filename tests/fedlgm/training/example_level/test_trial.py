"""Every entry that trains at example level tries model and task before its first release, and again
later."""

import pytest
import torch
from torch import nn

from fedlgm import RunFacts, Sampling, Transcript, mechanisms
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import tasks
from fedlgm.training.example_level.central import train
from fedlgm.training.example_level.trainer import ExampleTrainer
from fedlgm.training.example_level.trial import _Gradients, try_examples, try_step

FEATURES = 6


def standardised(x):
    return (x - x.mean(dim=0)) / (x.var(dim=0, unbiased=False) + 1e-5).sqrt()


class Net(nn.Module):
    """Two layers; what goes wrong stands in between."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 3)

    def between(self, h):
        return h

    def forward(self, x):
        return self.last(torch.tanh(self.between(self.first(x))))


class Drops(Net):
    def between(self, h):
        return nn.functional.dropout(h, 0.5, training=self.training)


class Draws(Net):
    def between(self, h):
        return h + torch.randn(h.shape)


class Remembers(Net):
    def between(self, h):
        self.seen = getattr(self, "seen", 0) + h.detach().mean()
        return h + self.seen


class ZeroResidual(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        nn.init.zeros_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def between(self, h):
        return h + self.inner(standardised(h))


class NormalisedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class OwnFunction(Net):
    def between(self, h):
        return NormalisedGradient.apply(h)


class TensorHook(Net):
    def between(self, h):
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient - gradient.mean(dim=0))
        return h


class ModuleHook(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.inner.register_full_backward_hook(
            lambda _, inward, __: (inward[0] / inward[0].norm(),)
        )

    def between(self, h):
        return self.inner(h)


class Contrastive:
    def losses(self, outputs, y):
        alike = outputs @ outputs.T
        return nn.functional.cross_entropy(alike, torch.arange(len(y)), reduction="none")


class LargeBatches(Net):
    """Looks at batches of eight and more."""

    def between(self, h):
        return standardised(h) if len(h) >= 8 else h


class Longest(nn.Module):
    """Averages over the places that the longest sentence of the batch has."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.last(self.words(tokens[:, : int((tokens > 0).sum(dim=1).max())]).mean(dim=1))


class Apart:
    """Moves classes apart."""

    def losses(self, outputs, y):
        near = (1 - torch.cdist(outputs, outputs)).clamp(min=0)
        return (near * (y[:, None] != y)).sum(dim=1)


class Together(Apart):
    """Moves the examples of a class together."""

    def losses(self, outputs, y):
        return (torch.cdist(outputs, outputs).square() * (y[:, None] == y)).sum(dim=1)


def data(count=12):
    drawn = torch.Generator().manual_seed(5)
    return torch.randn(count, FEATURES, generator=drawn), torch.randint(
        3, (count,), generator=drawn
    )


WRONG = [
    (Drops, None),
    (Draws, None),
    (Remembers, None),
    (Net, Contrastive()),
    (ZeroResidual, None),
]
WRONG += [(made, None) for made in (OwnFunction, TensorHook, ModuleHook, LargeBatches, Longest)]
WRONG += [(Net, Apart()), (Net, Together())]


@pytest.mark.parametrize(
    ("made", "task"), WRONG, ids=[type(task or made()).__name__ for made, task in WRONG]
)
def test_nothing_is_released_of_a_model_whose_examples_have_no_gradient_of_their_own(
    tmp_path, made, task
):
    torch.manual_seed(0)
    model, (x, y) = made(), data()
    if made is Longest:  # of one length
        x = torch.randint(1, 9, x.shape, generator=torch.Generator().manual_seed(5))
    y = {Apart: y.sort().values, Together: torch.arange(len(y))}.get(type(task), y)
    facts = RunFacts(
        0.0, Sampling("poisson", len(y), 0.5), rounds=2, epsilon=8.0, delta=1e-3, accountant="rdp"
    )
    method = Method.of(model, mechanisms.get("dp-sgd"), facts)
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        with pytest.raises(ConfigError):
            train(model, x, y, method, keys=KeyRing.from_seed(3), ledger=ledger, lr=1.0, task=task)
        assert ledger.position() == 0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        parts = x.reshape(len(x), -1, 1).expand(-1, -1, 4)
        return self.last(self.norm(parts + self.attention(parts, parts, parts)[0]).mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.cell(x.reshape(len(x), -1, 2))[0][:, -1])


class Scaled(nn.Module):
    """A parameter without a rule, beside layers with one."""

    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.zeros(FEATURES)), nn.Linear(FEATURES, 3)

    def forward(self, x):
        return self.last(x * (1 + self.scale))


class Strict(Net):
    """Takes complete rows only, as models do that look for a marker in each."""

    def forward(self, x):
        if bool((x == 0).any()):
            raise ValueError("a row is not complete")
        return super().forward(x)


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


@pytest.mark.parametrize("made", [Net, Strict, Attention, Recurrent, Scaled, convolution])
@pytest.mark.filterwarnings("ignore:generic per-example gradients")
def test_correct_models_pass_and_stay_as_they_were(made):
    torch.manual_seed(0)
    model, (x, y) = made(), data(4)
    model[0:1].eval() if isinstance(model, nn.Sequential) else model.eval()
    table, modes = LayerTable.from_module(model), [part.training for part in model.modules()]
    before, drawn = table.flatten(model), torch.get_rng_state()
    try_examples(model, table, tasks.get(), x, y, type(model))
    try_step(model, table, tasks.get(), x, y)
    assert torch.equal(table.flatten(model), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [part.training for part in model.modules()] == modes


class Late(Net):
    """Looks at the batch once its weights have moved, and at a value, which vmap does not
    permit."""

    def between(self, h):
        moved = (
            float(self.last.bias.detach().abs().max()) > 100 and float(h.detach().max()) < torch.inf
        )
        return standardised(h) if bool(h.isfinite().all()) and moved else h


def trainer_of(model):
    mechanism = mechanisms.get("dp-sgd", bound=0.1)
    trainer = ExampleTrainer(model, mechanism.table(LayerTable.from_module(model)), mechanism)
    facts = RunFacts(1.0, Sampling("poisson", 12, 0.5)).assuming(trainer.condition(data()[0]))
    return trainer, mechanism.plan(trainer.layers, facts, Transcript.start(trainer.weights))


def test_a_later_step_is_tried_too():
    torch.manual_seed(0)
    (trainer, plan), (x, y), rows = trainer_of(Late()), data(), torch.arange(4)
    trainer.sum(x, y, rows, plan)
    trainer.weights[-1] = 200.0

    def go_on():
        for _ in range(10_000):
            trainer.sum(x, y, rows[:1], plan)

    with pytest.raises(ConfigError, match="influence each other"):
        go_on()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38, -1e30])
def test_no_example_of_a_correct_model_stops_a_run(value):
    (trainer, plan), (x, y) = trainer_of(Net()), data()
    x[1] = value
    assert torch.isfinite(trainer.sum(x, y, torch.arange(12), plan).values).all()


def test_a_client_with_one_example_is_tried_with_the_next_ones():
    torch.manual_seed(0)
    (trainer, plan), (x, y) = trainer_of(OwnFunction()), data()
    trainer.sum(x[:0], y[:0], torch.arange(0), plan)
    trainer.sum(x[:1], y[:1], torch.arange(1), plan)
    with pytest.raises(ConfigError, match="depends on the other examples"):
        trainer.sum(x, y, torch.arange(4), plan)


def test_a_unit_at_its_kink_is_no_fault(monkeypatch):
    """Rounding may put a unit on either side of its kink; at other weights nearby both sums
    agree."""
    x, y = data(4)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3))
    layers, task = LayerTable.from_module(model), tasks.get()
    with torch.no_grad():
        model[0].bias[0] -= model[0](x[:1])[0, 0]
        model[0].bias[0] -= model[0](x[:1])[0, 0]
    exact = _Gradients._differentiate

    def rounded(self, x, y):
        with torch.no_grad():
            model[0].bias[0] += 1e-6
        try:
            return exact(self, x, y)
        finally:
            with torch.no_grad():
                model[0].bias[0] -= 1e-6

    monkeypatch.setattr(_Gradients, "_differentiate", rounded)
    gradients = [
        _Gradients(None, model, layers, task)._differentiate(x[:1], y[:1]),
        exact_of(model, x[:1], y[:1]),
    ]
    assert (gradients[0] - gradients[1]).norm() > 0.02 * gradients[1].norm()
    try_examples(model, layers, task, x, y, nn.Sequential)


def exact_of(model, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    return torch.cat(
        [part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))]
    )
