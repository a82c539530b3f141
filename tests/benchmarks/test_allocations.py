"""The table of its page is what the benchmark kept."""

from __future__ import annotations

import json

from benchmarks import allocations as bench


def test_the_table_comes_from_the_kept_file() -> None:
    values = json.loads(bench.KEPT.read_text(encoding="utf-8"))
    page = (bench.RESULTS / "allocations.md").read_text(encoding="utf-8")
    assert page.split("<!-- table -->")[1].strip() == bench.page(values).strip()
