"""Every task, and inputs of every kind, through both trainers: against the loop that anybody would
write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import (
    ClientTask,
    LocalTraining,
    SequentialTrainer,
    VectorizedTrainer,
    fastest,
    inputs,
    models,
    tasks,
)
from fedlgm.training.inputs import Inputs
from fedlgm.training.stack import Stack

SIZES = (7, 3, 1)  # unequal clients: partial batches, a client with a single example
SETTINGS = LocalTraining("sgd", lr=0.1, momentum=0.5, epochs=2, batch_size=3)
VOCABULARY, LENGTH = 11, 6


class TwoInputs(nn.Module):
    """Tokens and numbers, a constant buffer, a frozen and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.frozen = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.tied, self.outputs = nn.Linear(4, 4), nn.Linear(7, 1)
        self.tied2 = self.tied
        self.register_buffer("weights", torch.linspace(0, 1, LENGTH))

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        seen = (self.embedding(tokens) * self.weights[:, None]).sum(1)
        return self.outputs(
            torch.cat([self.tied2(torch.tanh(self.tied(self.frozen(seen)))), numbers], dim=1)
        )


class Quartic(tasks.Task):
    """A task without a closed form; small enough that steps do not overshoot, which would amplify
    rounding."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).pow(4) / 40


def numbers(draw: torch.Generator, count: int) -> Inputs:
    return torch.randn(count, 5, generator=draw)


def series(draw: torch.Generator, count: int) -> Inputs:
    return torch.randn(count, 4, 5, generator=draw)


def tokens(draw: torch.Generator, count: int) -> Inputs:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=draw)


def both(draw: torch.Generator, count: int) -> Inputs:
    return tokens(draw, count), torch.randn(count, 3, generator=draw)  # type: ignore[return-value]


def real(draw: torch.Generator, count: int) -> Tensor:
    return torch.randn(count, generator=draw)


def labels(draw: torch.Generator, count: int) -> Tensor:
    return (torch.randn(count, 3, generator=draw) > 0).float()


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs))


CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "regression on a stack": (lambda: mlp(1), "regression", numbers, real),
    "several labels on a stack": (lambda: mlp(3), "multi-label", numbers, labels),
    "own task on a stack": (lambda: mlp(1), Quartic(), numbers, real),
    "gru": (
        lambda: models.build(
            "gru", in_shape=(LENGTH,), classes=VOCABULARY, width=4, hidden=5, layers=2
        ),
        "next-token",
        tokens,
        tokens,
    ),
    "transformer": (
        lambda: models.build("transformer", in_shape=(LENGTH,), classes=VOCABULARY, width=8),
        "next-token",
        tokens,
        tokens,
    ),
    "several inputs": (TwoInputs, "regression", both, real),
}


def federation(case: str) -> tuple[nn.Module, LayerTable, tasks.Task, list[ClientTask]]:
    make, task, x_of, y_of = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = make()
    draw = torch.Generator().manual_seed(5)
    clients = [
        ClientTask(
            x_of(draw, size),
            y_of(draw, size),
            torch.Generator().manual_seed(client),
            SETTINGS.epochs,
        )
        for client, size in enumerate(SIZES)
    ]
    return module, LayerTable.from_module(module), tasks.get(task), clients


def afresh(clients: list[ClientTask]) -> list[ClientTask]:
    return [
        ClientTask(c.x, c.y, torch.Generator().manual_seed(i), c.epochs)
        for i, c in enumerate(clients)
    ]


def loop(
    module: nn.Module, layers: LayerTable, task: tasks.Task, clients: list[ClientTask]
) -> Tensor:
    rows = []
    for client in clients:
        local = copy.deepcopy(module)
        trained = [p for p in local.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=SETTINGS.lr, momentum=SETTINGS.momentum)
        for order in client.permutations():
            for batch in order.split(SETTINGS.batch_size):
                optimizer.zero_grad()
                outputs = inputs.call(local, inputs.take(client.x, batch))
                task.losses(outputs, client.y[batch]).mean().backward()
                optimizer.step()
        rows.append(layers.flatten(local) - layers.flatten(module))
    return torch.stack(rows)


@pytest.mark.parametrize("trainer", [SequentialTrainer, VectorizedTrainer])
@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_a_plain_loop(case: str, trainer: type) -> None:
    module, layers, task, clients = federation(case)
    expected = loop(module, layers, task, clients)
    start = layers.flatten(module)
    trained = trainer(copy.deepcopy(module), layers, SETTINGS, task=task)
    updates = torch.cat([update.clone() for update in trained.updates(start, afresh(clients))])
    size = float(expected.abs().max())
    assert 0.01 < size < 2
    # Six steps of float32 sums of a few terms: rounding is some 2^-20 of the largest number,
    # whatever adds it up.
    torch.testing.assert_close(updates, expected, rtol=0, atol=2.0**-16 * size)


@pytest.mark.parametrize(
    "case", ["regression on a stack", "several labels on a stack", "own task on a stack"]
)
def test_plain_stacks_are_differentiated_without_autograd_whatever_the_task(case: str) -> None:
    module, layers, task, clients = federation(case)
    trainer = SequentialTrainer(module, layers, SETTINGS, task=task)
    assert isinstance(trainer._stack_for(clients[0].x), Stack)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Sequential(nn.Linear(5, 2)), torch.zeros(3, 4, 5)),  # linear layers along a series
        (nn.Sequential(nn.Linear(5, 2)), torch.zeros(3, 5, dtype=torch.float64)),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(20, 2), nn.Tanh(), nn.Conv2d(1, 1, 1)),
            torch.zeros(3, 4, 5),
        ),
        (nn.Sequential(nn.Conv2d(1, 2, 1)), torch.zeros(3, 1, 2, 2)),  # outputs that are images
        (nn.Sequential(nn.Linear(5, 2)), (torch.zeros(3, 5),)),
    ],
)
def test_a_stack_leaves_to_autograd_what_it_does_not_know(module: nn.Module, x: Inputs) -> None:
    gradients = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    stack = Stack.of(module, gradients, tasks.Regression())
    assert stack is not None
    assert not stack.takes(x)


def test_a_series_through_linear_layers_is_trained_by_autograd() -> None:
    module = nn.Sequential(nn.Linear(5, 2))
    layers = LayerTable.from_module(module)
    draw = torch.Generator().manual_seed(1)
    client = ClientTask(series(draw, 4), torch.randn(4, 4, 2, generator=draw), torch.Generator(), 1)
    start = layers.flatten(module)
    one = next(
        SequentialTrainer(copy.deepcopy(module), layers, SETTINGS, task=tasks.Regression()).updates(
            start, [client]
        )
    )
    again = ClientTask(client.x, client.y, torch.Generator(), 1)
    many = next(
        VectorizedTrainer(module, layers, SETTINGS, task=tasks.Regression()).updates(start, [again])
    )
    torch.testing.assert_close(one, many)


class Counting(nn.Module):
    """Keeps something in a buffer in the given way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(5, 1), how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen.add_(1)
        elif self.how == "replaced":
            self.seen = self.seen + 1
        return self.linear(x) * (1 + 0 * self.seen)


