"""The picture of the README and the table of its page are made again from what the benchmark kept."""

from __future__ import annotations

import json

import numpy as np
from matplotlib import image

from benchmarks import allocations as bench


def test_picture_and_table_come_from_the_kept_file(tmp_path) -> None:
    values = json.loads(bench.KEPT.read_text(encoding="utf-8"))
    bench.draw(values, tmp_path / "again.png")
    ours, kept = (image.imread(path) for path in (tmp_path / "again.png", bench.PICTURE))
    assert ours.shape == kept.shape
    assert np.abs(ours - kept).mean() < 0.01  # text may be drawn otherwise by another version of matplotlib
    page = (bench.RESULTS / "allocations.md").read_text(encoding="utf-8")
    assert page.split("<!-- table -->")[1].strip() == bench.page(values).strip()
