"""The mechanisms that LaDP-FL is compared with: schedules, budgets, claims and what is proven about
them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms.mechanism import Mechanism
from fedlgm.papers.ladp import schedules
from fedlgm.papers.ladp.schedules import staircase
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import calibrate, composed_epsilon, epsilon, gaussian_epsilon
from fedlgm.privacy.accounting import calibrate_levels
from fedlgm.privacy.events import gaussian_event
from fedlgm.training import LocalTraining

LAYERS = LayerTable.from_sizes({"a": 40, "b": 200, "c": 10})
TRAINING = LocalTraining(lr=0.1, epochs=2, batch_size=50, gradient_clip=20.0)
SAMPLING = Sampling("poisson", 100, 0.1)
LOCAL = RunFacts(0.0, SAMPLING, "replace-one", "local", 40, 8.0, 1e-5, training=TRAINING)
MATCHED = replace(LOCAL, epsilon=0.2, delta=0.02)
NAMES = ("full-dp", "time-varying", "sensitive", "dpa", "adapldp")


def transcripts(mechanism: Mechanism, facts: RunFacts, rounds: int) -> list[Transcript]:
    """The transcripts before each of `rounds` rounds, with small constant updates."""
    layers = mechanism.table(LAYERS)
    found = [Transcript.start(torch.ones(LAYERS.size))]
    for _ in range(rounds - 1):
        plan = mechanism.plan(layers, facts, found[-1])
        mean = torch.full((plan.size,), 1e-3)
        found.append(found[-1].extend(found[-1].models[-1] + mean, mean, plan))
    return found


def plans(mechanism: Mechanism, facts: RunFacts, rounds: int) -> list[ReleasePlan]:
    layers = mechanism.table(LAYERS)
    return [mechanism.plan(layers, facts, t) for t in transcripts(mechanism, facts, rounds)]


def calibrated(mechanism: Mechanism, facts: RunFacts) -> RunFacts:
    """The facts with the multiplier that the mechanism asks for."""
    return facts.with_multiplier(mechanism.calibrate(facts))


def matched(name: str, rounds: int = 40, **options: object) -> tuple[Mechanism, RunFacts]:
    """A mechanism in the LaDP-FL paper's frame, with its calibrated facts."""
    mechanism = mechanisms.get(name, calibration="matched", **options)
    return mechanism, calibrated(mechanism, replace(MATCHED, rounds=rounds))


# -- equal total -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_spend_one_total_under_sampling(name: str) -> None:
    rounds = 12
    mechanism = mechanisms.get(name, bound=0.5)
    facts = RunFacts(0.0, SAMPLING, rounds=rounds, epsilon=8.0, delta=1e-3, accountant="rdp")
    made = plans(mechanism, calibrated(mechanism, facts), rounds)
    spent = composed_epsilon([(plan.event, 1) for plan in made], 1e-3, "rdp")
    assert 8.0 * (1 - 1e-5) <= spent <= 8.0
    assert all(plan.guarantee.status == "proven" and plan.claim is None for plan in made)
    if name != "full-dp":
        assert "econstruction" in made[0].guarantee.reason


@pytest.mark.parametrize("name", NAMES)
def test_all_spend_one_total_under_local_trust(name: str) -> None:
    """Whichever 10 of 40 rounds a client is drawn in, it stays within its budget; in the last 10 it
    reaches it."""
    rounds, cap = 40, 10
    mechanism = mechanisms.get(name)
    made = plans(
        mechanism,
        calibrated(mechanism, replace(LOCAL, rounds=rounds, max_participations=cap)),
        rounds,
    )
    last = composed_epsilon([(plan.event, 1) for plan in made[-cap:]], 1e-5)
    early = composed_epsilon([(plan.event, 1) for plan in made[:cap]], 1e-5)
    assert 8.0 * (1 - 1e-5) <= last <= 8.0
    assert early <= last + 1e-6


def test_no_more_than_the_least_noise_is_assumed() -> None:
    """Ten releases, all of the least noise, cost at least as much as any ten rounds of a
    schedule."""
    mechanism, flat = mechanisms.get("time-varying"), mechanisms.get("full-dp")
    few = [replace(LOCAL, rounds=rounds, max_participations=10) for rounds in (10, 40, 400)]
    noise = [mechanism.calibrate(facts) for facts in few]
    assert flat.calibrate(few[0]) >= noise[2] >= noise[1] > noise[0]


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(1.0, 5.0), min_size=1, max_size=8),
    st.floats(0.5, 10.0),
    st.sampled_from(["add-remove", "replace-one"]),
)
def test_unsampled_schedules_are_one_gaussian(
    shape: list[float], target: float, relation: str
) -> None:
    scale = calibrate_levels(Counter(shape), target, 1e-5, relation=relation)
    factor = 2.0 if relation == "replace-one" else 1.0
    mu = math.sqrt(sum((factor / (scale * level)) ** 2 for level in shape))
    assert target * (1 - 1e-5) <= gaussian_epsilon(mu, 1e-5) <= target