@pytest.mark.parametrize("trainer", [SequentialTrainer, VectorizedTrainer])
@pytest.mark.parametrize("how", ["in place", "replaced", "never"])
def test_buffers_may_stay_but_not_change(how: str, trainer: type) -> None:
    module = Counting(how)
    layers = LayerTable.from_module(module)
    clients = [ClientTask(torch.ones(4, 5), torch.ones(4), torch.Generator(), 1)]
    updates = trainer(module, layers, SETTINGS, task=tasks.Regression()).updates(
        layers.flatten(module), clients
    )
    if how == "never":
        assert len(list(updates)) == 1
    else:
        with pytest.raises(
            ConfigError,
            match=r"buffer 'seen' would follow private data .* GroupNorm|mutate a captured",
        ):
            list(updates)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.sum()) > 0 else self.linear(-x)


def test_a_model_that_cannot_be_vectorised_is_refused_with_the_remedy_and_auto_passes_over_it() -> (
    None
):
    module = Branching()
    layers = LayerTable.from_module(module)
    start = layers.flatten(module)

    def clients() -> list[ClientTask]:
        return [ClientTask(torch.ones(4, 5), torch.ones(4), torch.Generator(), 1)]

    makers = {
        "one": lambda: SequentialTrainer(Branching(), layers, SETTINGS, task=tasks.Regression()),
        "many": lambda: VectorizedTrainer(module, layers, SETTINGS, task=tasks.Regression()),
    }
    with pytest.raises(
        ConfigError, match=r"(?s)use training.vectorize = 'off'.*: RuntimeError: vmap"
    ):
        list(makers["many"]().updates(start, clients()))
    winner, seconds = fastest(makers, start, clients)
    assert winner == "one"
    assert list(seconds) == ["one"]
