"""A model that is changed after its trainer was made: what was changed would not run, so the
trainer refuses it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import (
    ClientTask,
    LocalTraining,
    NativeTrainer,
    SequentialTrainer,
    VectorizedTrainer,
)
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.scaling import of_style
from fedlgm.training.native import reason

X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
SETTINGS = LocalTraining(lr=0.1, batch_size=4)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


class Mixing(nn.Tanh):
    def forward(self, x):
        return x - x.mean(0)


def triple(module, inputs, output):
    return 3 * output


CHANGES = {
    "forward hook": lambda m: m[0].register_forward_hook(triple),
    "forward hook of the model": lambda m: m.register_forward_hook(triple),
    "forward pre-hook": lambda m: m[0].register_forward_pre_hook(
        lambda module, inputs: (3 * inputs[0],)
    ),
    "backward hook": lambda m: m[2].register_full_backward_hook(
        lambda module, to, of: (5 * to[0],)
    ),
    "backward pre-hook": lambda m: m[2].register_full_backward_pre_hook(
        lambda module, of: (5 * of[0],)
    ),
    "hook of a parameter": lambda m: m[0].weight.register_hook(lambda gradient: 7 * gradient),
    "hook of a parameter's sum": lambda m: m[0].weight.register_post_accumulate_grad_hook(
        lambda value: None
    ),
    "another module": lambda m: m.__setitem__(1, Mixing()),
    "one more module": lambda m: m.append(nn.Tanh()),
    "one module less": lambda m: m.pop(1),
    "another forward": lambda m: setattr(m[1], "forward", lambda x: 2 * x),
    "weight norm": lambda m: parametrizations.weight_norm(m[0]),
    "spectral norm": lambda m: parametrizations.spectral_norm(m[0]),
    "frozen": lambda m: m[0].weight.requires_grad_(False),
    "another class": lambda m: setattr(m[1], "__class__", Mixing),
    "another order": lambda m: m._modules.update({"0": m._modules.pop("0")}),
    "a module within a module": lambda m: m[1].add_module("inside", Mixing()),
    "one parameter less": lambda m: setattr(m[0], "bias", None),
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 5))),
}


def training(trainer):
    def made(module, start):
        own = trainer(module, LayerTable.from_module(module), SETTINGS)

        def updates():
            task = ClientTask(X, Y, torch.Generator().manual_seed(1), 1)
            return torch.cat([update.clone() for update in own.updates(start, [task])])

        return updates

    return made


def example_level(module, start):
    gradients = ExampleGradients(module, LayerTable.from_module(module))
    return lambda: gradients.sum(X, Y, of_style("flat", 0.5, 2)).total


TRAINERS = {
    "SequentialTrainer": training(SequentialTrainer),
    "VectorizedTrainer": training(VectorizedTrainer),
    "ExampleGradients": example_level,
    "NativeTrainer": training(NativeTrainer),
}


@pytest.fixture(params=TRAINERS)
def trainer(request):
    """A trainer's name. The kernel, which is compiled on first use, is asked for only here."""
    if request.param == "NativeTrainer" and (why := reason()) is not None:
        pytest.skip(why)
    return request.param


def run(trainer, change, *, first):
    """Updates after a change of the model before or after its trainer is made and used."""
    module = model()
    start = LayerTable.from_module(module).flatten(module).clone()
    if first:
        change(module)
    act = TRAINERS[trainer](module, start)
    if not first:
        act()
        change(module)
    return act()


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_change_is_refused(trainer, change):
    with pytest.raises(ConfigError, match=r"was changed in .* after its trainer was made"):
        run(trainer, CHANGES[change], first=False)


def test_a_hook_of_all_modules_is_refused(trainer):
    handles = []
    try:
        with pytest.raises(ConfigError, match="was changed in"):
            run(
                trainer,
                lambda _: handles.append(nn.modules.module.register_module_forward_hook(triple)),
                first=False,
            )
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    "change", ["forward hook", "forward pre-hook", "backward hook", "backward pre-hook", "frozen"]
)
def test_an_earlier_change_is_honoured(change):
    """By the trainer of one client, or refused: what autograd gives for the changed model."""
    module = model()
    start = LayerTable.from_module(module).flatten(module).clone()
    CHANGES[change](module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    table = LayerTable.from_module(module)
    task = ClientTask(X[:4], Y[:4], torch.Generator(), 1)
    loss = nn.functional.cross_entropy(module(X[:4]), Y[:4])
    expected = torch.cat([-0.1 * g.flatten() for g in torch.autograd.grad(loss, trained)])
    start = table.flatten(module).clone()
    (update,) = SequentialTrainer(module, table, SETTINGS).updates(start, [task])
    torch.testing.assert_close(update[0], expected)


@pytest.mark.parametrize("trainer", ["VectorizedTrainer", "ExampleGradients"])
@pytest.mark.parametrize(
    "change", ["hook of a parameter", "hook of a parameter's sum", "backward pre-hook"]
)
def test_gradient_hooks_that_would_not_run_are_refused(trainer, change):
    with pytest.raises(ConfigError, match=r"a gradient hook of .* would not run"):
        run(trainer, CHANGES[change], first=True)


def test_backward_hooks_are_run_for_every_example():
    module = model()
    CHANGES["backward hook"](module)
    gradients = ExampleGradients(module, LayerTable.from_module(module))
    loss = nn.functional.cross_entropy(module(X), Y, reduction="sum")
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]
    )
    torch.testing.assert_close(gradients.sum(X, Y, of_style("flat", 1e6, 2)).total, expected)