def test_levels_are_relative_and_must_make_sense() -> None:
    budget: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "accountant": "rdp"}
    scale = calibrate_levels({1.0: 5, 3.0: 5}, **budget)
    assert calibrate_levels({2.0: 5, 6.0: 5}, **budget) == pytest.approx(scale / 2, rel=1e-9)
    assert calibrate_levels({1.0: 10}, **budget) > scale > calibrate_levels({1.0: 5}, **budget)
    scale = calibrate_levels({2.0: 5, 6.0: 5}, draws=0.2, **budget) * 2
    events = [(gaussian_event(scale * level, 0.2), 5) for level in (1.0, 3.0)]
    assert 2.0 * (1 - 1e-5) <= composed_epsilon(events, 1e-5, "rdp") <= 2.0
    for wrong in ({}, {0.0: 1}, {-1.0: 1}, {math.nan: 1}, {math.inf: 1}, {1.0: 0}):
        with pytest.raises(
            ConfigError,
            match=r"level must be finite and positive|must be a whole number of at least 1, got 0",
        ):
            calibrate_levels(wrong, **budget)


def test_a_constant_schedule_is_the_plain_calibration() -> None:
    facts = RunFacts(0.0, SAMPLING, rounds=20, epsilon=4.0, delta=1e-5)
    plain = calibrate(
        4.0, 1e-5, steps=20, sampling_rate=0.1, relation="add-remove", accountant="pld"
    )
    assert mechanisms.get("full-dp").calibrate(facts) == plain


# -- the schedules -----------------------------------------------------------------------------------------------------


def test_time_varying_is_geometric() -> None:
    schedule = mechanisms.get("time-varying").schedule(40)
    np.testing.assert_allclose(schedule[1:] / schedule[:-1], 0.43 ** (1 / 39))
    assert schedule[-1] / schedule[0] == pytest.approx(0.43)


def test_dpa_minimises_the_weighted_error() -> None:
    """Known ends of the schedule, and no perturbation of equal budget does better."""
    rounds = 50
    g = math.exp(-4 * 0.446 / (rounds - 1))
    sigma2 = mechanisms.get("dpa").schedule(rounds) ** 2
    assert sigma2[0] / sigma2[-1] == pytest.approx(math.exp(2 * 0.446))
    sigma2 *= np.sum(1 / (2 * sigma2))  # sum of Delta^2 / (2 sigma_t^2) = rho = 1
    weights = g ** np.arange(rounds - 1, -1, -1)
    best = float(weights @ sigma2)
    rng = np.random.default_rng(0)
    for _ in range(100):
        other = sigma2 * np.exp(rng.normal(scale=0.05, size=rounds))
        other *= np.sum(1 / (2 * other))
        assert float(weights @ other) > best


@given(st.integers(1, 60), st.integers(1, 9), st.floats(0.1, 1.0))
def test_a_staircase_spends_what_its_schedule_does(rounds: int, levels: int, ratio: float) -> None:
    schedule = ratio ** np.linspace(-1, 0, rounds)
    steps = staircase(schedule, levels)
    assert steps.shape == (rounds,)
    assert len(np.unique(steps)) <= levels
    assert steps.min() == pytest.approx(1.0)
    assert (np.diff(steps) <= 1e-12).all()
    scale = math.sqrt(np.sum(schedule**-2.0) / np.sum(steps**-2.0))
    assert np.sum((steps / scale) ** -2.0) == pytest.approx(np.sum(schedule**-2.0))


@pytest.mark.slow
def test_matched_schedules_give_the_papers_excess_of_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """+57.3 % for Time-Varying and +26.04 % for DPA over Full DP, by the naive sum of q
    epsilon_t."""
    monkeypatch.setattr(schedules, "_LEVELS", 400)  # the schedule of the paper, not its staircase
    totals = {}
    for name in ("full-dp", "time-varying", "dpa", "adapldp", "sensitive"):
        mechanism, facts = matched(name, rounds=400)
        made = plans(mechanism, facts, 400)
        totals[name] = sum(plan.claim["epsilon"] for plan in made)
        start = made[0].sigma[0] * (1 if name != "sensitive" else math.sqrt(len(LAYERS)))
        assert start == pytest.approx(57.1064, abs=1e-3)  # all start at the noise of Full DP
    assert totals["full-dp"] == pytest.approx(0.1 * 400 * 0.2)  # q T epsilon
    assert totals["time-varying"] / totals["full-dp"] == pytest.approx(1.573, abs=0.005)
    assert totals["dpa"] / totals["full-dp"] == pytest.approx(1.2604, abs=0.005)
    assert totals["adapldp"] == totals["full-dp"]


