"""Canaries in a run: what they show of sound releases, and that they catch releases that are not as
planned."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
import torch

from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits import Canaries, CanaryRecord, Reported, Subject, audit_record
from fedlgm_lab.audits.canaries import canary_count, check_auditable
from fedlgm_lab.audits.one_run import epsilon_at_ratio, release_ratio, run_scores

SIZES = {"a": 40, "b": 600, "c": 160}
LAYERS = LayerTable.from_sizes(SIZES)


def subject(rounds: int = 4, name: str = "snr-consistent", **options) -> Subject:
    return Subject.of(name, rounds=rounds, layers=LAYERS, **options)


def sampled(**options) -> Subject:
    """Two rounds at rate 1/2 with a given noise multiplier: calibrating sampled releases takes its
    time."""
    mechanism = mechanisms.get("snr-consistent", **options)
    facts = RunFacts(1.0, Sampling("poisson", 20, 0.5), rounds=2, epsilon=8.0, delta=1e-5)
    return Subject("sampled", Method(mechanism, LAYERS, facts))


def sound(plan: ReleasePlan, total: torch.Tensor, keys: KeyRing, round: int) -> torch.Tensor:
    return release(total, plan, keys, round)


def watched(
    of: Subject, publish=sound, *, count: int = 400, seed: int = 0, presence: str = "release"
) -> CanaryRecord:
    """A run of `of` in which `publish` turns bounded sums into noisy ones."""
    keys = KeyRing.from_seed(seed)
    canaries = Canaries(
        of.layers, count, KeyRing(seed + 10**6), presence=presence, rate=of.facts.sampling.rate
    )
    for round_ in range(1, of.facts.rounds + 1):
        plan = of.method.plan(of.start)
        block = BoundedSum.empty(plan)
        block.add(torch.ones(3, of.layers.size))
        total = block.total
        canaries.insert(round_, plan, total)
        noisy = publish(plan, total.clone(), keys, round_)
        canaries.observe(round_, plan, noisy)
    return canaries.record()


def audited(of: Subject, record: CanaryRecord, **options):
    plan = of.method.plan(of.start)
    reported = Reported(
        of.name,
        of.reported_epsilon(plan),
        of.delta,
        of.multipliers(plan),
        of.facts.sampling.rate,
        of.facts.relation,
    )
    return audit_record(record, of.layers, reported, **options)


@pytest.mark.parametrize("epsilon", [4.0, 8.0])
@pytest.mark.parametrize("name", ["gaussian", "snr-consistent"])
def test_a_sound_run_is_nearly_reached_and_not_exceeded(name, epsilon):
    of = subject(name=name, epsilon=epsilon)
    result = audited(of, watched(of, count=800))
    assert result.passed
    assert 0.7 * result.epsilon_reported < result.epsilon_lower <= result.epsilon_reported
    assert all(row.epsilon_lower <= row.epsilon_planned for row in result.layers)


def test_sampled_runs_and_auxiliary_queries():
    of = sampled(clip="med", norms="quantile")
    result = audited(of, watched(of), per_layer=False)
    assert result.passed
    assert result.epsilon_lower > 0.6 * result.epsilon_reported


@pytest.mark.parametrize("audits", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_false_alarms_over_many_audits(audits):
    """The bound's own level, on releases that are exactly as planned: not above it, and not idle
    either."""
    of, confidence = subject(rounds=1), 0.95
    plan = of.method.plan(of.start)
    keys, above = KeyRing.from_seed(1), 0
    for number in range(audits):
        canaries = Canaries(of.layers, 24, KeyRing(number))
        total = torch.zeros(plan.size, dtype=torch.float64)
        canaries.insert(1, plan, total)
        canaries.observe(1, plan, release(total, plan, keys, number + 1))
        above += release_ratio(canaries.record(), of.layers, confidence) > 1
    assert above < scipy.stats.binom.isf(1e-3, audits, 1 - confidence)
    assert above > audits * (1 - confidence) / 3


def half_noise(plan, total, keys, round):
    return total + release(torch.zeros_like(total), plan, keys, round) / 2


def reused_noise(plan, total, keys, round):
    return total + release(torch.zeros_like(total), plan, keys, 1)


def one_generator_for_all_layers(plan, total, keys, round):
    """Every layer's noise is the same sequence at its own scale."""
    noise = np.random.default_rng(round).standard_normal(max(SIZES.values()))
    scaled = np.concatenate([sigma * noise[:size] for _, size, _, sigma in plan.parts])
    return total + torch.from_numpy(scaled)


def a_layer_without_noise(plan, total, keys, round):
    noise = release(torch.zeros_like(total), plan, keys, round)
    noise[: SIZES["a"]] *= 1e-3
    return total + noise


@pytest.mark.parametrize("publish", [half_noise, a_layer_without_noise])
def test_too_little_noise_is_caught(publish):
    of = subject()
    result = audited(of, watched(of, publish))
    assert not result.passed
    assert result.epsilon_lower > result.epsilon_reported


@pytest.mark.parametrize("publish", [reused_noise, one_generator_for_all_layers])
def test_noise_that_comes_back_is_caught(publish):
    of = subject()
    result = audited(of, watched(of, publish))
    assert "noise repetition" in [check.name for check in result.checks if not check.passed]


