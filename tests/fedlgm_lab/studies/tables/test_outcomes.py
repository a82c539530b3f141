"""Kept outcomes of studies: the page is what the files give, and tables can be made from them
again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedlgm.errors import ConfigError
from fedlgm_lab.studies import files
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables import outcomes

RESULTS = Path(__file__).parents[4] / "docs" / "results"
KEPT = outcomes.studies(RESULTS)


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_file_is_an_outcome_of_its_study(name: str) -> None:
    kept, asked = KEPT[name], files.load(name)
    assert (kept["study"], kept["recipe"]) == (name, asked.recipe)
    assert all(
        method in asked.grid["mechanism"] for method in kept["grid"]["mechanism"]
    )  # those of its claims, or all
    frame = Study.read(RESULTS / "studies" / f"{name}.json").to_frame()
    assert frame["seed"].nunique() >= 3
    assert (frame["status"] == "finished").all()
    assert not {"seconds", "folder"} & set(frame)
    file = RESULTS / "studies" / f"{name}.json"
    wanted = {one.says: one.outcome for one in outcomes.check_claims_of(name, file)}
    assert {one["says"]: one["outcome"] for one in kept["claims"]} == wanted
    seeds = [one.seeds for one in outcomes.check_claims(RESULTS, name)]
    assert max(seeds) >= 3
    assert all(count >= 3 or count == 0 for count in seeds)  # no method of a claim is run in part


@pytest.mark.parametrize("name", outcomes.DRAWN)
def test_a_table_is_made_again_from_the_kept_file(name: str) -> None:
    found = Study.read(RESULTS / "studies" / f"{name}.json")
    first = found.table().iloc[0]
    values = [
        row["accuracy"]
        for row in KEPT[name]["runs"]
        if all(row[key] == first[key] for key in found.keys)
    ]
    assert first["accuracy"] == pytest.approx(np.mean(values))
    assert f"{100 * np.mean(values):.2f}" in found.to_latex()
    assert f"{100 * np.mean(values):.1f} ±" in outcomes.section(RESULTS, name, KEPT[name])


def test_methods_are_rows_and_runs_without_privacy_stand_at_every_epsilon() -> None:
    found = Study.read(RESULTS / "studies" / "004-table-5.json")
    header, _, *lines = (
        line.strip("| ").split(" | ") for line in outcomes.cells(found).splitlines()
    )
    assert header[0] == "accuracy (%)"
    rows = {line[0]: dict(zip(header[1:], line[1:], strict=True)) for line in lines}
    assert set(rows) == {"ladp", "full-dp", "time-varying", "adapldp", "none"}
    frame = found.to_frame()
    for alpha in (0.1, 0.5, 10.0):
        for epsilon in (4.0, 8.0):
            column = f"alpha {alpha:g}, epsilon {epsilon:g}"
            own = frame[(frame["data.alpha"] == alpha) & (frame["privacy.epsilon"] == epsilon)]
            free = frame[(frame["data.alpha"] == alpha) & (frame["method"] == "none")]
            mean = own[own["method"] == "ladp"]["accuracy"].mean()
            assert rows["ladp"][column].startswith(f"{100 * mean:.1f} ± ")
            assert rows["none"][column].startswith(f"{100 * free['accuracy'].mean():.1f} ± ")


def test_a_statement_that_the_paper_does_not_make_is_not_counted_as_its_claim() -> None:
    """Slow scores, which are not in the LaDP-FL paper, were counted as a claim of it."""
    told = outcomes.summary(RESULTS, {"ladp-one-budget": KEPT["ladp-one-budget"]})
    assert "| 004: LaDP-FL | 2 refuted, 1 not decided | - |" in told
    assert "| none: statements of this library | 1 not decided | - |" in told


def test_only_outcomes_of_bundled_studies_are_kept(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"holds no study\.json"):
        outcomes.keep(tmp_path, tmp_path)
    (tmp_path / "study.json").write_text('{"study": "mine"}')
    with pytest.raises(ConfigError, match="no bundled study"):
        outcomes.keep(tmp_path, tmp_path)


def test_tuned_runs_are_kept_beside_those_at_the_papers_settings(tmp_path) -> None:
    (tmp_path / "run" / "tuned").mkdir(parents=True)
    for part, seeds in (("", 3), ("tuned", 5)):
        told = f'{{"study": "002-figure-6", "seeds": {seeds}}}'
        (tmp_path / "run" / part / "study.json").write_text(told)
    outcomes.keep(tmp_path / "run", tmp_path)
    for part, seeds in (("", 3), ("tuned", 5)):
        kept = (tmp_path / "studies" / part / "002-figure-6.json").read_text()
        assert json.loads(kept)["seeds"] == seeds


@pytest.mark.parametrize(
    ("images", "digits", "budgets"),
    [
        ("cifar10", 0, "epsilon 0.2 and 0.5"),
        ("cifar100", 1, "these budgets"),
    ],
)
def test_the_page_of_ladp_states_the_accuracies_of_its_runs_on_cifar(
    images: str, digits: int, budgets: str
) -> None:
    runs = json.loads((RESULTS / f"ladp-{images}-cnn.json").read_text(encoding="utf-8"))["runs"]
    noisy = [100 * run["accuracy"] for run in runs if run["method"] != "none"]
    plain = [100 * run["accuracy"] for run in runs if run["method"] == "none"]
    text = " ".join((RESULTS / "ladp.md").read_text(encoding="utf-8").split())
    assert f"are at {min(noisy):.{digits}f} to {max(noisy):.{digits}f} % at {budgets}" in text
    assert f"without noise is at {min(plain):.{digits}f} to {max(plain):.{digits}f} %" in text
