"""Bounds on attacks: known answers, closed forms, and the optimal test in simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedlgm.errors import ConfigError
from fedlgm.privacy import AttackRates, Ledger, attack_rates, composed_epsilon
from fedlgm.privacy.accountants import deltas_of
from fedlgm.privacy.accounting import compose
from fedlgm.privacy.events import WholeOrdersDpEvent, gaussian_event, pure_event, repeat_event


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "advantage", "tprs", "mu"),
    [
        (0.9359, 0.1, 100, 0.472, (0.511, 0.174, 0.0504), 1.875),
        (1, 1, 1, 0.383, (0.389, 0.0924, 0.0183), 1.000),
        (2, 1, 100, 0.988, (0.9999, 0.996, 0.972), 5.000),
        (1, 0.01, 1000, 0.161, (0.194, 0.0292, 0.0041), 0.524),
        (0.6, 0.02, 500, 0.491, (0.541, 0.208, 0.0699), 2.342),
    ],
)
def test_known_answers(noise, rate, steps, advantage, tprs, mu) -> None:
    """They were computed with dp_accounting's own grid, which is slightly looser than ours."""
    rates = attack_rates(noise, sampling_rate=rate, steps=steps)
    assert rates.advantage == pytest.approx(advantage, abs=5.1e-4)
    assert [rates.tpr(share) for share in (0.1, 0.01, 0.001)] == pytest.approx(
        tprs, rel=6e-3, abs=5e-5
    )
    assert rates.mu == pytest.approx(mu, rel=1e-2)  # which depends on where the comparison ends


@settings(max_examples=40)
@given(mu=st.floats(0.05, 4), share=st.floats(1e-4, 0.9), releases=st.integers(1, 30))
def test_a_gaussian_release_has_its_closed_form(mu: float, share: float, releases: int) -> None:
    rates = attack_rates(np.sqrt(releases) / mu, steps=releases)
    exact = norm.cdf(norm.ppf(share) + mu)
    assert exact * (1 - 1e-9) <= rates.tpr(share) <= exact * 1.02
    gap = norm.cdf(mu / 2) - norm.cdf(-mu / 2)
    assert gap * (1 - 1e-9) <= rates.advantage <= gap * (1 + 1e-9)
    assert mu * (1 - 1e-9) <= rates.mu <= mu * (1 + 1e-6)
    group = rates.of_units(2)
    assert norm.cdf(norm.ppf(share) + 2 * mu) * (1 - 1e-9) <= group.tpr(share)
    assert group.tpr(share) <= norm.cdf(norm.ppf(share) + 2 * mu) * 1.03
    assert 2 * norm.cdf(mu) - 1 <= group.advantage <= 1.02 * (2 * norm.cdf(mu) - 1)


