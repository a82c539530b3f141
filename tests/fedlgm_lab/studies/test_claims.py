"""A paper's statements about a study: what the runs bear out, what they contradict, what they leave
open."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from pydantic import ValidationError

from fedlgm_lab.studies import files
from fedlgm_lab.studies.claim import Claim
from fedlgm_lab.studies.claims import check, count_once
from fedlgm_lab.studies.records import Records
from fedlgm_lab.studies.results import Study

KEYS = ["privacy.epsilon"]
OFFSETS = (0.0, 0.02, -0.01, 0.01)  # seeds differ, in the same way for both methods


def frame(**means: tuple[float, float]) -> pd.DataFrame:
    """Accuracies of methods at epsilon 1 and 8, over four seeds; a method's own noise is small."""
    return pd.DataFrame(
        [
            {
                "method": method,
                "mechanism": method,
                "privacy.epsilon": epsilon,
                "seed": seed,
                "accuracy": mean
                + offset
                + 0.001 * (seed if method == "a" else -seed) * (1.5 if epsilon > 1 else 0.5),
                "epsilon": epsilon,
            }
            for method, both in means.items()
            for epsilon, mean in zip((1.0, 8.0), both, strict=True)
            for seed, offset in enumerate(OFFSETS)
        ]
    )


def outcomes(*wanted: Claim, **means: tuple[float, float]) -> list[str]:
    return [one.outcome for one in check(wanted, frame(**means), KEYS, "accuracy")]


def test_a_direction_is_reproduced_refuted_or_not_decided() -> None:
    higher, lower = (
        Claim(says="a is better", a="a", b="b"),
        Claim(says="a is worse", a="a", b="b", expect="lower"),
    )
    assert outcomes(higher, lower, a=(0.7, 0.8), b=(0.5, 0.6)) == ["reproduced", "refuted"]
    assert outcomes(higher, lower, a=(0.7, 0.8), b=(0.703, 0.803)) == ["level"] * 2
    noise = Claim(says="a is better", a="a", b="b", margin=1e-4)
    assert outcomes(noise, a=(0.7, 0.8), b=(0.703, 0.803)) == ["not decided"]
    (found,) = check([higher], frame(a=(0.7, 0.8), b=(0.5, 0.7)), KEYS, "accuracy")
    assert found.mean == pytest.approx(0.15 + 0.003)
    assert found.in_words().startswith("accuracy +15.3 points, 95 % interval")


def test_methods_are_compared_at_the_rates_that_each_of_them_takes() -> None:
    rows = frame(a=(0.7, 0.8), b=(0.5, 0.6)).assign(
        **{"training.lr": lambda one: (one["method"] == "a") + 1.0}
    )
    kept = {
        "keys": [*KEYS, "training.lr"],
        "searched": ["training.lr"],
        "headline": "accuracy",
        "runs": [],
    }
    study = Study(Path(), Records.of_values(kept))
    (found,) = check(
        [Claim(says="a is better", a="a", b="b")], rows, study.compared_keys, "accuracy"
    )
    assert (found.outcome, found.seeds) == ("reproduced", 4)


def test_equality_is_decided_by_the_interval() -> None:
    near = Claim(says="as good", a="a", b="b", expect="equal", margin=0.02)
    assert outcomes(near, a=(0.7, 0.8), b=(0.7, 0.8)) == ["reproduced"]
    assert outcomes(near, a=(0.7, 0.8), b=(0.6, 0.7)) == ["refuted"]
    assert outcomes(near, a=(0.7, 0.8), b=(0.685, 0.78)) == ["not decided"]


def test_not_lower_is_decided_by_one_end_of_the_interval() -> None:
    near = Claim(says="not worse", a="a", b="b", expect="not lower", margin=0.02)
    assert outcomes(near, a=(0.7, 0.8), b=(0.7, 0.8)) == ["reproduced"]
    assert outcomes(near, a=(0.8, 0.9), b=(0.7, 0.8)) == ["reproduced"]  # better is not worse
    assert outcomes(near, a=(0.6, 0.7), b=(0.7, 0.8)) == ["refuted"]
    assert outcomes(near, a=(0.68, 0.78), b=(0.7, 0.8)) == ["not decided"]


def test_at_least_asks_for_more_than_a_direction() -> None:
    ahead = Claim(says="ten points ahead", a="a", b="b", at_least=0.1)
    assert outcomes(ahead, a=(0.7, 0.8), b=(0.5, 0.6)) == ["reproduced"]
    assert outcomes(ahead, a=(0.7, 0.8), b=(0.65, 0.75)) == ["refuted"]


def test_a_ranking_holds_if_all_its_steps_do() -> None:
    ranked = Claim(says="b, then a and c", a="b", then=["a", "c"])
    fallen = Claim(says="b last", a="b", then=["a", "c"], expect="lower")
    figures = {"a": (0.7, 0.8), "b": (0.8, 0.9), "c": (0.5, 0.6)}
    assert outcomes(ranked, fallen, **figures) == ["reproduced", "refuted"]
    (found,) = check([ranked], frame(**figures | {"c": (0.703, 0.803)}), KEYS, "accuracy")
    assert found.outcome == "not decided"
    assert found.mean == pytest.approx(0.0)  # the step that supports the ranking least


