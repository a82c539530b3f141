"""Searches that publish the best of a secret number of runs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pandas
import pytest
from dp_accounting import dp_event
from safetensors import safe_open
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import beta, chisquare

import simulations
from fedlgm import data
from fedlgm.errors import ConfigError, DivergedError, LedgerError, RunError
from fedlgm.privacy import Ledger, selection_epsilon
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import gaussian_event, repeat_event
from fedlgm.privacy.selection import draw_runs, selection_event
from fedlgm_lab.tune import tune as tuning
from simulations import launch
from simulations.config.recipe import load
from simulations.exports.predict import predict

SHORT = {
    "federation.rounds": 2,
    "federation.rate": 1.0,
    "federation.clients": 30,
    "privacy.delta": 1e-3,
}
SEARCH = {"federation.server_lr": [0.1, 0.2], "mechanism.bound": [0.5, 1.0]}
PUBLIC = {"search.json", "ledger.sqlite", "recipe.toml", "result.json", "model.safetensors"}


def _searched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runs: int = 3, **options: object
) -> tuning.TuneResult:
    monkeypatch.setattr(tuning, "draw_runs", lambda *_: runs)
    return simulations.tune(
        "digits", search=SEARCH, expected_runs=10, overrides=SHORT, folder=folder, **options
    )


def test_the_best_run_is_published_and_the_whole_search_is_charged_once(
    tmp_path, monkeypatch, capsys
):
    found = _searched(tmp_path / "search", monkeypatch)
    rows = [
        json.loads(line)
        for line in (found.folder / "private" / "runs.jsonl").read_text().splitlines()
    ]
    best = max(rows, key=lambda row: row["score"])
    assert len(rows) == 3
    assert (found.settings, found.accuracy) == (best["settings"], best["score"])
    z = simulations.load_recipe("digits", [f"{k}={v}" for k, v in SHORT.items()])
    with Ledger(found.folder / "ledger.sqlite") as ledger:
        (charge,) = ledger.charges()
        assert ledger.epsilon(z.privacy.delta) == found.epsilon
    assert isinstance(charge.event, dp_event.RepeatAndSelectDpEvent)
    assert (charge.event.mean, charge.event.shape) == (10.0, 0.0)
    assert found["epsilon_one_run"] < found.epsilon < found.epsilon_all_runs
    assert capsys.readouterr() == ("", "")


def test_neither_the_number_of_runs_nor_losers_nor_order_are_public(tmp_path, monkeypatch):
    """Searches that differ in them alone differ in nothing outside `private/`, but for what the
    best run is."""
    one = _searched(tmp_path / "one", monkeypatch, runs=1)
    many = _searched(tmp_path / "many", monkeypatch, runs=4)
    for found in (one, many):
        assert {path.name for path in found.folder.iterdir()} == PUBLIC | {"private"}
        assert (found.folder / "private").stat().st_mode & 0o077 == 0
        times = {path.stat().st_mtime for path in found.folder.iterdir()} | {
            found.folder.stat().st_mtime
        }
        assert len(times) == 1  # the time of the charge
    same = ("search.json",)
    assert all(
        (one.folder / name).read_bytes() == (many.folder / name).read_bytes() for name in same
    )
    result = json.loads((many.folder / "result.json").read_text())
    assert set(result) == set(json.loads((one.folder / "result.json").read_text()))
    assert not {"run", "runs", "seconds", "started"} & set(result)
    for name in ("recipe.toml", "result.json", "search.json"):
        text = (many.folder / name).read_text()
        assert "private" not in text.replace("a trusted server", "")
        assert (
            "seed = 7" in text or name != "recipe.toml"
        )  # the seed of the search, not that of the run
    with safe_open(many.folder / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["search"])["epsilon"] == many.epsilon


def test_a_stopped_search_stays_charged_and_is_never_continued(tmp_path, monkeypatch):
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "simulate", stopped)
    with pytest.raises(KeyboardInterrupt):
        _searched(tmp_path / "search", monkeypatch)
    with Ledger(tmp_path / "search" / "ledger.sqlite") as ledger:
        charged = ledger.epsilon(1e-3)
    monkeypatch.undo()
    with pytest.raises(RunError, match="made once and never continued"):
        _searched(tmp_path / "search", monkeypatch)
    assert charged > 8
    assert not (tmp_path / "search" / "result.json").exists()


def test_a_search_whose_charge_fails_leaves_no_folder(tmp_path, monkeypatch):
    def failing(*_: object, **__: object) -> None:
        raise LedgerError("disk full")

    monkeypatch.setattr(Ledger, "charge", failing)
    with pytest.raises(LedgerError, match="disk full"):
        _searched(tmp_path / "search", monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_the_message_of_a_run_that_fails_does_not_say_which_one_it_was(tmp_path, monkeypatch):
    def failing(*_: object, run_dir: Path, **__: object) -> None:
        raise RunError(f"{run_dir}: disk full")

    monkeypatch.setattr(launch, "simulate", failing)
    with pytest.raises(RunError, match="a run of the search failed") as caught:
        _searched(tmp_path / "search", monkeypatch)
    assert "0000" not in str(caught.value)
    assert "disk full" in (tmp_path / "search" / "private" / "error.txt").read_text()


def test_runs_that_diverge_lose_and_a_search_without_a_model_publishes_none(tmp_path, monkeypatch):
    def diverged(*_: object, **__: object) -> None:
        raise DivergedError("not finite")

    monkeypatch.setattr(launch, "simulate", diverged)
    found = _searched(tmp_path / "search", monkeypatch)
    assert found.settings == {}
    assert {path.name for path in found.folder.iterdir()} == PUBLIC - {
        "recipe.toml",
        "model.safetensors",
    } | {"private"}
    with pytest.raises(RunError, match="publishes no model"):
        found.model()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"search": {}}, "give at least one key"),
        ({"search": {"privacy.epsilon": [1.0, 2.0]}}, "cannot be searched"),
        ({"search": {"run.seed": [1, 2]}}, "cannot be searched"),
        ({"search": {"federation.rounds": [2, 3]}}, "do not all cost the same"),
        ({"search": {"federation.clients": [20, 30]}}, "the runs divide the data differently"),
        ({"search": {"training.lr": 0.1}}, "must be a list of values"),
        ({"search": {"training.learning": [0.1]}}, "training.learning"),
        ({"expected_runs": 1.0}, "expected_runs"),
        ({"law": "uniform"}, "unknown law"),
        (
            {"overrides": {"mechanism.name": "none"}, "search": {"training.lr": [0.1, 0.5]}},
            "no cost of a search is proven",
        ),
        ({"overrides": {"run.audit": True}}, "canaries"),
        (
            {"overrides": {"privacy.trust": "local", "privacy.max_participations": 5}},
            "trust = 'local': .* sees every client's release",
        ),
        (
            {"recipe": "distributed-digits", "overrides": {}},
            "trust = 'distributed': .* sees every round's noised sum",
        ),
    ],
)
def test_what_cannot_be_charged_is_refused_before_anything_is_written(tmp_path, change, message):
    arguments = {
        "recipe": "digits",
        "search": SEARCH,
        "overrides": SHORT,
        "folder": tmp_path / "search",
    } | change
    with pytest.raises(ConfigError, match=message):
        simulations.tune(**arguments)
    assert not (tmp_path / "search").exists()


@pytest.mark.parametrize(("z", "everything"), [(4.2776, 3.45), (1.4817, 13.89)])
def test_all_runs_published_cost_what_the_literature_of_searches_says(z, everything):
    run = repeat_event(gaussian_event(z, 0.1), 100)
    assert round(composed_epsilon([(run, 10)], 1e-5, "rdp"), 2) == pytest.approx(
        everything, abs=0.011
    )


@pytest.mark.parametrize("law", ["logarithmic", "geometric", "poisson"])
def test_numbers_of_runs_follow_their_law(law):
    rng, mean, draws = np.random.default_rng(5), 10.0, 40_000
    counts = np.bincount([draw_runs(mean, law, rng) for _ in range(draws)], minlength=30)
    k = np.arange(30)
    if law == "logarithmic":
        gamma = _gamma(mean)
        law_of = np.where(k > 0, (1 - gamma) ** k / np.maximum(k, 1) / math.log(1 / gamma), 0)
    elif law == "geometric":
        law_of = np.where(k > 0, (1 / mean) * (1 - 1 / mean) ** np.maximum(k - 1, 0), 0)
    else:
        law_of = np.exp(k * math.log(mean) - mean - np.array([math.lgamma(i + 1) for i in k]))
    used = law_of * draws > 5
    observed, expected = counts[:30][used], law_of[used] * draws
    rest = draws - observed.sum(), draws - expected.sum()
    assert chisquare([*observed, rest[0]], [*expected, rest[1]]).pvalue > 1e-3


def _gamma(mean: float) -> float:
    return float(brentq(lambda g: (1 / g - 1) / math.log(1 / g) - mean, 1e-6, 0.99))


@pytest.mark.parametrize("law", ["logarithmic", "geometric"])
def test_an_audit_of_a_search_stays_below_its_epsilon(law):
    """A number with Gaussian noise is released; the best of K, the largest, is published: the
    optimum is known."""
    z, delta, trials, rng = 1.0, 1e-3, 200_000, np.random.default_rng(9)
    bests = []
    for value in (0.0, 1.0):
        counts = np.array([draw_runs(5.0, law, rng) for _ in range(2000)])[
            rng.integers(2000, size=trials)
        ]
        # The largest of K normal numbers is the quantile at U^(1 / K).
        bests.append(value + z * ndtri(rng.random(trials) ** (1 / counts)))
    claimed = composed_epsilon([(selection_event(gaussian_event(z), 5.0, law), 1)], delta)
    half = trials // 2
    thresholds = np.quantile(bests[1][:half], np.linspace(0.5, 0.9999, 40))
    lower = [lower_bound(bests[1][half:] > t, bests[0][half:] > t, delta) for t in thresholds]
    single = composed_epsilon([(gaussian_event(z), 1)], delta)
    assert 0 < max(lower) < claimed
    assert claimed > single
    assert selection_epsilon(z, 1.0, 1, delta, 5.0, law) == pytest.approx(claimed)


def lower_bound(
    hits: np.ndarray, alarms: np.ndarray, delta: float, confidence: float = 0.999
) -> float:
    """Clopper-Pearson lower bound of epsilon."""
    tail = 1 - confidence
    true = beta.ppf(tail, hits.sum(), (~hits).sum() + 1)
    false = beta.ppf(1 - tail, alarms.sum() + 1, (~alarms).sum())
    return math.log(max(true - delta, 1e-12) / false)


def test_a_seeded_search_is_repeated_and_says_that_it_protects_nobody(tmp_path):
    results = [
        simulations.tune(
            "digits", search=SEARCH, expected_runs=1.5, overrides=SHORT, folder=tmp_path / name
        )
        for name in ("a", "b")
    ]
    assert results[0]["model_sha256"] == results[1]["model_sha256"]
    assert results[0]["noise_reproducible"]
    assert "seed is public" in results[0]["guarantee"]
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b")
    assert load(tmp_path / "a" / "recipe.toml").run.seed == 7


def test_who_stops_a_search_reads_that_it_is_spent(tmp_path, monkeypatch, capsys):
    """The command said "interrupted", as where nothing is lost."""

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "simulate", stopped)
    with pytest.raises(KeyboardInterrupt):
        _searched(tmp_path / "search", monkeypatch)
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        f"interrupted; {tmp_path / 'search'} stays charged with the whole search, and a search is "
        "not continued"
    )
    with Ledger(tmp_path / "search" / "ledger.sqlite") as ledger:
        assert len(list(ledger.charges())) == 1


def test_the_published_model_of_tables_has_the_metadata_of_an_export_and_the_cost_of_the_search(
    tmp_path,
):
    found = simulations.tune(
        "ten-hospitals",
        search={"training.lr": [1.0]},
        expected_runs=1.5,
        folder=tmp_path / "search",
        overrides={"federation.rounds": 2, "privacy.delta": 1e-3, "privacy.accountant": "rdp"},
    )
    with safe_open(found.folder / "model.safetensors", "pt") as file:
        told = file.metadata()
    result = simulations.simulate(
        "ten-hospitals",
        overrides={"federation.rounds": 1, "privacy.accountant": "rdp"},
        run_dir=tmp_path / "run",
    )
    assert set(told) - {"search"} == set(_texts(result)) - {"claimed_epsilon", "guarantee_status"}
    assert json.loads(told["epsilon"]) == found.epsilon == json.loads(told["search"])["epsilon"]
    with Ledger(found.folder / "ledger.sqlite") as ledger:
        assert told["ledger_head"] == str(ledger.head())
    assert (told["guarantee"], told["model_sha256"]) == (found["guarantee"], found["model_sha256"])
    assert json.loads(told["columns"]) == [*data.load("breast-cancer").columns]
    rows = pandas.DataFrame(
        data.load("breast-cancer").test_x, columns=[c["name"] for c in json.loads(told["columns"])]
    )
    rows.to_csv(tmp_path / "rows.csv", index=False)
    assert (
        predict(found.folder / "model.safetensors", tmp_path / "rows.csv").guarantee
        == found["guarantee"]
    )


def _texts(result: simulations.RunResult) -> dict[str, str]:
    """Metadata inside an export of a run."""
    file = result.export(result.folder / "model.safetensors")["file"]
    with safe_open(file, "pt") as opened:
        found: dict[str, str] = opened.metadata()
    return found
