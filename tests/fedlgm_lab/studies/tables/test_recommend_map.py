"""The scores of `recommend` beside the map of rules."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fedlgm_lab.studies import files
from fedlgm_lab.studies.tables import recommend_map
from fedlgm_lab.studies.tables.recommend_map import Cell
from fedlgm_lab.studies.tables.rule_map import studies_of_map
from fedlgm_lab.studies.tables.store import Values

RESULTS = Path(__file__).parents[4] / "docs" / "results"
STORE = Values(RESULTS / "recommend-map.json")
KEPT = STORE.values
SCORES = {"gaussian": 1.0, "uniform": 2.0, "snr-consistent": 0.3, "water-filling": 1.1}


def cell(scores: dict[str, float], gains: dict[str, float], *place: str) -> Cell:
    """A cell of four seeds whose rules have these gains in every seed but for a tenth."""
    figures = {
        rule: [50 + gain + part * gain for part in (-0.1, 0, 0, 0.1)]
        for rule, gain in ({"gaussian": 0.0} | gains).items()
    }
    return Cell(place, scores, pd.DataFrame(figures))


GAINING = cell(
    SCORES, {"uniform": 9.0, "snr-consistent": -5.0, "water-filling": 1.0}, "x", "3", "Adam", "one"
)
LOSING = cell(
    SCORES, {"uniform": -9.0, "snr-consistent": 5.0, "water-filling": -1.0}, "x", "8", "Adam", "one"
)


def test_every_network_of_the_map_has_its_scores() -> None:
    names = [name for study in studies_of_map() for name, _ in recommend_map.recipes(study)]
    assert names == list(KEPT)
    for initial in range(6):
        assert len(recommend_map.cells(STORE, initial)) == len(names) / 6


def test_scores_do_not_depend_on_the_budget() -> None:
    """Cells that differ only in the budget are drawn together for this reason."""
    for name, scores in KEPT.items():
        if name.startswith(("map-adam,", "map-sgd,")):
            assert scores == KEPT[name.replace(",", "-8,", 1)]


@pytest.mark.parametrize(
    ("study", "network"),
    [
        ("map-sgd", "ratio 6"),
        ("map-sgd", "ratio 1000"),
        pytest.param(
            "map-words-sgd",
            "ratio 235",
            marks=pytest.mark.skipif(
                not Path("/usr/lib/bible.data").is_file(), reason="bible-kjv-text is missing"
            ),
        ),
    ],
)
def test_the_kept_scores_are_those_of_recommend(study: str, network: str) -> None:
    """Another processor rounds the training differently and moves a score by up to 7 %, and by less
    than the range of the scores over the initial models."""
    name = f"{study}, {network}, 0"
    recipe = dict(recommend_map.recipes(files.load(study)))[name]
    scores, kept = recommend_map.predict(recipe), KEPT[name]
    assert scores.keys() == kept.keys()
    for rule, score in scores.items():
        initials = [KEPT[f"{study}, {network}, {initial}"][rule] for initial in range(6)]
        most = min(0.08 * kept[rule], max(initials) - min(initials))
        assert abs(score - kept[rule]) <= most, rule
    assert bool(kept) == (network != "ratio 1000")


def test_scores_and_figures_in_one_order_correlate() -> None:
    assert GAINING.correlation() == pytest.approx(1.0)
    assert LOSING.correlation() == pytest.approx(-1.0)
    scored, mean, interval, halves, ceiling, over_pairs = recommend_map.correlations(
        [GAINING, GAINING._replace(scores={})]
    )
    assert (scored, mean, interval, halves, ceiling, over_pairs) == (
        "1 of 2", "+1.00", "+1.00 to +1.00", "+1.00", "1.00", "+1.00",
    )  # fmt: skip


def test_cells_of_one_network_are_drawn_together() -> None:
    other = LOSING._replace(place=("x", "8", "Adam", "two"))
    for second, interval in ((LOSING, "+0.00 to +0.00"), (other, "-1.00 to +1.00")):
        line = recommend_map.correlations([GAINING, second])
        assert line[:3] == ["2 of 2", "+0.00", interval]


def test_calls_are_split_at_the_cut_offs_of_the_advice() -> None:
    called = recommend_map.calls([GAINING])
    assert {call: [pair.rule for pair in some] for call, some in called.items()} == {
        "better": ["uniform"],
        "worse": ["snr-consistent"],
        "neither": ["water-filling"],
    }
    both = called["better"] + recommend_map.calls([LOSING])["better"]
    assert recommend_map.outcome(both) == ["2", "+0.0", "-9.0 to +9.0", "1", "1", "1"]