def test_a_direction_that_is_not_decided_may_be_level_or_short_of_the_papers_effect() -> None:
    figures = {"a": (0.7, 0.8), "b": (0.702, 0.802)}  # 0.1 points, with 0.26 between seeds
    direction = {"says": "a is better", "a": "a", "b": "b"}
    for further, verdict in (
        ({}, "level within 1 point"),
        ({"effect": 0.012}, "level within 0.6 points"),
        ({"effect": 0.008}, "paper's effect excluded"),
        ({"effect": 0.003}, "not decided (9 seeds would decide)"),
    ):
        (found,) = check([Claim(**direction, **further)], frame(**figures), KEYS, "accuracy")
        assert found.verdict == verdict


def test_with_one_seed_the_verdict_says_that_two_are_needed() -> None:
    claim = Claim(says="a is better", a="a", b="b")
    runs = frame(a=(0.8, 0.9), b=(0.7, 0.8)).query("seed == 0")
    (found,) = check([claim], runs, KEYS, "accuracy")
    assert found.verdict == "not decided (fewer than two seeds)"
    assert found.in_words() == "no interval"


@pytest.mark.parametrize("diverged", ["a", "b"])
def test_runs_that_diverge_are_no_random_sample_so_a_claim_without_them_has_no_verdict(
    diverged: str,
) -> None:
    rows = frame(a=(0.7, 0.8), b=(0.5, 0.6))
    higher = Claim(says="a is better", a="a", b="b")
    at_one = Claim(says="a is better at 1", a="a", b="b", at={"privacy.epsilon": 1.0})
    lost = (rows["method"] == diverged) & (rows["privacy.epsilon"] == 8.0)
    some = lost & (rows["seed"] == 3)
    for gone in (some, lost):
        found = check(
            [higher, at_one], rows.assign(accuracy=rows["accuracy"].mask(gone)), KEYS, "accuracy"
        )
        assert [one.verdict for one in found] == ["seeds left out", "reproduced"]
    # a cell that one side does not have was not to be compared
    (found,) = check([higher], rows[~lost], KEYS, "accuracy")
    assert found.verdict == "reproduced"


def test_runs_are_counted_once() -> None:
    """A figure over two budgets has the runs of a table at one of them, for the same methods."""
    figure = [Claim(says="a is better", a="a", b="b"), Claim(says="a is better", a="a", b="c")]
    table = [one.model_copy(update={"at": {"privacy.epsilon": 8}}) for one in figure]
    runs = frame(a=(0.7, 0.8), b=(0.6, 0.7), c=(0.5, 0.6))
    checked = [one for claims in (table, figure) for one in check(claims, runs, KEYS, "accuracy")]
    assert count_once(checked) == checked[2:]


def test_one_method_along_a_key_and_claims_of_single_cells() -> None:
    along = Claim(says="falls at small budgets", a="a", along="privacy.epsilon")
    assert outcomes(along, a=(0.5, 0.8), b=(0.5, 0.5)) == ["reproduced"]
    assert outcomes(along, a=(0.8, 0.5), b=(0.5, 0.5)) == ["refuted"]
    single = Claim(says="better at 8", a="a", b="b", at={"privacy.epsilon": 8})
    assert outcomes(single, a=(0.1, 0.8), b=(0.5, 0.5)) == ["reproduced"]
    assert outcomes(Claim(says="nobody", a="a", b="c"), a=(0.1, 0.8)) == ["not decided"]


def test_p_values_are_adjusted_over_the_claims_of_a_study() -> None:
    claim = Claim(says="a is better", a="a", b="b")
    alone = check([claim], frame(a=(0.703, 0.703), b=(0.7, 0.7)), KEYS, "accuracy")[0]
    many = check([claim] * 20, frame(a=(0.703, 0.703), b=(0.7, 0.7)), KEYS, "accuracy")[0]
    assert (alone.p_holm, many.p_holm) == (alone.p, pytest.approx(min(1.0, 20 * alone.p)))
    assert (alone.outcome, many.outcome) == ("reproduced", "not decided")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"b": None}, "give one of them"),
        ({"along": "privacy.epsilon"}, "give one of them"),
        ({"expect": "equal"}, "`margin`"),
        ({"then": ["b", "c"]}, "give one of them"),
        ({"expect": "not lower", "margin": 0.1, "effect": -0.1}, "`at_least`, `effect`"),
        ({"effect": -0.1}, "the sign of expect"),
        ({"b": None, "then": ["b", "c"], "margin": 0.1}, "neither"),
        ({"expect": "better"}, "expect"),
    ],
)
def test_a_claim_is_one_comparison(wrong, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Claim(**{"says": "a is better", "a": "a", "b": "b"} | wrong)


@pytest.mark.parametrize("name", files.names())
def test_claims_name_what_their_study_has(name: str) -> None:
    asked = files.load(name)
    labels = {one if isinstance(one, str) else one["label"] for one in asked.grid["mechanism"]}
    assert asked.claims or not asked.paper[:1].isdigit()  # a paper says something about its table
    for one in asked.claims:
        assert set(one.labels) <= labels
        assert {one.along, *one.at} - {None} <= set(asked.grid)
