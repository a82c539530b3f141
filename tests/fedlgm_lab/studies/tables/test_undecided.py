"""The table of undecided claims follows from the kept studies and the kept times."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from fedlgm.errors import ConfigError
from fedlgm_lab.studies.tables import maker, outcomes, undecided

RESULTS = Path(__file__).parents[4] / "docs" / "results"
STORE = maker.load("undecided").open(RESULTS)
ROWS = cache(undecided.rows)


def test_every_undecided_claim_has_its_hours_or_the_reason_why_not() -> None:
    lines = ROWS(STORE)
    told = outcomes.summary(RESULTS, outcomes.studies(RESULTS))
    assert re.search(rf"\b{len(lines)} of \d+ claims are not decided", told)
    for line in lines:
        assert (line[-1] == "-") == (line[3] in ("-", "more than 1000")), line


def test_hours_are_further_seeds_times_runs_times_seconds() -> None:
    expected = {"000-table-2-mnist": 2, "000-figure-1": 6}  # two methods, there at three budgets
    timed = [line for line in ROWS(STORE) if line[-1] != "-"]
    assert any(f"[{study}](#{study})" == line[0] for study in expected for line in timed)
    for link, claim, seeds, needed, runs, seconds, hours in timed:
        study = link[1 : link.index("]")]
        kept = json.loads((RESULTS / "studies" / f"{study}.json").read_text(encoding="utf-8"))
        stated = {one["says"]: (one["seeds"], one["needed"]) for one in kept["claims"]}
        assert stated.get(claim, (int(seeds), int(needed))) == (int(seeds), int(needed))
        further = int(needed) - int(seeds)
        assert int(runs) >= 2  # a claim compares at least two
        assert int(runs) == expected.get(study, int(runs))
        assert float(seconds) in {row["seconds"] for row in STORE.find(study=study)}
        assert float(hours) == pytest.approx(further * int(runs) * float(seconds) / 3600, rel=0.06)


def test_a_run_of_a_kept_study_is_timed() -> None:
    kept = json.loads((RESULTS / "studies" / "map-sgd.json").read_text(encoding="utf-8"))
    kept["set"] |= {"federation.rounds": 1}
    assert 0 < undecided.time_run(kept, "gaussian")["seconds"] < 60


def test_a_run_that_fails_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing data set gave a fifth of a second as the time of a run."""
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path))
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")
    kept = json.loads((RESULTS / "studies" / "voted-share-mnist.json").read_text(encoding="utf-8"))
    kept["set"] |= {"data.dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="voted-share-mnist: its run has no time"):
        undecided.time_run(kept, "gaussian")
