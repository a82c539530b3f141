"""Learning-rate schedules of the server's step."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.utils import parameters_to_vector

import simulations
from fedlgm.errors import ConfigError
from fedlgm.training.rates import factors
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from strategies import ServerOptimizer
from strategies.schedule import Scheduled

SHORT = [
    "federation.clients=10",
    "federation.rate=0.5",
    "federation.rounds=3",
    "privacy.delta=0.01",
    "privacy.accountant=rdp",
]
MODULE = """
def half(round, rounds):
    return 0.5

def negative(round, rounds):
    return 1 - round
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / "outside_schedule.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("outside_schedule", None)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "yogi"])
def test_a_schedule_is_that_optimizer_with_another_learning_rate_in_each_round(name):
    from strategies.server_optimizer import server_step

    given = factors("cosine", 5)
    scheduled = Scheduled(server_step(name, 0.2, 0.9), given)
    torch.manual_seed(0)
    model = other = torch.randn(6)
    state, made = {}, []
    for factor in given:
        mean = torch.randn(6)
        model = scheduled.step(model, mean)
        step = server_step(name, 0.2 * factor, 0.9)
        if state:
            step.restore(other, state)
        other = step.step(other, mean)
        state = step.state()
        made.append((model, other))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in made)


def test_an_interrupted_schedule_goes_on_where_it_was():
    first = Scheduled(ServerOptimizer("momentum", 1.0), factors("linear", 4))
    model = first.step(first.step(torch.zeros(2), torch.ones(2)), torch.ones(2))
    second = Scheduled(ServerOptimizer("momentum", 1.0), factors("linear", 4))
    second.restore(model, first.state())
    assert torch.equal(first.step(model, torch.ones(2)), second.step(model, torch.ones(2)))


def test_a_run_with_one_costs_the_same_and_half_the_rate_is_half_the_rate(outside, tmp_path):
    plain = simulations.simulate(
        overrides=[*SHORT, "federation.server_lr=0.1"], run_dir=tmp_path / "plain"
    )
    half = simulations.simulate(  # the recipe has 0.2
        overrides=[*SHORT, "federation.server_schedule=outside_schedule:half"],
        run_dir=tmp_path / "half",
    )
    assert half.epsilon == plain.epsilon
    start = Assembly(recipes.load("digits", SHORT)).model.module()
    begun, one, other = (
        parameters_to_vector(module.parameters()) for module in (start, plain.model(), half.model())
    )
    assert (one - other).norm() < 1e-3 * (
        one - begun
    ).norm()  # training amplifies the rounding of earlier steps


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("cosin", "unknown schedule 'cosin'; did you mean 'cosine'"),
        ("outside_schedule:negative", "returns -1 for round 2: a factor is at least 0"),
        ("outside_schedule:other", "has no 'other'"),
    ],
)
def test_what_is_no_schedule_is_refused_by_its_key(schedule, message, outside):
    recipe = recipes.load("digits", [*SHORT, f"federation.server_schedule={schedule}"])
    with pytest.raises(ConfigError, match=r"^federation.server_schedule: ") as refused:
        Assembly(recipe).model.server_optimizer()
    assert message in str(refused.value)
