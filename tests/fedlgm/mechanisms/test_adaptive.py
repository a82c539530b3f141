"""The allocation that follows released outputs: its cost never moves, its shares move as derived,
slowly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.extension.testing import check_mechanism
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning import allocation
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript

LAYERS = LayerTable.from_sizes({"a": 40, "b": 400, "c": 9})
FACTS = RunFacts(1.5, Sampling("poisson", 100, 0.1))
MODEL = torch.cat([torch.full((n,), v) for n, v in ((40, 0.1), (400, 0.05), (9, 0.4))])


def released(
    mechanism: mechanisms.Mechanism, start: Transcript, means: list[torch.Tensor]
) -> list[ReleasePlan]:
    """The plans of len(means) + 1 rounds whose releases are `means`, added to the model."""
    transcript, plans = start, []
    for mean in means:
        plans.append(mechanism.plan(LAYERS, FACTS, transcript))
        transcript = transcript.extend(transcript.models[-1] + mean, mean, plans[-1])
    return [*plans, mechanism.plan(LAYERS, FACTS, transcript)]


@pytest.mark.parametrize("options", [{}, {"memory": 1.0}, {"memory": 0.0, "span": 1e6}])
def test_the_kit_passes_it(options: dict[str, Any]) -> None:
    check_mechanism(mechanisms.get("adaptive", **options))


@given(
    scales=st.lists(st.floats(0, 1e4, width=32), min_size=3, max_size=3),
    memory=st.floats(0, 1),
    span=st.floats(1, 100),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_no_release_changes_the_cost(
    scales: list[float], memory: float, span: float, seed: int
) -> None:
    """Whatever was released, zeros and huge updates included, every round costs one release of the
    run's multiplier."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.from_numpy(LAYERS.sizes)
    scale = torch.repeat_interleave(torch.tensor(scales, dtype=torch.float32), sizes)
    means = [torch.randn(LAYERS.size, generator=generator) * scale for _ in range(4)]
    mechanism = mechanisms.get("adaptive", bound=0.5, memory=memory, span=span)
    for plan in released(mechanism, Transcript.start(MODEL), means):
        assert plan.effective_multiplier == pytest.approx(FACTS.noise_multiplier, rel=1e-7)
        assert allocation.effective_multiplier(plan.clip, plan.sigma) == pytest.approx(
            1.5, rel=1e-12
        )
        assert np.linalg.norm(plan.clip) == pytest.approx(0.5, rel=1e-12)
        assert plan.released.all()
        assert plan.guarantee.status == "proven"
        assert np.ptp(np.log(plan.shares)) <= 2 * math.log(span) + 1e-9


def test_what_was_not_released_is_not_looked_at() -> None:
    """Equal models, means and plans give equal plans: nothing else, such as older models, has a
    say."""
    mechanism = mechanisms.get("adaptive")
    plan = mechanism.plan(LAYERS, FACTS, Transcript.start(MODEL))
    mean = torch.ones(LAYERS.size)
    one = Transcript(5, (MODEL * 3, MODEL), mean, plan)
    other = Transcript(9, (MODEL,), mean, plan)
    assert (
        mechanism.plan(LAYERS, FACTS, one).to_json()
        == mechanism.plan(LAYERS, FACTS, other).to_json()
    )


def test_equal_weights_are_the_uniform_rule() -> None:
    equal = mechanisms.get("adaptive").plan(
        LAYERS, FACTS, Transcript.start(torch.full((LAYERS.size,), 0.2))
    )
    assert equal.sigma == pytest.approx(
        mechanisms.get("uniform").plan(LAYERS, FACTS, Transcript.start(MODEL)).sigma
    )


def test_noise_is_in_proportion_to_the_weights() -> None:
    start = Transcript.start(MODEL)
    sigma = mechanisms.get("adaptive", span=100.0).plan(LAYERS, FACTS, start).sigma
    assert sigma / sigma[1] == pytest.approx([2, 1, 8], rel=1e-6)
    assert mechanisms.get("adaptive", span=1.0).plan(LAYERS, FACTS, start).sigma == pytest.approx(
        np.full(3, 1.5)
    )


def test_shares_move_by_the_memory() -> None:
    still = released(
        mechanisms.get("adaptive", memory=1.0), Transcript.start(MODEL), [MODEL * 5] * 3
    )
    assert all(plan.sigma == pytest.approx(still[0].sigma) for plan in still)
    grown = MODEL * torch.repeat_interleave(
        torch.tensor([3.0, 0.0, 0.0]), torch.from_numpy(LAYERS.sizes)
    )
    slow = released(
        mechanisms.get("adaptive", memory=0.9, span=100.0), Transcript.start(MODEL), [grown]
    )
    ratio = [plan.sigma[0] / plan.sigma[1] for plan in slow]
    assert ratio[1] / ratio[0] == pytest.approx(
        4**0.1, rel=1e-5
    )  # sigma goes with the weights, its log by a tenth


def test_noise_does_not_run_away() -> None:
    """500 rounds of noise alone, until the weights are noise: no layer has become much noisier than
    at first."""
    mechanism = mechanisms.get("adaptive", span=100.0, bound=5.0)
    transcript = Transcript.start(MODEL)
    plan = first = mechanism.plan(LAYERS, FACTS, transcript)
    for number in range(1, 500):
        total = release(
            torch.zeros(LAYERS.size, dtype=torch.float64), plan, KeyRing.from_seed(3), number
        )
        mean = (total / plan.denominator).float()
        transcript = transcript.extend(transcript.models[-1] + mean, mean, plan)
        plan = mechanism.plan(LAYERS, FACTS, transcript)
    assert LAYERS.norms(transcript.models[-1]).min() > 10 * LAYERS.norms(MODEL).max()
    assert np.abs(np.log(plan.sigma / first.sigma)).max() < 1


def test_a_checkpointed_plan_continues_alike() -> None:
    """What a resumed run knows, the plan's JSON, is all that the next plan needs."""
    mechanism = mechanisms.get("adaptive")
    plan = mechanism.plan(LAYERS, FACTS, Transcript.start(MODEL))
    stored = ReleasePlan.from_json(LAYERS, plan.to_json())
    mean = torch.ones(LAYERS.size)
    after = [
        mechanism.plan(LAYERS, FACTS, Transcript(1, (MODEL * 2,), mean, p)) for p in (plan, stored)
    ]
    assert after[0].to_json() == after[1].to_json()


def test_a_model_of_zeros_gets_equal_noise() -> None:
    plan = mechanisms.get("adaptive").plan(
        LAYERS, FACTS, Transcript.start(torch.zeros(LAYERS.size))
    )
    assert plan.shares == pytest.approx(np.full(3, 1 / 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 1.5}, "memory must lie in"),
        ({"span": 0.5}, "span must be finite and at least 1"),
        ({"bound": 0.0}, "bound must be finite and positive"),
    ],
)
def test_options_outside_their_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mechanisms.get("adaptive", **options)
