"""The price of k secret rounds out of T: exact integrals, Monte Carlo, and the authors' bounds."""

import math
import time
import warnings
from itertools import combinations, pairwise

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.privacy import (
    Ledger,
    attack_rates,
    calibrate,
    composed_epsilon,
    epsilon,
    gaussian_epsilon,
)
from fedlgm.privacy.cost import Cost
from fedlgm.privacy.events import (
    AllocationDpEvent,
    allocation_event,
    decode,
    encode,
    gaussian_event,
    pure_event,
)
from fedlgm.privacy.random_allocation import _sum_of, one_of_rounds
from fedlgm.privacy.selection import selection_event

GRID = np.array([-2.0, -0.5, 0.0, 0.3, 0.8, 1.5, 2.5, 4.0])


def deltas(pmf, epsilons):
    return np.array([pmf.get_delta_for_epsilon(float(e)) for e in epsilons])


def price(noise, steps, participations, delta=1e-5):
    return epsilon(noise, delta, steps=steps, sampling="allocation", participations=participations)


class TestOneOfTwoRoundsExactly:
    """A = (W_1 + W_2) / 2: the expectation over W_2 is known in closed form, over W_1 integrated."""

    @staticmethod
    def exact(noise, epsilon, removed):
        t, c = 1 / noise, math.exp(epsilon)

        def ratio(g):
            return math.exp(t * g - t * t / 2)

        def inner(strike):  # E max(W - strike, 0)
            if strike <= 0:
                return 1 - strike
            d = -math.log(strike) / t + t / 2
            return stats.norm.cdf(d) - strike * stats.norm.cdf(d - t)

        def value(g):
            strike = (2 * c if removed else 2 / c) - ratio(g)
            call = inner(strike) / 2
            # E max(1 - cA, 0) = c (E max(A - 1/c, 0) - (1 - 1/c))
            result = call if removed else c * (call - ((1 + ratio(g)) / 2 - 1 / c))
            return result * stats.norm.pdf(g)

        edge = (math.log(2 * c if removed else 2 / c) + t * t / 2) / t
        pieces = sorted({-9.0, 9 + t, *([edge] if -9 < edge < 9 + t else [])})
        return sum(
            integrate.quad(value, a, b, epsabs=1e-13, limit=200)[0] for a, b in pairwise(pieces)
        )

    @pytest.mark.parametrize("noise", [0.3, 1.0, 5.0])
    def test_bounds_lie_above_the_integrals_and_close_to_them(self, noise):
        single = one_of_rounds(noise, 2, 1e-4)
        for removed, pmf in ((True, single._pmf_remove), (False, single._pmf_add)):
            exact = np.array([self.exact(noise, e, removed) for e in GRID])
            bound = deltas(pmf, GRID)
            assert (bound >= exact - 1e-12).all()
            assert (bound <= exact * 1.002 + 1e-9).all()


@pytest.mark.parametrize("noise", [0.25, 0.7, 1.0, 3.0, 10.0])
def test_one_of_one_round_is_the_gaussian_release(noise):
    single = one_of_rounds(noise, 1, 1e-4)
    for pmf in (single._pmf_remove, single._pmf_add):
        exact = stats.norm.cdf(1 / (2 * noise) - GRID * noise) - np.exp(GRID) * stats.norm.cdf(
            -1 / (2 * noise) - GRID * noise
        )
        bound = deltas(pmf, GRID)
        assert (bound >= exact - 1e-13).all()
        assert (bound <= exact * 1.002 + 1e-9).all()


def draws(noise, rounds, participations, count, present, rng):
    """Privacy losses of units that take part once in each of `participations` groups of rounds."""
    losses = np.zeros(count)
    for length in [
        rounds // participations + (i < rounds % participations) for i in range(participations)
    ]:
        x = rng.normal(0, noise, (count, length))
        x[:, 0] += present
        losses += np.log(np.exp(x / noise**2 - 1 / (2 * noise**2)).mean(axis=1))
    return losses if present else -losses


def estimate(losses, epsilons):
    """Hockey-stick divergences and their standard errors."""
    gains = np.maximum(-np.expm1(epsilons[:, None] - losses), 0)
    return gains.mean(axis=1), gains.std(axis=1) / math.sqrt(losses.size)


