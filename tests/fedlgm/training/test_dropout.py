"""What a model draws in training follows from the client's own stream, and is left out of
everything else."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, VectorizedTrainer, fastest
from fedlgm.training.devices import fork_rng
from fedlgm.training.tasks import Regression

WIDTH, RATE = 4000, 0.3
ONE_STEP = LocalTraining(lr=1.0, batch_size=1, epochs=1, optimizer="sgd", momentum=0.0)


class Functional(nn.Linear):
    """Linear, on inputs that lose units by a function and not by a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, RATE, self.training))


MODELS = {
    "a layer": lambda: nn.Sequential(nn.Dropout(RATE), nn.Linear(WIDTH, 1)),
    "a function": lambda: Functional(WIDTH, 1),
}


@pytest.fixture(params=MODELS)
def module(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]()


def client(seed: int, epochs: int = 1) -> ClientTask:
    return ClientTask(
        torch.ones(2, WIDTH), torch.full((2,), 5.0), torch.Generator().manual_seed(seed), epochs
    )


def updates(module: nn.Module, *seeds: int, settings: LocalTraining = ONE_STEP) -> list[Tensor]:
    layers = LayerTable.from_module(module)
    start = layers.flatten(module)
    trainer = SequentialTrainer(copy.deepcopy(module), layers, settings, task=Regression())
    return [
        update[0].clone() for update in trainer.updates(start, [client(seed) for seed in seeds])
    ]


def test_a_client_draws_the_same_again_whoever_was_trained_before(module: nn.Module) -> None:
    first, second, again = updates(module, 1, 2, 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    (alone,) = updates(module, 2)
    assert torch.equal(alone, second)


def test_as_many_units_are_dropped_as_asked_and_others_in_every_step(module: nn.Module) -> None:
    """A batch of one, so the gradient of a weight whose input was dropped is exactly 0."""
    layers = LayerTable.from_module(module)
    start = layers.flatten(module)
    trainer = SequentialTrainer(module, layers, ONE_STEP, task=Regression())
    one = ClientTask(
        torch.ones(1, WIDTH), torch.full((1,), 5.0), torch.Generator().manual_seed(7), 1
    )
    two = ClientTask(
        torch.ones(1, WIDTH), torch.full((1,), 5.0), torch.Generator().manual_seed(7), 2
    )
    kept = [next(iter(trainer.updates(start, [task])))[0, :WIDTH] != 0 for task in (one, two)]
    spread = math.sqrt(WIDTH * RATE * (1 - RATE))
    assert abs(int((~kept[0]).sum()) - WIDTH * RATE) < 5 * spread
    # After a second step only what both dropped is unchanged: RATE^2 of the units, were the masks
    # independent.
    assert abs(int((~kept[1]).sum()) - WIDTH * RATE**2) < 5 * math.sqrt(
        WIDTH * RATE**2 * (1 - RATE**2)
    )
    assert (
        abs(int((~kept[1]).sum()) - WIDTH * RATE) > 5 * spread
    )  # power: one mask for all steps is seen


def test_training_leaves_the_programs_own_random_numbers_alone(module: nn.Module) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    updates(module, 1)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(4)
    (one,) = updates(module, 1)
    torch.manual_seed(5)
    (other,) = updates(module, 1)
    assert torch.equal(one, other)


def test_seeded_restores_after_an_error() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()

    def fails() -> None:
        with fork_rng(1):
            raise LookupError(torch.rand(1))

    with pytest.raises(LookupError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)


def test_many_clients_at_once_are_refused_and_the_choice_is_one_after_another(
    module: nn.Module,
) -> None:
    layers = LayerTable.from_module(module)
    start = layers.flatten(module)

    def many() -> VectorizedTrainer:
        return VectorizedTrainer(module, layers, ONE_STEP, task=Regression())

    with pytest.raises(ConfigError, match=r"use training\.vectorize = 'off'"):
        list(many().updates(start, [client(1), client(2)]))
    made = {
        "sequential": lambda: SequentialTrainer(module, layers, ONE_STEP, task=Regression()),
        "vectorised": many,
    }
    assert fastest(made, start, lambda: [client(1), client(2)])[0] == "sequential"
