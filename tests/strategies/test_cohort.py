"""Cohorts that keep rounds between participations: by id, from invitation to invitation, whatever
the process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import Sampling
from strategies import CohortSampler

SCHEMES = {
    "cyclic": Sampling("cyclic", 400, 0.1, 10),
    "min-separation": Sampling("min-separation", 400, 0.1, 10),
    "grouped-poisson": Sampling("grouped-poisson", 400, 0.05, 10),
}


def rounds_of(cohorts: list[np.ndarray], population: int) -> list[np.ndarray]:
    """Rounds in which each client was invited."""
    return [
        np.array([t for t, cohort in enumerate(cohorts) if client in set(cohort)])
        for client in range(population)
    ]


@given(
    st.integers(0, 2**32),
    st.sampled_from(["cyclic", "min-separation", "grouped-poisson"]),
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(0, 9),
)
def test_nobody_is_invited_twice_too_soon(seed, scheme, separation, cohort, spare):
    population = separation * cohort + spare * separation
    rate = {"cyclic": 1 / separation, "min-separation": cohort / population}.get(
        scheme, cohort / population
    )
    sampler = CohortSampler(
        Sampling(scheme, population, rate, separation), KeyRing(seed), dropout_rate=0.5
    )
    cohorts = [sampler.cohort(round_) for round_ in range(1, 3 * separation + 3)]
    for rounds in rounds_of(cohorts, population):
        assert (np.diff(rounds) >= separation).all()
        if scheme != "min-separation":
            assert len(set(rounds % separation)) <= 1  # one group for the whole run
    if scheme == "min-separation":
        assert {len(np.unique(drawn)) for drawn in cohorts} == {cohort}
    for round_, drawn in enumerate(cohorts, start=1):
        assert set(sampler.present(round_, drawn)) <= set(drawn)


@pytest.mark.parametrize("sampling", SCHEMES.values(), ids=SCHEMES)
def test_a_restart_changes_nothing(sampling):
    """A pure function of key and round: any process draws the same, in any order."""
    whole = CohortSampler(sampling, KeyRing(4))
    cohorts = [whole.cohort(round_).tolist() for round_ in range(1, 25)]
    for start in (24, 13, 2):
        again = CohortSampler(sampling, KeyRing(4))
        assert [again.cohort(round_).tolist() for round_ in range(start, 25)] == cohorts[
            start - 1 :
        ]
    assert CohortSampler(sampling, KeyRing(5)).cohort(24).tolist() != cohorts[-1]


@pytest.mark.parametrize("sampling", SCHEMES.values(), ids=SCHEMES)
def test_dropouts_are_not_drawn_again(sampling):
    steady, shaky = (CohortSampler(sampling, KeyRing(1), rate) for rate in (0.0, 0.4))
    for round_ in range(1, 15):
        assert shaky.cohort(round_).tolist() == steady.cohort(round_).tolist()


def test_groups_are_independent_draws_that_other_clients_do_not_change():
    """What add-or-remove-one rests on: one client more changes nobody else's group."""
    for population in (100, 101, 5000):
        sampler = CohortSampler(Sampling("cyclic", population, 0.1, 10), KeyRing(8))
        groups = sampler.groups()
        assert (
            groups[:100].tolist()
            == CohortSampler(Sampling("cyclic", 100, 0.1, 10), KeyRing(8)).groups().tolist()
        )
    assert stats.chisquare(np.bincount(groups, minlength=10)).pvalue > 1e-3


def test_draws_within_a_group_are_binomial_and_do_not_change_one_another():
    sampler = CohortSampler(Sampling("grouped-poisson", 4000, 0.05, 4), KeyRing(3))
    counts = np.array([len(sampler.cohort(round_)) for round_ in range(1, 201)])
    sizes = np.bincount(sampler.groups(), minlength=4)[np.arange(200) % 4]
    z = (counts - 0.2 * sizes) / np.sqrt(sizes * 0.2 * 0.8)
    assert abs(z.mean()) < 4 / np.sqrt(200)
    assert stats.kstest(z, "norm").pvalue > 1e-3
    smaller = CohortSampler(Sampling("grouped-poisson", 3999, 0.05, 4), KeyRing(3))
    for round_ in (1, 2, 3):
        assert [client for client in sampler.cohort(round_) if client < 3999] == smaller.cohort(
            round_
        ).tolist()


def test_the_smallest_population_takes_turns_in_one_order():
    """N = b m: whoever was asked longest ago is the only one who may be asked."""
    sampler = CohortSampler(Sampling("min-separation", 12, 0.25, 4), KeyRing(0))
    cohorts = [sampler.cohort(round_).tolist() for round_ in range(1, 13)]
    assert cohorts[4:8] == cohorts[:4] == cohorts[8:]
    assert sorted(np.concatenate(cohorts[:4]).tolist()) == list(range(12))


class TestAllocation:
    SAMPLING = Sampling("allocation", 50, 0.4, participations=2, block=5)

    @given(st.integers(0, 2**32))
    def test_every_client_is_invited_in_its_rounds_of_each_block(self, seed):
        sampler = CohortSampler(self.SAMPLING, KeyRing(seed), dropout_rate=0.5)
        cohorts = [sampler.cohort(round_) for round_ in range(1, 16)]
        for start in range(0, 15, 5):
            drawn = np.bincount(np.concatenate(cohorts[start : start + 5]), minlength=50)
            assert (drawn == 2).all()
        for round_, cohort in enumerate(cohorts, start=1):
            assert set(sampler.present(round_, cohort)) <= set(cohort)  # nobody is replaced

    def test_a_restart_changes_nothing_and_other_keys_do(self):
        first = CohortSampler(self.SAMPLING, KeyRing(4))
        cohorts = [first.cohort(round_).tolist() for round_ in range(1, 16)]
        for round_ in (9, 3, 15, 1):
            again = CohortSampler(self.SAMPLING, KeyRing(4))
            assert again.cohort(round_).tolist() == cohorts[round_ - 1]
        other = CohortSampler(self.SAMPLING, KeyRing(5))
        assert [other.cohort(round_).tolist() for round_ in range(1, 16)] != cohorts