def test_no_attack_does_better_and_the_best_nearly_reaches_it() -> None:
    """The likelihood ratio of sampled Gaussian releases is the optimal test, in both roles: units
    that are present are the positives, or units that are absent."""
    noise, rate, steps, trials = 1.0, 0.2, 20, 400_000
    rng = np.random.default_rng(0)

    def ratio(present: bool) -> np.ndarray:
        total = np.zeros(trials)
        for _ in range(steps):
            took_part = rng.random(trials) < rate if present else 0.0
            seen = took_part + noise * rng.standard_normal(trials)
            total += np.log1p(rate * np.expm1((2 * seen - 1) / (2 * noise**2)))
        return total

    absent, present = ratio(False), ratio(True)
    bound = attack_rates(noise, sampling_rate=rate, steps=steps)
    less = attack_rates(noise, sampling_rate=rate, steps=steps // 2)
    for share in (0.1, 0.01):
        found = (present > np.quantile(absent, 1 - share)).mean()
        reverse = (absent < np.quantile(present, share)).mean()
        error = 4 * np.sqrt(found / trials + share / trials)
        assert max(found, reverse) <= bound.tpr(share) + error
        assert max(found, reverse) >= 0.97 * bound.tpr(share) - error
        assert found > less.tpr(share) + error  # a bound for half of the rounds is broken


def test_pure_privacy_has_its_own_curve_which_no_gaussian_fits() -> None:
    rates = attack_rates(pure_event(1.0))
    for share in (0.01, 0.1, 0.3):
        least = min(np.e * share, 1 - np.exp(-1) * (1 - share))  # randomised response reaches it
        assert least * (1 - 1e-9) <= rates.tpr(share) <= least * 1.001
    assert rates.advantage == pytest.approx(np.tanh(0.5), rel=1e-3)
    assert rates.mu > 1


def test_noise_in_shares_is_bounded_by_renyi_orders() -> None:
    rho = 0.5  # of a Gaussian release with mu = 1
    bound = attack_rates(WholeOrdersDpEvent(rho))
    assert norm.cdf(norm.ppf(0.01) + 1) <= bound.tpr(0.01) < 0.2


def test_a_release_without_noise_hides_nobody() -> None:
    for event in (dp_event.NonPrivateDpEvent(), gaussian_event(0.0)):
        rates = attack_rates(event)
        assert (rates.tpr(0.0), rates.advantage, rates.mu) == (1.0, 1.0, np.inf)
    nothing = attack_rates(1.0, steps=0)
    assert (nothing.tpr(0.25), nothing.advantage, nothing.mu) == (0.25, 0.0, 0.0)


def test_one_budget_says_less_than_the_run() -> None:
    event, steps = gaussian_event(0.9359, 0.1), 100
    epsilon = composed_epsilon([(event, steps)], 1e-5)
    alone = AttackRates.of_budget(epsilon, 1e-5)
    assert alone.tpr(0.01) == pytest.approx(1 - np.exp(-epsilon) * (1 - 0.01 - 1e-5))
    assert alone.tpr(1e-5) == pytest.approx(1e-5 + np.exp(epsilon) * 1e-5)
    assert alone.tpr(0.01) > 5 * attack_rates(event, steps=steps).tpr(0.01)
    assert alone.advantage == pytest.approx(np.tanh(epsilon / 2), abs=2e-3)
    assert alone.advantage >= np.tanh(epsilon / 2)
    assert alone.mu == np.inf  # at larger epsilons its delta stays, where a Gaussian's vanishes
    assert alone.figures()["mu"] is None


@pytest.mark.parametrize("relation", ["add-remove", "zero-out", "replace-one"])
def test_the_relation_counts_as_in_epsilon(relation) -> None:
    factor = 2 if relation == "replace-one" else 1
    rates = attack_rates(3.0, sampling_rate=0.2, steps=10, relation=relation)
    same = attack_rates(repeat_event(gaussian_event(3.0 / factor, 0.2), 10))
    assert rates.tpr(0.01) == same.tpr(0.01)


def test_a_ledger_has_the_rates_of_its_charges(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite", "a run") as ledger:
        for number in range(1, 5):
            ledger.charge(gaussian_event(2.0, 0.5), round=number, key=f"k{number}")
        rates = attack_rates(ledger)
    assert rates.tpr(0.01) == attack_rates(2.0, sampling_rate=0.5, steps=4).tpr(0.01)


def test_the_sentence() -> None:
    rates = attack_rates(1.0, sampling_rate=0.01, steps=1000)
    assert rates.sentence("clients") == (
        "an attacker who accepts 1 % false alarms finds at most 3 % of the clients"
    )
    assert "accepts 0.1 % false alarms finds at most 0.41 % of" in rates.sentence("rows", 0.001)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attack_rates(0.0), "noise_multiplier must be finite and positive, got 0.0"),
        (lambda: attack_rates(1.0, steps=-1), "steps must be a whole number of at least 0, got -1"),
        (lambda: attack_rates(1.0, sampling_rate=0), r"sampling_rate must lie in \(0, 1\], got 0"),
        (lambda: attack_rates(1.0, relation="swap"), "unknown relation 'swap'; known: add-remove"),
        (lambda: attack_rates(1.0).tpr(1.1), r"false_positive_rate must lie in \[0, 1\], got 1.1"),
        (lambda: attack_rates(1.0).of_units(0), "units must be a whole number of at least 1"),
        (
            lambda: AttackRates.of_budget(-1.0, 1e-5),
            "epsilon must be a number of at least 0, got -1.0",
        ),
        (lambda: AttackRates.of_budget(1.0, 0.0), r"delta must lie in \(0, 1\), got 0.0"),
    ],
)
def test_what_cannot_be_is_refused(call, message) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_composed_event_counts_as_its_parts() -> None:
    """Some accountants know each part, and none knows the composition."""
    parts = [(gaussian_event(2.0, 0.1), 30), (gaussian_event(5.0), 4)]
    composed = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(*part) for part in parts])
    nested = dp_event.SelfComposedDpEvent(dp_event.ComposedDpEvent([composed, composed]), 3)
    doubled = dp_event.ComposedDpEvent(
        [dp_event.SelfComposedDpEvent(event, 6 * count) for event, count in parts]
    )
    assert attack_rates(nested).figures() == attack_rates(doubled).figures()
    orders = dp_event.SelfComposedDpEvent(WholeOrdersDpEvent(0.05), 20)
    assert (
        attack_rates(orders).figures() == attack_rates(WholeOrdersDpEvent(0.05), steps=20).figures()
    )


@pytest.mark.parametrize(
    "events",
    [
        [(gaussian_event(0.6, 0.02), 500)],
        [(gaussian_event(3.0), 2), (pure_event(0.3), 4)],
        [(dp_event.LaplaceDpEvent(1.5), 3)],
    ],
)
def test_deltas_are_those_of_dp_accounting(events) -> None:
    accountant = compose(events, "pld")
    epsilons = np.linspace(0, 12, 60)
    exact = np.array([accountant.get_delta(epsilon) for epsilon in epsilons])
    bounds = deltas_of(accountant, epsilons)
    assert (bounds >= exact * (1 - 1e-12)).all()
    assert bounds == pytest.approx(exact, rel=1e-6, abs=1e-10)
