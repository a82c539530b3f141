"""Outcomes of claims: how often each is false in simulated studies, and how many seeds would
decide."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedlgm_lab.studies.claim import Claim
from fedlgm_lab.studies.statistics import Difference, difference, p_at, seeds_to_reject
from fedlgm_lab.studies.verdicts import Case, decide

NULLS, SEEDS, DEVIATION = 5000, 5, 0.01
DIRECTION: dict[str, Any] = {"says": "a leads", "a": "a", "b": "b"}


def studies(*means: float) -> list[list[Difference]]:
    """Differences of `NULLS` studies with paired seeds, one for each true mean."""
    rng = np.random.default_rng(7)
    draws = rng.normal(np.array(means)[:, None], DEVIATION, size=(NULLS, len(means), SEEDS))
    mean, error = draws.mean(axis=-1), draws.std(axis=-1, ddof=1) / np.sqrt(SEEDS)
    reach = error * stats.t.ppf(0.975, SEEDS - 1)
    p = 2 * stats.t.sf(abs(mean / error), SEEDS - 1)
    figures = np.stack([mean, mean - reach, mean + reach, p], axis=-1).tolist()
    return [[Difference(m, low, high, q, SEEDS) for m, low, high, q in one] for one in figures]


def shares(claim: Claim, *means: float, margin: float = 0.0) -> dict[str, float]:
    """How often each outcome is given to a claim whose true differences are the means."""
    outcomes = collections.Counter(
        decide([Case(claim, steps, margin)])[0].outcome for steps in studies(*means)
    )
    return {outcome: count / NULLS for outcome, count in outcomes.items()}


@pytest.mark.parametrize(
    ("claim", "true"),
    [
        (Claim(**DIRECTION), 0.0),
        (Claim(**DIRECTION, expect="lower"), 0.0),
        (Claim(**DIRECTION, at_least=0.02), 0.02),
        (Claim(**DIRECTION, expect="not lower", margin=0.02), -0.02),
    ],
)
def test_at_the_bound_five_percent_of_claims_are_decided(claim: Claim, true: float) -> None:
    """Half of them as reproduced. A method that is worse by exactly the margin is such a case."""
    found = shares(claim, true)
    assert 0.042 < 1 - found["not decided"] < 0.058
    assert 0.018 < found["reproduced"] < 0.032
    assert 0.018 < found["refuted"] < 0.032


def test_methods_that_differ_by_the_margin_are_seldom_called_equal_or_level() -> None:
    equal = shares(Claim(**DIRECTION, expect="equal", margin=0.02), 0.02)
    assert 0.015 < equal["reproduced"] < 0.032
    assert 0.015 < equal["refuted"] < 0.032
    level = shares(Claim(**DIRECTION), 0.01, margin=0.01)
    assert level.get("level", 0.0) < 0.032
    assert shares(Claim(**DIRECTION), 0.0, margin=0.03)["level"] > 0.8


def test_the_papers_effect_is_seldom_excluded_where_it_is_true() -> None:
    claim = Claim(**DIRECTION, effect=0.01)
    true = shares(claim, 0.01, margin=0.005)
    assert true.get("effect excluded", 0.0) + true.get("level", 0.0) < 0.032
    assert shares(Claim(**DIRECTION, effect=0.05), 0.003)["effect excluded"] > 0.8


def test_a_ranking_of_equal_methods_is_seldom_decided() -> None:
    ranking = Claim(says="a, then b, c, d", a="a", then=["b", "c", "d"])
    found = shares(ranking, 0.0, 0.0, 0.0)
    assert 1 - found["not decided"] < 0.058
    assert shares(ranking, 0.03, 0.03, 0.0).get("reproduced", 0.0) < 0.032
    assert shares(ranking, 0.03, 0.03, 0.03)["reproduced"] > 0.8
    assert shares(ranking, 0.03, 0.03, -0.05)["refuted"] > 0.8


def test_each_kind_of_outcome_errs_in_five_percent_of_studies_of_many_claims() -> None:
    """Five claims: no difference; one of the margin of levels, and of the paper's effect."""
    plain, printed = Claim(**DIRECTION), Claim(**DIRECTION, effect=0.02)
    wrong: collections.Counter[str] = collections.Counter()
    for first, second, third, fourth, fifth in studies(0.0, 0.0, 0.0, 0.01, 0.02):
        cases = [Case(plain, [each], 0.01) for each in (first, second, third, fourth)]
        made = [one.outcome for one in decide([*cases, Case(printed, [fifth], 0.01)])]
        wrong["direction"] += bool({"reproduced", "refuted"} & set(made[:3]))
        wrong["level"] += "level" in made[3:]
        wrong["effect"] += made[4] == "effect excluded"
    assert all(count / NULLS < 0.058 for count in wrong.values())


def test_figures_that_agree_in_all_seeds_have_the_p_of_a_sign_test() -> None:
    same = difference([0.7, 0.8, 0.9, 0.6], [0.6, 0.7, 0.8, 0.5])
    assert p_at(same, 0.02) == p_at(same, 0.0) == 0.125
    assert p_at(same, same.mean) == 1.0
    assert seeds_to_reject(same, [0.0]) == 6  # 2^-5
    assert p_at(difference([0.7] * 5, [0.6] * 5), 0.02) == 0.0  # figures without a seed


def test_the_seeds_that_would_decide_are_those_at_which_the_claim_is_decided() -> None:
    """The same mean and deviation at the named number of seeds, and at one less."""
    claims = [Claim(**DIRECTION)] * 3

    def differences(seeds: int) -> list[Difference]:
        pairs = np.resize([-1.0, 1.0], seeds - seeds % 2).tolist() + [0.0] * (seeds % 2)
        spread = np.array(pairs) / np.std(pairs, ddof=1) * DEVIATION
        return [difference(mean + spread, np.zeros(seeds)) for mean in (0.004, 0.004, 0.004)]

    def cases(seeds: int) -> list[Case]:
        return [Case(one, [d], 0.0) for one, d in zip(claims, differences(seeds), strict=True)]

    needed = cases(6)[0].seeds_needed(len(claims))
    assert needed is not None
    assert {each.outcome for each in decide(cases(needed))} == {"reproduced"}
    assert {each.outcome for each in decide(cases(needed - 1))} == {"not decided"}
    assert Case(claims[0], [Difference(0.0, -0.1, 0.1, 1.0, 5)], 0.0).seeds_needed(1) is None
