"""The kept curves of the figures are the closed forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm_lab.studies.tables import inid_figures

RESULTS = Path(__file__).parents[4] / "docs" / "results"


def test_the_curves_of_the_kept_file_are_the_closed_forms() -> None:
    kept, made = inid_figures.MAKER.open(RESULTS).values, inid_figures.panels()
    for name in inid_figures.FIGURES:
        for one, other in zip(kept[name], made[name], strict=True):
            for label, values in other["curves"].items():
                assert one["curves"][label] == pytest.approx(values, abs=1e-5)
