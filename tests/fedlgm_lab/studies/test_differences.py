"""The difference of two methods over all cells of a study, where runs are missing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import simulations
from fedlgm_lab.studies import results


def frame_of(figures: dict[tuple[str, int, int], float]) -> pd.DataFrame:
    """Rows of a study with the grid's key "k" and these figures by method, k and seed."""
    names = ("method", "k", "seed")
    return pd.DataFrame(
        [dict(zip(names, at, strict=True), acc=a, epsilon=1.0) for at, a in figures.items()]
    )


def test_the_difference_over_all_cells_is_paired_by_seed_where_runs_are_missing() -> None:
    """Cells cut to equal length paired seed 0 of one cell with seed 1 of another: 16 % false
    alarms."""
    draw = np.random.default_rng(1)
    seeds, cells = draw.normal(size=5), [0, 1]
    figures = {("a", k, s): seeds[s] + 0.1 * draw.normal() for k in cells for s in range(5)}
    figures |= {("b", k, s): 0.0 for k in cells for s in range(5)}
    figures["a", 1, 0] = np.nan
    found = results._differences(frame_of(figures), None, ("method", "a", "b"), "acc", ["k"], {})
    means = [np.mean([figures["a", k, s] for k in cells]) for s in range(1, 5)]
    right = simulations.difference(means, np.zeros(4))
    assert (found.mean, found.p, found.seeds) == pytest.approx((right.mean, right.p, 4))
    assert found.cells["left_out"].tolist() == [0, 1]


def test_no_difference_is_claimed_over_the_runs_that_did_not_diverge() -> None:
    figures = {("a", 0, s): 1.0 + 0.01 * s for s in range(8)} | {("b", 0, s): 0.0 for s in range(8)}
    frame = frame_of(figures)
    assert results._differences(frame, None, ("method", "a", "b"), "acc", ["k"], {}).claimed
    some = frame_of(figures | {("a", 0, 3): np.nan})
    assert not results._differences(some, None, ("method", "a", "b"), "acc", ["k"], {}).claimed


def test_no_difference_is_claimed_in_every_cell_if_a_method_diverged_in_one_of_them() -> None:
    figures = {("a", k, s): 1.0 + 0.01 * s for k in (0, 1) for s in range(8)}
    figures |= {("b", k, s): 0.0 if k == 0 else np.nan for k in (0, 1) for s in range(8)}
    found = results._differences(frame_of(figures), None, ("method", "a", "b"), "acc", ["k"], {})
    assert (found.mean > 1, found.claimed) == (True, False)
    assert found.cells["claimed"].tolist() == [True, False]
    assert found.cells["left_out"].tolist() == [0, 8]


def test_a_difference_is_not_claimed_if_runs_at_the_next_settings_diverged() -> None:
    figures = {("a", 0, s): 1.0 + 0.01 * s for s in range(8)} | {("b", 0, s): 0.0 for s in range(8)}
    frame, beside = frame_of(figures), frame_of(figures | {("b", 0, 3): np.nan})
    for other, claimed in ((frame, True), (beside, False)):
        found = results._differences(frame, [other], ("method", "a", "b"), "acc", ["k"], {})
        assert found.claimed is claimed


def test_cells_that_share_one_seed_have_no_difference_over_all() -> None:
    figures = {(m, k, s): float(s * (m == "a")) for m in "ab" for k in (0, 1) for s in (k, k + 1)}
    found = results._differences(frame_of(figures), None, ("method", "a", "b"), "acc", ["k"], {})
    assert np.isnan(found.p)
    assert found.seeds == 1
