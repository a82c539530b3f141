"""A noisy vote chooses layers: what it costs, who wins, and that only winners are trained and
released afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import simulations
from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.extension.testing import check_mechanism
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.training.models.adapters import adapt

FACTS = RunFacts(1.5, Sampling("poisson", 100, 0.1))


def test_it_is_a_mechanism():
    check_mechanism(mechanisms.get("layer-vote"))
    check_mechanism(mechanisms.get("layer-vote", share=0.1, bound=2.0))


def after_the_vote(layers: LayerTable, votes: list[float], **options):
    """Plans of the first three rounds, the vote answered as given."""
    mechanism, transcript = (
        mechanisms.get("layer-vote", **options),
        Transcript.start(torch.zeros(layers.size)),
    )
    first = mechanism.plan(layers, FACTS, transcript)
    mean = torch.cat([torch.zeros(layers.size), torch.tensor(votes)])
    transcript = transcript.extend(torch.zeros(layers.size), mean, first)
    second = mechanism.plan(layers, FACTS, transcript)
    transcript = transcript.extend(torch.zeros(layers.size), torch.zeros(second.size), second)
    return first, second, mechanism.plan(layers, FACTS, transcript)


def test_every_round_costs_one_release_and_the_winners_stay():
    layers = LayerTable.from_sizes({"a": 4, "b": 40, "c": 9, "d": 1, "e": 7})
    first, second, third = after_the_vote(layers, [0.2, 0.9, -0.3, 0.8, 0.1], winners=2, share=0.3)
    assert [plan.effective_multiplier for plan in (first, second, third)] == pytest.approx(
        [1.5] * 3
    )
    assert (first.queries[0].query.bound / first.queries[0].sigma) ** 2 == pytest.approx(
        0.3 / 1.5**2
    )
    assert first.released.all()
    assert second.released.tolist() == third.released.tolist() == [False, True, False, True, False]
    assert (first.freezes, second.freezes) == (False, True)


def test_a_void_round_elects_nobody():
    layers, mechanism = LayerTable.from_sizes({"a": 4, "b": 40}), mechanisms.get("layer-vote")
    start = Transcript.start(torch.zeros(layers.size))
    first = mechanism.plan(layers, FACTS, start)
    void = start.extend(torch.zeros(layers.size), torch.zeros(first.size), first)
    assert mechanism.plan(layers, FACTS, void).equals(first)


def test_adapters_compete_and_the_new_head_is_always_released():
    model = adapt(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)), 2, ["0", "1"], also=["2"]
    )
    layers = LayerTable.from_module(model, "adapter")
    assert after_the_vote(layers, [0.1, 0.2, 5.0])[1].released.tolist() == [False, True, True]
    with pytest.raises(ConfigError, match="winners = 3 of only 2 layers that compete"):
        after_the_vote(layers, [0.0, 0.0, 0.0], winners=3)


@pytest.mark.parametrize("options", [{"winners": 0}, {"share": 1.0}, {"bound": 0.0}])
def test_an_option_outside_its_range_is_refused(options):
    with pytest.raises(ConfigError, match=f"layer-vote: {next(iter(options))} must"):
        mechanisms.get("layer-vote", **options)


def test_in_a_run_the_layer_with_the_longest_updates_wins(tmp_path):
    """Hardly any gradient reaches the first two layers, because the weights above them are
    small."""
    x = np.random.default_rng(0).standard_normal((400, 5)).astype(np.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for layer in (model[2], model[4]):
            layer.weight.mul_(1e-2)
    settings = {
        "federation.clients": 200,
        "federation.rounds": 3,
        "federation.rate": 0.5,
        "data.partition": "iid",
        "privacy.delta": 1e-3,
        "privacy.epsilon": 50,
        "privacy.accountant": "rdp",
        "run.seed": 1,
        "mechanism.group_by": "module",
    }
    data = {"train": (x, (x[:, 0] > 0).astype(int)), "test": (x, np.arange(400) % 2)}
    result = simulations.simulate(
        model=model,
        mechanism="layer-vote",
        data=data,
        overrides=settings,
        engine="local",
        run_dir=tmp_path / "run",
    )
    assert [row["released"] for row in result.history[1:]] == [3, 1, 1]
    assert [row["released"] for row in result.layers()] == [False, False, True]
    assert result.epsilon <= 50
