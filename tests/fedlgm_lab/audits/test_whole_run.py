"""Canaries in runs whose rounds are one mechanism: sound ones are nearly reached, other noise is
caught."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
import scipy.stats
import torch

from fedlgm import mechanisms, privacy
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.method import Method
from fedlgm.noise import correlation
from fedlgm.noise.correlation.stream import CorrelatedStream
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning import charging
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits import Audit, Canaries, CanaryRecord, Reported, Subject, audit_record
from fedlgm_lab.audits.whole_run import View, run_epsilon

SIZES = {"a": 40, "b": 600, "c": 160}
LAYERS = LayerTable.from_sizes(SIZES)
ROUNDS, GROUPS = 12, 4
CYCLIC = Sampling("cyclic", 40, 1 / GROUPS, GROUPS)
NOISES = {
    "banded": {"bands": GROUPS},
    "square-root": {"bands": 3},
    "blt": {"buffers": 2, "min_separation": GROUPS},
}


@lru_cache(maxsize=32)
def subject(
    noise: str | None = "banded",
    sampling: Sampling = CYCLIC,
    relation: str = "add-remove",
    **options,
):
    """A run over twelve rounds at epsilon 8."""
    facts = RunFacts(
        0.0, sampling, relation, rounds=ROUNDS, epsilon=8.0, delta=1e-5,
        noise=None if noise is None else correlation.get(noise, ROUNDS, **NOISES[noise]),
    )  # fmt: skip
    mechanism = mechanisms.get(options.pop("name", "snr-consistent"), **options)
    return Subject("run", Method.calibrate(mechanism, mechanism.table(LAYERS), facts))


def sound(of: Subject, keys: KeyRing):
    run_noise = RunNoise()
    return lambda plan, total, round: release(total, plan, keys, round, run_noise=run_noise)


def watched(of: Subject, publisher=sound, *, count: int = 400, seed: int = 0) -> CanaryRecord:
    """A run of `of` in which what `publisher` makes turns bounded sums into noisy ones."""
    publish = publisher(of, KeyRing(2 * seed))
    canaries = Canaries(of.layers, count, KeyRing(2 * seed + 1))
    for round_ in range(1, of.facts.rounds + 1):
        plan = dataclasses.replace(of.method.plan(of.start), position=round_ - 1)
        block = BoundedSum.empty(plan)
        block.add(torch.ones(3, of.layers.size))
        total = block.total
        canaries.insert(round_, plan, total)
        canaries.observe(round_, plan, publish(plan, total, round_))
    return canaries.record()


def audited(of: Subject, record: CanaryRecord, **options):
    plan = of.method.plan(of.start)
    reported = Reported(
        of.name,
        of.reported_epsilon(plan),
        of.delta,
        of.multipliers(plan),
        relation=of.facts.relation,
        run=charging.of(plan.facts).run,
    )
    return audit_record(record, of.layers, reported, **options)


CASES = [
    *((noise, CYCLIC, "add-remove") for noise in (*NOISES, None)),
    ("banded", CYCLIC, "replace-one"),
    ("banded", Sampling("min-separation", 40, 1 / GROUPS, GROUPS), "zero-out"),
    ("banded", Sampling("grouped-poisson", 40, 0.2, GROUPS), "add-remove"),
]


@pytest.mark.parametrize(("noise", "sampling", "relation"), CASES)
def test_a_sound_run_is_nearly_reached_and_not_exceeded(noise, sampling, relation):
    of = subject(noise, sampling, relation)
    result = audited(of, watched(of, count=800))
    assert result.passed, result
    assert result.epsilon_reported == pytest.approx(8.0, rel=1e-3)
    assert 0.7 * result.epsilon_reported < result.epsilon_lower <= result.epsilon_reported
    assert result.observations == 800 * ROUNDS
    assert all(
        0 < row.epsilon_lower < row.epsilon_planned < result.epsilon_reported
        for row in result.layers
    )


@pytest.mark.parametrize(("noise", "sampling", "relation"), CASES)
def test_the_planned_run_costs_what_is_reported(noise, sampling, relation):
    """The canaries' best pattern reaches the sensitivity that the accountant uses."""
    of = subject(noise, sampling, relation)
    plan = of.method.plan(of.start)
    shown = run_epsilon(charging.of(plan.facts).run, 1 / of.multipliers(plan), 1.0, of.delta)
    assert 0.9999 * of.reported_epsilon(plan) < shown <= of.reported_epsilon(plan)
    assert (
        run_epsilon(charging.of(plan.facts).run, 1 / of.multipliers(plan), 2.0, of.delta)
        > 2 * shown
    )


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["banded", "blt"])
def test_false_alarms_over_many_runs(noise):
    of, audits = subject(noise), 300
    failed = sum(
        not audited(of, watched(of, count=40, seed=seed), confidence=0.8).passed
        for seed in range(audits)
    )
    assert failed <= scipy.stats.binom.isf(1e-3, audits, 0.2)
    assert failed >= audits * 0.2 / 8


