"""The stated error of forecasts is that of the kept ones."""

from __future__ import annotations

import pytest

from benchmarks.rehearsal import largest
from fedlgm_lab.recommend.forecast import ERROR


def test_the_range_of_forecasts_is_the_largest_kept_error() -> None:
    error, settings = largest()
    assert error == pytest.approx(100 * ERROR, abs=0.1)
    assert settings == 7