# -- the matched frame -------------------------------------------------------------------------------------------------


def test_the_claim_is_not_what_is_proven() -> None:
    mechanism, facts = matched("full-dp")
    plan = plans(mechanism, facts, 1)[0]
    assert plan.clip.tolist() == [4.0]  # eta E G_c, half of Delta_f
    assert plan.guarantee.status == "proven"
    assert composed_epsilon([(plan.event, 40)], 1e-5) == pytest.approx(3.81, abs=0.02)
    assert 40 * plan.claim["epsilon"] == pytest.approx(0.8)


def test_the_matched_frame_is_checked() -> None:
    start = Transcript.start(torch.zeros(LAYERS.size))
    for name in NAMES:
        mechanism = mechanisms.get(name, calibration="matched")
        with pytest.raises(ConfigError, match="local"):
            mechanism.calibrate(replace(MATCHED, relation="add-remove", trust="central"))
        with pytest.raises(ConfigError, match="gradient_clip"):
            mechanism.calibrate(replace(MATCHED, training=LocalTraining()))
        with pytest.raises(PrivacyError, match="theorem3"):
            mechanism.calibrate(replace(MATCHED, delta=1e-5))
        with pytest.raises(ConfigError, match="no epsilon and delta"):
            mechanism.plan(
                mechanism.table(LAYERS), replace(MATCHED, noise_multiplier=1.0, epsilon=None), start
            )


# -- Sensitive DP, AdapLDP and options ---------------------------------------------------------------------------------


def test_sensitive_follows_released_norms_at_a_constant_cost() -> None:
    mechanism = mechanisms.get("sensitive", bound=0.6)
    facts = RunFacts(1e-3, SAMPLING)  # hardly any noise, so that norms show
    start = Transcript.start(torch.zeros(LAYERS.size))
    first = mechanism.plan(LAYERS, facts, start)
    largest = 0.6 / math.sqrt(3)
    np.testing.assert_allclose(first.clip, largest)
    mean = torch.zeros(LAYERS.size)
    for layer, norm in zip(LAYERS.split(mean), (1.0, 0.2, 0.0), strict=True):
        layer[0] = norm
    second = mechanism.plan(LAYERS, facts, start.extend(mean, mean, first))
    np.testing.assert_allclose(second.clip, [largest, 1.5 * 0.2, 0.1 * largest], rtol=1e-3)
    assert first.effective_multiplier == pytest.approx(second.effective_multiplier, rel=1e-8)
    assert first.effective_multiplier == pytest.approx(1e-3, rel=1e-8)


def test_adapldp_is_static_and_bounded_by_layer() -> None:
    mechanism = mechanisms.get("adapldp", bound=0.6)
    first, last = (plans(mechanism, RunFacts(1.0, SAMPLING, rounds=5), 5)[i] for i in (0, -1))
    assert first.to_json() == last.to_json()
    np.testing.assert_allclose(first.clip, 0.6 / math.sqrt(3))


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("full-dp", {"bound": 0.0}, "bound"),
        ("full-dp", {"calibration": "free"}, "equal-total, matched"),
        ("full-dp", {"constant": "theorem4"}, "theorem3, classical"),
        ("dpa", {"rate": 0.5}, "no option 'rate'"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        mechanisms.get(name, **options)


def test_unsampled_gaussians_compose_in_closed_form() -> None:
    assert epsilon(5.0, 1e-5, steps=10) == pytest.approx(2.5943834, abs=1e-6)
    assert epsilon(20.0, 1e-5, steps=100) == pytest.approx(1.9930914, abs=1e-6)
    events = [(gaussian_event(z), 3) for z in (4.0, 5.0, 6.0)]
    together = math.sqrt(sum(3 / z**2 for z in (4.0, 5.0, 6.0)))
    assert composed_epsilon(events, 1e-5) == gaussian_epsilon(together, 1e-5)
    # Beside a sampled release they still count.
    mixed = composed_epsilon([*events, (gaussian_event(2.0, 0.1), 5)], 1e-5)
    assert mixed > composed_epsilon(events, 1e-5)
