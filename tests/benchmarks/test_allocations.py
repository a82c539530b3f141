"""The table of its page is what the benchmark kept."""

from __future__ import annotations

import json

import pytest

from benchmarks import allocation_shares
from benchmarks import allocations as bench


def test_the_table_comes_from_the_kept_file() -> None:
    values = json.loads(bench.KEPT.read_text(encoding="utf-8"))
    page = (bench.RESULTS / "allocations.md").read_text(encoding="utf-8")
    assert page.split("<!-- table -->")[1].strip() == bench.page(values).strip()


def test_the_paper_s_first_table_is_kept_as_it_is_computed() -> None:
    kept = json.loads(allocation_shares.KEPT.read_text(encoding="utf-8"))["rows"]
    for row, found in zip(kept, allocation_shares.measured(), strict=True):
        assert row["rule"] == found["rule"]
        assert row["shares"] == pytest.approx(found["shares"], abs=1e-12)
        assert found["largest_deviation"] < 1e-12
        assert found["objective"] <= found["least_of_random"]
