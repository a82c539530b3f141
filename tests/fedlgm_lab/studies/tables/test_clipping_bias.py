"""The bias of LM-DP-SGD over budget, threshold and emphasis: which runs are made, and what the page
says of them."""

from __future__ import annotations

import pytest

from fedlgm_lab.studies import files
from fedlgm_lab.studies.tables import clipping_bias as bench
from fedlgm_lab.studies.tables.store import Kept


@pytest.fixture
def kept(tmp_path) -> Kept:
    """Bias that falls with the budget, grows with the threshold, and does not depend on the
    emphasis."""
    made = Kept(tmp_path / "kept.json")
    for study, (key, _) in bench.STUDIES.items():
        for place, value in enumerate(files.load(study).grid[key]):
            for seed in range(bench.SEEDS):
                slope = {"002-figure-5": -0.1, "002-figure-6": 0.1}.get(study, 0.0)
                bias = [1.0 + (slope + 0.01 * seed) * place] * 5
                made.rows.append(
                    {
                        "study": study,
                        "key": key,
                        "value": value,
                        "seed": seed,
                        "run": "1",
                        "bias": bias,
                    }
                )
    return made


def test_the_page_says_whether_the_paper_is_reproduced(kept: Kept) -> None:
    rows = bench.page(kept).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["reproduced |", "refuted |", "not decided |"]
    assert "1: 1.000 ± 0.000" in rows[0]


def test_figures_without_three_seeds_are_left_out(kept: Kept) -> None:
    kept.rows = [row for row in kept.rows if row["study"] != "002-figure-5" or row["seed"]]
    assert len(bench.page(kept).splitlines()) == 4


def test_studies_share_the_runs_whose_settings_are_equal() -> None:
    made = {study: bench.jobs(study) for study in bench.STUDIES}
    seeds = [{job.recipe.run.seed for job in jobs if job.repetition == 0} for jobs in made.values()]
    assert [len(one) for one in seeds] == [4, 5, 5]
    assert len(set.union(*seeds)) == 13
    assert {job.method for jobs in made.values() for job in jobs} == {bench.METHOD}