@pytest.mark.parametrize("noise", [*NOISES, None])
def test_what_canaries_see_is_as_planned(noise):
    """Mean and variance of the whitened sums: a wrong schedule or a wrong whitening would show in
    either."""
    of = subject(noise)
    record = watched(of, count=800, seed=3)
    view = View.of(record, charging.of(of.method.plan(of.start).facts).run)
    for error in (
        view.sums - view.planned_sums,
        (view.seen - view.planned)[view.known.all(axis=1)].ravel(),
    ):
        assert abs(error.mean()) < 5 / np.sqrt(error.size)
        assert error.var() == pytest.approx(1, abs=6 * np.sqrt(2 / min(error.size, 100 * ROUNDS)))
    turns = (record.orientation != 0).sum(axis=0)
    assert set(turns) == {ROUNDS // GROUPS}
    gaps = {int(gap) for column in record.orientation.T for gap in np.diff(np.flatnonzero(column))}
    assert gaps == {GROUPS}
    assert 0.4 < (view.signs > 0).mean() < 0.6


def halved(of: Subject, keys: KeyRing):
    publish = sound(of, keys)
    return lambda plan, total, round: (publish(plan, total.clone(), round) + total) / 2


def independent(of: Subject, keys: KeyRing, std: np.ndarray | None = None):
    """Fresh noise of the planned scale in every round, which nothing of later rounds takes back."""
    std = np.ones(ROUNDS) if std is None else std

    def publish(plan, total, round):
        rng = np.random.default_rng([keys.root % 2**32, round])
        scale = np.concatenate([np.full(part.size, part.sigma) for part in plan.parts])
        return total + torch.from_numpy(std[round - 1] * scale * rng.standard_normal(plan.size))

    return publish


def independent_of_the_rounds_own_size(of: Subject, keys: KeyRing):
    return independent(of, keys, charging.of(of.method.plan(of.start).facts).run.noise_std)


def with_other_bands(bands: int):
    def publisher(of: Subject, keys: KeyRing):
        stream = CorrelatedStream(correlation.get("banded", ROUNDS, bands=bands), LAYERS.size)
        rng = np.random.default_rng(keys.root % 2**32)

        def publish(plan, total, round):
            scale = np.concatenate([np.full(part.size, part.sigma) for part in plan.parts])
            w = stream.next(torch.from_numpy(rng.standard_normal(plan.size)))
            return total + torch.from_numpy(scale) * w

        return publish

    publisher.__name__ = f"with_{bands}_bands"
    return publisher


def one_z_for_all_rounds(of: Subject, keys: KeyRing):
    stream = CorrelatedStream(of.facts.noise, LAYERS.size)
    z = np.random.default_rng(5).standard_normal(LAYERS.size)

    def publish(plan, total, round):
        scale = np.concatenate([np.full(part.size, part.sigma) for part in plan.parts])
        return total + torch.from_numpy(scale) * stream.next(torch.from_numpy(z.copy()))

    return publish


def a_layer_with_less(of: Subject, keys: KeyRing):
    publish = sound(of, keys)

    def less(plan, total, round):
        noise = publish(plan, torch.zeros_like(total), round)
        noise[: SIZES["a"]] *= 0.6
        return total + noise

    return less


BUGS = {
    halved: "noise scale",
    independent: "noise independence",
    independent_of_the_rounds_own_size: "noise independence",
    with_other_bands(2): "noise independence",
    with_other_bands(3): "noise independence",
    with_other_bands(8): "noise independence",
    one_z_for_all_rounds: "noise independence",
    a_layer_with_less: "noise scale",
}


@pytest.mark.parametrize(
    ("publisher", "check"), BUGS.items(), ids=lambda x: getattr(x, "__name__", x)
)
@pytest.mark.parametrize("count", [40, 400])
def test_noise_that_is_not_as_planned_is_caught(publisher, check, count):
    of = subject()
    result = audited(of, watched(of, publisher, count=count))
    assert not result.passed
    assert check in [row.name for row in result.checks if not row.passed]


def test_less_noise_than_reported_exceeds_it():
    of = subject()
    assert audited(of, watched(of, halved)).exceeded


def test_noise_made_by_another_strategy_is_bounded_by_what_it_really_protects():
    """Independent noise of that scale protects as well where columns have norm 1: it fails by the
    check alone."""
    of = subject()
    result = audited(of, watched(of, independent))
    assert not result.exceeded
    assert result.epsilon_lower > 1


def test_bounds_in_the_wrong_norm_are_caught():
    """Every layer is cut to S alone, where the noise is made for S in all layers together."""
    of = subject(name="uniform")
    keys, run_noise, canaries = KeyRing(2), RunNoise(), Canaries(LAYERS, 400, KeyRing(1))
    for round_ in range(1, ROUNDS + 1):
        plan = dataclasses.replace(of.method.plan(of.start), position=round_ - 1)
        total = torch.zeros(plan.size, dtype=torch.float64)
        canaries.insert(round_, plan, total)
        total *= np.sqrt(len(LAYERS))
        canaries.observe(round_, plan, release(total, plan, keys, round_, run_noise=run_noise))
    found = audited(of, canaries.record())
    assert (
        not found.passed
    )  # more of a canary than planned comes back in each of its turns, as noise would
    assert found.epsilon_lower > 0.9 * found.epsilon_reported


def test_interrupted_runs_and_pausing_layers():
    """What was seen before an interruption still counts; a layer that pauses is left out as long as
    that reaches."""
    of = subject()
    publish = sound(of, KeyRing(0))
    canaries, rows = Canaries(of.layers, 400, KeyRing(1)), []
    for round_ in range(1, ROUNDS + 1):
        plan = dataclasses.replace(of.method.plan(of.start), position=round_ - 1)
        if round_ == 3:  # nothing of the second layer leaves in this round
            released = np.array([True, False, True])
            sigma = np.where(released, plan.sigma, np.inf)
            plan = dataclasses.replace(plan, released=released, sigma=sigma, notes={})
        if round_ == 7:
            rows, canaries = canaries.rows, Canaries(of.layers, 400, KeyRing(1))
        total = torch.zeros(plan.size, dtype=torch.float64)
        canaries.insert(round_, plan, total)
        canaries.observe(round_, plan, publish(plan, total, round_))
    record = CanaryRecord.of([*rows, *canaries.rows], np.zeros(0, dtype=bool))
    assert np.isnan(record.energy[6:9]).all()
    assert np.isnan(record.energy[2:6, 1]).all()
    assert np.isfinite(record.energy[:6, 0]).all()
    result = audited(of, record)
    assert result.passed
    assert result.epsilon_lower > 0.5 * result.epsilon_reported


def test_the_audit_of_a_mechanism_in_such_a_run():
    of = subject()
    result = Audit(seed=0, canaries=300).mechanism(of)
    assert result.passed
    assert {check.name for check in result.checks} == {
        "whitened sensitivity",
        "plan purity",
        "noise scale",
        "noise independence",
        "noise repetition",
        "noise law",
    }
    assert 0.6 * result.epsilon_reported < result.epsilon_lower <= result.epsilon_reported
    probed = Audit(method="probe").mechanism(of)
    assert probed.passed
    assert 0.98 * probed.epsilon_reported < probed.epsilon_lower <= probed.epsilon_reported
    for method in ("distinguisher", "one-run"):
        with pytest.raises(ConfigError, match="one mechanism"):
            Audit(method=method).mechanism(of)


def test_amplified_runs_are_composed_of_sampled_releases():
    of = subject("banded", Sampling("grouped-poisson", 40, 0.2, GROUPS))
    run, multiplier = charging.of(of.method.plan(of.start).facts).run, of.facts.noise_multiplier
    one = privacy.events.gaussian_event(multiplier / run.growth, run.sampling.within_group)
    exact = privacy.accounting.composed_epsilon([(one, ROUNDS // GROUPS)], 1e-5)
    assert run_epsilon(run, np.full(1, 1 / multiplier), 1.0, 1e-5) == pytest.approx(exact, rel=1e-5)
