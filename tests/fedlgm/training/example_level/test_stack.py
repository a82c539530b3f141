"""Plain stacks skip autograd and hooks: the same bits as the pass that every other model takes."""

import math

import pytest
import torch
from torch import nn

from fedlgm.planning.layers import LayerTable
from fedlgm.training import models, tasks
from fedlgm.training.example_level import ExampleGradients, FlatClip
from fedlgm.training.example_level.scaling import PSAC, AutoS, Reweighted

MODELS = {
    "tanh": lambda: models.build("mlp", in_shape=(1, 8, 8), classes=10),
    "sigmoid, rows of more than 256 numbers": lambda: models.build(
        "mlp", in_shape=(1, 8, 40), classes=10, hidden=[16, 8], activation="sigmoid"
    ),
    "relu": lambda: models.build("mlp", in_shape=(1, 8, 8), classes=10, activation="relu"),
    "no hidden layer": lambda: nn.Sequential(nn.Linear(64, 10, bias=False)),
    "one output": lambda: nn.Sequential(nn.Linear(64, 1)),
}


def inputs(module, examples):
    x = torch.rand(examples, 64) if type(module[0]) is nn.Linear else torch.rand(examples, 1, 8, 8)
    if type(module[0]) is nn.Flatten and module[1].in_features == 320:
        x = torch.rand(examples, 1, 8, 40)
    return x, torch.randint(10, (examples,))


def both(module, grouped, scaling, x, y, **options):
    table = LayerTable.from_module(module, grouped)
    task = tasks.get("ranked" if y.is_floating_point() else "classification")
    fast, general = (ExampleGradients(module, table, task, **options) for _ in range(2))
    assert fast._stack is not None
    general._stack = None
    return fast.sum(x, y, scaling(len(table))), general.sum(x, y, scaling(len(table)))


SCALINGS = [
    lambda k: FlatClip(1.0),
    lambda k: FlatClip(math.inf),
    lambda k: FlatClip(0.0),
    lambda k: AutoS(),
    lambda k: PSAC(),
    lambda k: Reweighted(1.0, (0.99 * k**-0.5,) * k),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("number", range(len(SCALINGS)))
def test_a_stack_has_the_bits_of_the_general_pass(model, number):
    torch.manual_seed(0)
    scaling = SCALINGS[number]
    grouped = ["all", "tensor"][(number + list(MODELS).index(model)) % 2]  # all pairs of two
    module = MODELS[model]()
    for examples, options in (
        (1, {}),
        (13, {}),
        (13, {"exact_sums": True}),
        (13, {"micro_batch": 5}),
    ):
        x, y = inputs(module, examples)
        y = y.float().fmod(2) if model == "one output" else y
        x[0] *= 1e-25  # its square vanishes in float32
        one, other = both(module, grouped, scaling, x, y, **options)
        assert torch.equal(one.total, other.total)
        assert torch.equal(one.norms, other.norms)


def test_an_example_without_a_finite_gradient_counts_as_zero():
    torch.manual_seed(0)
    module = MODELS["tanh"]()
    x, y = inputs(module, 6)
    x[2, 0, 0, 0] = math.nan
    one, other = both(module, "all", lambda k: FlatClip(1.0), x, y)
    assert one.discarded == other.discarded == 1
    assert torch.equal(one.total, other.total)
    assert one.total.isfinite().all()


class Penalised(tasks.Classification):
    """A user's task: its losses may depend on anything."""

    __module__ = "mypkg.tasks"


def hooked():
    module = nn.Sequential(nn.Linear(4, 2))
    module[0].register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "task"),
    [
        (nn.Sequential(nn.Linear(4, 2)), Penalised()),
        (hooked(), tasks.get()),
        (nn.Sequential(nn.Linear(4, 2), nn.Softplus()), tasks.get()),
        (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), tasks.get()),
    ],
)
@pytest.mark.filterwarnings("ignore:generic")
def test_what_is_not_a_plain_stack_takes_the_general_pass(module, task):
    assert ExampleGradients(module, LayerTable.from_module(module), task)._stack is None


def test_rows_of_a_sequence_take_the_general_pass():
    gradients = ExampleGradients(
        module := nn.Sequential(nn.Linear(4, 2)), LayerTable.from_module(module)
    )
    assert gradients._stack.takes((torch.zeros(3, 4),), FlatClip(1.0))
    assert not gradients._stack.takes((torch.zeros(3, 5, 4),), FlatClip(1.0))
