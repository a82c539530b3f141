"""The paper's table of rules by numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm_lab.studies.tables import allocation_shares

RESULTS = Path(__file__).parents[4] / "docs" / "results"


def test_the_paper_s_first_table_is_kept_as_it_is_computed() -> None:
    kept = allocation_shares.MAKER.open(RESULTS).values["rows"]
    for row, found in zip(kept, allocation_shares.measure_rules(), strict=True):
        assert row["rule"] == found["rule"]
        assert row["shares"] == pytest.approx(found["shares"], abs=1e-12)
        assert found["largest_deviation"] < 1e-12
        assert found["objective"] <= found["least_of_random"]
