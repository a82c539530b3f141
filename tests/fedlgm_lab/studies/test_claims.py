"""A paper's statements about a study: what the runs bear out, what they contradict, what they leave
open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from fedlgm_lab.studies import files
from fedlgm_lab.studies.claims import Claim, _outcome, check
from fedlgm_lab.studies.records import Records
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.statistics import difference

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
    assert outcomes(higher, lower, a=(0.7, 0.8), b=(0.703, 0.803)) == ["not decided"] * 2
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


@pytest.mark.parametrize("expect", ["not lower", "equal"])
def test_a_method_that_is_worse_by_the_margin_seldom_passes(expect: str) -> None:
    """5,000 studies of five paired seeds whose true difference is exactly the margin: at most 2.5 %
    are reproduced, and of those without a difference most are."""
    claim = Claim(says="not worse", a="a", b="b", expect=expect, margin=0.02)
    rng, zeros, passed = np.random.default_rng(3), np.zeros(5), {}
    for shift, studies in ((-0.02, 5000), (0.0, 500)):
        draws = rng.normal(shift, 0.01, size=(studies, 5))
        found = [_outcome(claim, difference(row, zeros), 1.0) for row in draws]
        passed[shift] = found.count("reproduced") / studies
    assert 0.015 < passed[-0.02] < 0.032
    assert passed[0.0] > 0.8


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
        ({"b": None}, "with `b` or `along`"),
        ({"along": "privacy.epsilon"}, "with `b` or `along`"),
        ({"expect": "equal"}, "`margin`"),
        ({"margin": 0.1}, "`margin`"),
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
        assert {one.a, one.b} - {None} <= labels
        assert {one.along, *one.at} - {None} <= set(asked.grid)