class TestMonteCarlo:
    """The dominating pair drawn in both directions."""

    CASES = ((1.0, 10, 1), (0.6, 5, 2), (2.0, 100, 4), (1.0, 7, 3))
    EPSILONS = np.linspace(0, 3, 13)

    @staticmethod
    def bounds(noise, rounds, participations, epsilons, direction):
        total = None
        for event, number in AllocationDpEvent(gaussian_event(noise), participations, rounds).draws:
            length = getattr(event, "rounds", 1)
            part = one_of_rounds(noise, length, 1e-3).self_compose(number)
            total = part if total is None else total.compose(part)
        return deltas(getattr(total, direction), epsilons)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("present", [1, 0])
    def test_no_bound_is_exceeded_and_a_lower_one_would_be(self, case, present):
        noise, rounds, participations = case
        count, direction = 200_000, "_pmf_remove" if present else "_pmf_add"
        rng = np.random.default_rng([rounds, present])
        parts = [estimate(draws(*case, count // 4, present, rng), self.EPSILONS) for _ in range(4)]
        mean = np.mean([part[0] for part in parts], axis=0)
        error = np.sqrt(np.mean([part[1] ** 2 for part in parts], axis=0) / 4)
        bound = self.bounds(noise, rounds, participations, self.EPSILONS, direction)
        assert (mean <= bound + 4.5 * error).all()
        lowered = self.bounds(1.05 * noise, rounds, participations, self.EPSILONS, direction)
        assert (mean > lowered + 4.5 * error).any()

    @pytest.mark.parametrize(("noise", "rounds", "participations"), [(1.0, 6, 2), (0.7, 5, 3)])
    def test_a_uniform_set_of_rounds_costs_no_more_than_the_bound(
        self, noise, rounds, participations
    ):
        rng, count = np.random.default_rng(5), 300_000
        sets = list(combinations(range(rounds), participations))
        for present, direction in ((1, "_pmf_remove"), (0, "_pmf_add")):
            x = rng.normal(0, noise, (count, rounds))
            x[:, :participations] += present
            each = x / noise**2 - 1 / (2 * noise**2)
            loss = np.log(np.mean([np.exp(each[:, list(s)].sum(axis=1)) for s in sets], axis=0))
            mean, error = estimate(loss if present else -loss, self.EPSILONS)
            bound = self.bounds(noise, rounds, participations, self.EPSILONS, direction)
            assert (mean <= bound + 4.5 * error).all()


class TestKnownAnswers:
    @pytest.mark.parametrize(
        ("noise", "upper", "lower", "poisson"),
        [(0.8, 9.494, 9.405, 10.98), (1.0, 6.162, 6.073, 7.05), (2.0, 2.185, 2.098, 2.34)],
    )
    def test_ten_of_a_hundred_rounds(self, noise, upper, lower, poisson):
        """Bounds of the authors' code, between which this finer grid's upper bound lies."""
        assert lower < price(noise, 100, 10) < upper
        assert epsilon(noise, 1e-5, steps=100, sampling_rate=0.1) == pytest.approx(
            poisson, abs=0.01
        )

    @pytest.mark.parametrize(
        ("noise", "rounds", "participations"), [(2.0, 10, 2), (1.0, 4, 1), (3.0, 11, 3)]
    )
    def test_never_below_the_lower_bound_of_the_authors_code(self, noise, rounds, participations):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from PLD_accounting import gaussian_allocation_epsilon_range as authors

            upper, lower = authors(
                delta=1e-5, sigma=noise, num_steps=rounds, num_selected=participations,
                epsilon_accuracy=0.1,
            )  # fmt: skip
        assert lower <= price(noise, rounds, participations) <= upper

    def test_all_rounds_are_plain_releases(self):
        for noise, rounds in ((1.0, 1), (2.0, 9), (0.5, 3)):
            assert price(noise, rounds, rounds) == gaussian_epsilon(math.sqrt(rounds) / noise, 1e-5)
            assert allocation_event(noise, rounds, rounds) == (
                gaussian_event(noise)
                if rounds == 1
                else dp_event.SelfComposedDpEvent(gaussian_event(noise), rounds)
            )

    def test_more_than_half_of_the_rounds_have_certain_participations_in_the_bound(self):
        event = AllocationDpEvent(gaussian_event(1.0), 7, 10)
        assert event.draws == (
            (gaussian_event(1.0), 4),
            (AllocationDpEvent(gaussian_event(1.0), 1, 2), 3),
        )
        assert price(1.0, 10, 6) < price(1.0, 10, 7) < gaussian_epsilon(math.sqrt(7), 1e-5)

    def test_hardly_any_noise_is_priced_without_the_secret(self):
        assert price(0.05, 100, 1) == pytest.approx(gaussian_epsilon(20, 1e-5), rel=1e-3)
        assert price(0.05, 100, 1) >= gaussian_epsilon(20, 1e-5)
        assert price(0.0, 10, 2) == math.inf


@settings(max_examples=4, deadline=None)
@given(noise=st.floats(0.6, 8.0), participations=st.integers(1, 6), rounds=st.integers(2, 40))
def test_more_rounds_cost_less_and_secrecy_never_costs(noise, participations, rounds):
    rounds = max(rounds, participations + 1)
    cost = price(noise, rounds, participations)
    plain = gaussian_epsilon(math.sqrt(participations) / noise, 1e-5)
    assert price(noise, 2 * rounds, participations) <= cost * (1 + 1e-3) + 1e-6
    assert cost <= plain * (1 + 1e-3) + 1e-6


@settings(max_examples=8, deadline=None)
@given(noise=st.floats(0.1, 30.0), rounds=st.integers(1, 100))
def test_masses_and_means_are_preserved(noise, rounds):
    law = _sum_of(rounds, 1 / noise)
    mean = float((law.masses * np.exp(law.logs)).sum()) + law.beyond
    assert (law.masses >= 0).all()
    assert law.zero >= 0
    assert float(law.masses.sum()) + law.zero == pytest.approx(1, abs=1e-13)
    assert mean == pytest.approx(rounds, rel=1e-12)


class TestCalibration:
    def test_meets_the_budget_and_uses_it(self):
        budget, steps, participations = 1.0, 20, 7
        noise = calibrate(
            budget, 1e-5, steps=steps, sampling="allocation", participations=participations
        )
        assert 0.9999 * budget < price(noise, steps, participations) <= budget
        assert noise < calibrate(budget, 1e-5, steps=steps, sampling_rate=participations / steps)

    def test_takes_few_seconds(self):
        start = time.process_time()
        price(1.2345, 100, 10)
        query = time.process_time() - start
        noise = calibrate(7.654321, 1e-5, steps=100, sampling="allocation", participations=10)
        assert query < 2
        assert time.process_time() - start < 10
        assert 0.9999 * 7.654321 < price(noise, 100, 10) <= 7.654321
        start = time.process_time()
        price(1.2345, 100, 10)
        assert time.process_time() - start < 0.05


class TestComposition:
    EVENT = allocation_event(1.5, 4, 40)

    def test_with_other_events_of_a_ledger(self, tmp_path):
        other = gaussian_event(2.0, 0.1)
        both = composed_epsilon([(self.EVENT, 2), (other, 10), (pure_event(0.1), 1)], 1e-5)
        assert both > composed_epsilon([(self.EVENT, 2)], 1e-5)
        assert both > composed_epsilon([(other, 10)], 1e-5)
        with Ledger(tmp_path / "ledger.sqlite", owner="a run") as ledger:
            ledger.charge(self.EVENT, round=1, key="a")
            ledger.charge(self.EVENT, round=2, key="b")
            for round in range(10):
                ledger.charge(other, round=3 + round, key=str(round))
            ledger.charge(pure_event(0.1), round=13, key="c")
            assert ledger.epsilon(1e-5) == pytest.approx(both, rel=1e-9)
            assert attack_rates(ledger).tpr(0.01) > attack_rates(self.EVENT).tpr(0.01)

    def test_two_blocks_cost_as_much_as_one_of_twice_as_many_rounds(self):
        twice = allocation_event(1.5, 8, 80)
        assert composed_epsilon([(self.EVENT, 2)], 1e-5) == composed_epsilon([(twice, 1)], 1e-5)

    def test_attack_rates_cover_the_monte_carlo_profile(self):
        rates = attack_rates(self.EVENT)
        by_noise = attack_rates(1.5, steps=40, sampling="allocation", participations=4)
        assert by_noise.tpr(0.01) == rates.tpr(0.01)
        rng = np.random.default_rng(1)
        present = draws(1.5, 40, 4, 100_000, 1, rng)
        absent = -draws(1.5, 40, 4, 100_000, 0, rng)
        for share in (0.1, 0.01):
            found = (present > np.quantile(absent, 1 - share)).mean()
            assert found <= rates.tpr(share) + 0.01
            assert found > rates.tpr(share) - 0.03  # the bound is nearly sharp

    def test_renyi_orders_are_refused(self):
        with pytest.raises(
            PrivacyError, match=r"the rdp accountant cannot account for Alloc.*'pld'"
        ):
            composed_epsilon([(self.EVENT, 1)], 1e-5, "rdp")
        with pytest.raises(PrivacyError, match="cannot account"):
            composed_epsilon([(selection_event(self.EVENT, 5.0), 1)], 1e-5)
        with pytest.raises(PrivacyError, match="cannot account"):
            calibrate(
                1.0, 1e-5, steps=10, sampling="allocation", participations=2, accountant="rdp"
            )

    def test_other_noise_is_refused(self):
        event = AllocationDpEvent(dp_event.LaplaceDpEvent(1.0), 2, 10)
        with pytest.raises(PrivacyError, match="cannot account"):
            composed_epsilon([(event, 1)], 1e-5)

    def test_a_ledgers_text(self):
        assert decode(encode(self.EVENT)) == self.EVENT
        record = encode(self.EVENT)
        for field, value in (("participations", 0), ("rounds", 3), ("participations", 1.5)):
            with pytest.raises(ConfigError):
                decode({**record, field: value})
        assert Cost.of(self.EVENT).sampling == "4 of 40 rounds"
        assert Cost.of(self.EVENT).rate == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling": "allocation"}, "needs participations"),
        ({"participations": 3}, "participations is for sampling = 'allocation'"),
        (
            {"sampling": "allocation", "participations": 11},
            "participations must be a whole number, 1 to 10, got 11",
        ),
        ({"sampling": "allocation", "participations": 0}, "participations must be"),
        ({"sampling": "allocation", "participations": 2.5}, "participations must be"),
        ({"sampling": "allocation", "participations": 2, "sampling_rate": 0.2}, "no sampling_rate"),
        (
            {"sampling": "allocation", "participations": 2, "relation": "replace-one"},
            "not for relation = 'replace-one'",
        ),
        ({"sampling": "shuffled"}, "sampling"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        epsilon(1.0, 1e-5, steps=10, **arguments)
    with pytest.raises(ConfigError, match=message):
        calibrate(1.0, 1e-5, steps=10, **arguments)