def test_a_small_layer_with_too_little_noise_is_caught_by_its_scale():
    def little(plan, total, keys, round):
        noise = release(torch.zeros_like(total), plan, keys, round)
        noise[: SIZES["a"]] *= 0.6
        return total + noise

    of = subject(rounds=8)
    result = audited(of, watched(of, little))
    failed = {check.name: check.detail for check in result.checks if not check.passed}
    assert "noise scale" in failed
    assert "least in a" in failed["noise scale"]
    assert not result.passed


def test_bounds_in_the_wrong_norm_are_caught():
    """Every layer is cut to S alone, where the noise is made for S in all layers together."""
    of = subject(name="uniform")
    plan = of.method.plan(of.start)
    wide = ReleasePlan(
        plan.layers, plan.clip * math.sqrt(len(LAYERS)), plan.sigma, plan.facts, plan.guarantee
    )
    canaries = Canaries(of.layers, 400, KeyRing(1))
    keys = KeyRing(2)
    for round_ in range(1, of.facts.rounds + 1):
        total = torch.zeros(plan.size, dtype=torch.float64)
        canaries.insert(round_, wide, total)
        canaries.observe(round_, plan, release(total, plan, keys, round_))
    assert audited(of, canaries.record()).exceeded


@pytest.mark.parametrize(
    ("rounds", "rate", "multiplier"), [(100, 0.1, 1.2), (3, 0.5, 0.6), (2000, 0.02, 0.9)]
)
def test_the_quick_accountant_errs_on_the_low_side(rounds, rate, multiplier):
    reported = Reported("", 8.0, 1e-5, np.full(rounds, multiplier), rate)
    exact, quick = (
        epsilon_at_ratio(reported, 1 / reported.multipliers, 0.9, quick=quick)
        for quick in (False, True)
    )
    assert 0.998 * exact < quick < exact


def test_methods_for_the_run_as_a_whole():
    of = subject(epsilon=8.0)
    record = watched(of, count=200, presence="run")
    assert 0.2 < audited(of, record, method="one-run", confidence=0.95).epsilon_lower < 8.0
    scores = run_scores(record)
    assert scores.inside.mean() > scores.outside.mean()
    with pytest.raises(ConfigError, match="coin for each round"):
        audited(of, watched(of), method="one-run")
    with pytest.raises(ConfigError, match="needs at least 64"):
        audited(of, watched(of, count=8, presence="run"), method="one-run")


def test_the_clients_part_of_the_sum_is_left_as_it_is():
    of = subject()
    plan = of.method.plan(of.start)
    clients = torch.randn(plan.size, dtype=torch.float64)
    total = clients.clone()
    canaries = Canaries(of.layers, 30, KeyRing(0))
    canaries.insert(1, plan, total)
    added = total - clients
    canaries.observe(1, plan, total)
    row = canaries.rows[0]
    present = np.flatnonzero(row["signs"])
    assert 20 < len(present) < 30
    reached = [float(part.norm()) for part in LAYERS.split(added)]
    assert reached == pytest.approx(plan.clip * math.sqrt(len(present)), rel=0.5)
    record = canaries.record()
    aligned, signal = record.aligned[0], record.signal[0]
    assert aligned[present] * row["signs"][present] == pytest.approx(signal, rel=1e-3)
    absent = np.flatnonzero(row["signs"] == 0)
    assert np.abs(aligned[absent]).max() < 1e-3 * signal
    directions = LAYERS.split(added / torch.from_numpy(plan.clip.repeat(LAYERS.sizes)))
    assert row["length"] == pytest.approx(
        [float(part.square().sum()) for part in directions], rel=1e-4
    )


def test_stored_rows_make_the_same_record():
    of = subject()
    record = watched(of, count=10)
    rows = [
        {
            field.name: np.asarray(getattr(record, field.name)[t]).tolist()
            for field in dataclasses.fields(record)
            if field.name not in ("member", "rate", "presence")
        }
        for t in range(4)
    ]
    again = CanaryRecord.of(rows, record.member)
    assert release_ratio(again, LAYERS) == release_ratio(record, LAYERS)
    with pytest.raises(ConfigError, match="nothing to audit"):
        CanaryRecord.of([], record.member)
    with pytest.raises(ConfigError, match="damaged"):
        CanaryRecord.of([{"aligned": [1.0]}], record.member)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("laplace-inid", {"epsilon": 1.0}, "Gaussian noise"),
        ("none", {}, "no noise"),
        ("ladp", {"threshold": 1e9}, "nothing"),
    ],
)
def test_releases_that_canaries_do_not_fit(name, options, message):
    of = Subject.of(name, rounds=1, layers=LAYERS, **options)
    with pytest.raises(ConfigError, match=message):
        check_auditable(of.method.plan(of.start))


def test_numbers_of_canaries():
    assert canary_count(2410, 100) == 30
    assert canary_count(2410, 1) == 128
    assert canary_count(11_000_000, 100) == 2
    with pytest.raises(ConfigError, match="at least 2"):
        Canaries(LAYERS, 1, KeyRing(0))
    of, canaries = subject(), Canaries(LAYERS, 4, KeyRing(0))
    with pytest.raises(ValueError, match="without insert"):
        canaries.observe(1, of.method.plan(of.start), torch.zeros(800))
