"""Searches: seeds of their own, the same list for every method, and no claim that hangs on the
rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from own_objects import DATA, Net

import simulations
from fedlgm.errors import ConfigError
from fedlgm_lab.studies import records, results
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.records import Records, Searched
from fedlgm_lab.studies.search import Search
from fedlgm_lab.studies.statistics import holm, interval
from simulations.config import recipe as recipes

SEARCH = Search({"training.lr": [0.1, 0.2, 0.4]})


def test_best_neighbours_and_edges() -> None:
    assert SEARCH.best({(0.1,): 0.5, (0.2,): 0.7, (0.4,): float("nan")}, "higher") == (0.2,)
    assert SEARCH.best({(0.1,): 0.5, (0.2,): 0.7}, "lower") == (0.1,)
    assert SEARCH.best({(0.1,): float("nan")}, "lower") is None
    assert [SEARCH.neighbour((0.2,), ("training.lr", step)) for step in (-1, 1)] == [(0.1,), (0.4,)]
    assert SEARCH.neighbour((0.4,), ("training.lr", 1)) is None
    assert (SEARCH.edges((0.4,)), SEARCH.edges((0.2,))) == (["training.lr"], [])
    assert Search.of({"a.b": [3, 1, 2, 1]}, 3, {}).axes == {"a.b": [1, 2, 3]}
    assert not set(SEARCH.repetitions) & set(range(100))


@pytest.mark.parametrize(
    ("search", "seeds", "message"),
    [
        ({"training.lr": [0.1, 0.2]}, 2, "at least 3 seeds"),
        ({"training.lr": [0.1]}, 3, "at least 2 values"),
        ({"training.lr": 0.1}, 3, "at least 2 values"),
        ({"privacy.epsilon": [1, 2]}, 3, "in the grid and in the search"),
        ({}, 3, "search must be a mapping"),
        ({"training.rate": [1, 2]}, 3, "training.rate: unknown key"),
    ],
)
def test_what_is_no_search_is_refused(search, seeds, message, tmp_path: Path) -> None:
    grid = {"privacy.epsilon": [8.0]}
    with pytest.raises(ConfigError, match=message):
        simulations.study(grid=grid, search=search, search_seeds=seeds, folder=tmp_path)


def frame(a: list[float], b: list[float], rate: float = 0.2) -> pd.DataFrame:
    rows = [
        (label, rate, seed, value, 8.0)
        for label, own in (("a", a), ("b", b))
        for seed, value in enumerate(own)
    ]
    return pd.DataFrame(rows, columns=["method", "training.lr", "seed", "accuracy", "epsilon"])


WINS, TIES = ([0.8, 0.82, 0.81], [0.7, 0.71, 0.72]), ([0.8, 0.7, 0.75], [0.79, 0.71, 0.75])

SIDES = ("method", "a", "b")


@pytest.mark.parametrize(
    ("lower", "higher", "claimed"),
    [
        (WINS, WINS, True),
        (WINS, TIES, False),
        (TIES, WINS, False),
        (WINS, ([], []), False),
        (WINS[::-1], WINS, False),
    ],
)
def test_a_difference_is_claimed_only_if_it_holds_at_both_neighbouring_rates(
    lower, higher, claimed: bool
) -> None:
    """At an edge of the list there is no neighbour, so nothing is claimed."""
    beside = [frame(*lower), frame(*higher)]
    found = results._differences(frame(*WINS), beside, SIDES, "accuracy", [], {})
    assert found.p < 0.05
    assert found.claimed is claimed
    without = results._differences(
        frame(*WINS), None, SIDES, "accuracy", ["training.lr"], {"training.lr": 0.2}
    )
    assert without.claimed


def test_a_metric_besides_the_headline_at_an_edge() -> None:
    """A frame without runs has a column for the headline alone."""
    beside = [frame(*WINS), frame(*WINS).head(0).drop(columns="accuracy")]
    found = results._differences(frame(*WINS), beside, SIDES, "accuracy", [], {})
    assert not found.cells["claimed"].any()
    assert found.seeds == len(WINS[0])


def test_holm_keeps_the_level_of_a_family() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.9]) == [1.0, 1.0]
    draw = np.random.default_rng(0)
    families = draw.uniform(size=(2000, 8))
    assert np.mean([min(holm(list(p))) < 0.05 for p in families]) <= 0.06
    assert np.mean([min(p) < 0.05 for p in families]) > 0.3


def test_an_interval_needs_two_seeds() -> None:
    assert interval([2.0, 3.0, 4.0]) == pytest.approx(
        (3 - 4.302653 / 3**0.5, 3 + 4.302653 / 3**0.5)
    )
    assert np.isnan(interval([1.0])).all()


@pytest.mark.slow
def test_every_method_searches_the_same_list_on_seeds_of_its_own(tmp_path: Path) -> None:
    changes = {
        "federation.clients": 20,
        "federation.rounds": 2,
        "federation.rate": 0.5,
        "privacy.delta": 0.01,
        "privacy.accountant": "rdp",
        "run.seed": 7,
        "run.evaluate_every": 2,
    }
    found = simulations.study(
        model=Net,
        data=DATA,
        grid={"mechanism": ["uniform", "gaussian"]},
        seeds=2,
        overrides=changes,
        search={"training.lr": [0.05, 0.2, 0.8]},
        folder=tmp_path,
        progress=False,
    )
    curve = found.search
    assert curve["training.lr"].tolist() == [0.05, 0.2, 0.8] * 2
    assert (curve["n"] == 3).all()
    assert curve.groupby("method")["chosen"].sum().tolist() == [1, 1]
    for method, own in curve.groupby("method"):
        best = own.loc[own["accuracy"].idxmax()]
        assert best["chosen"]
        frame = found.to_frame()
        final = frame[frame["method"] == method]
        assert (final["training.lr"] == best["training.lr"]).all()
        assert final["seed"].tolist() == [0, 1]
    assert curve["edge"].tolist() == ["training.lr", "", "training.lr"] * 2
    assert "claimed" in found.difference("uniform", "gaussian").cells


def test_chosen_values_are_marked_beside_keys_with_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [{"model.hidden": [8], "training.lr": rate} for rate in (0.1, 0.2, 0.4)]
    jobs = [
        Job("a", 0, recipes.load("digits"), f"run {i}", point) for i, point in enumerate(points)
    ]
    rows = [
        {"method": "a", "model.hidden": (8,), "training.lr": job.point["training.lr"]}
        for job in jobs
    ]
    figures = {
        "status": "finished",
        "accuracy": 0.9,
        "epsilon": 8.0,
        "claimed_epsilon": 8.0,
        "guarantee": "proven",
    }
    frame = pd.DataFrame(rows).assign(**figures)
    monkeypatch.setattr(records.frames, "runs", lambda *_: frame)
    monkeypatch.setattr(records.frames, "history", lambda *_: frame)
    monkeypatch.setattr(records, "together", lambda *_: {})
    curve = Records.of_runs(Path(), jobs[2:], before=Searched(SEARCH, jobs, {})).search
    assert curve is not None
    assert curve["chosen"].tolist() == [False, False, True]
    assert curve["edge"].tolist() == ["training.lr", "", "training.lr"]
