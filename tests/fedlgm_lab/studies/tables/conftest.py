"""Kept studies, which the tests of all pages read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedlgm_lab.studies.records import Records

RESULTS = Path(__file__).parents[4] / "docs" / "results"


@pytest.fixture(scope="session", autouse=True)
def _kept_studies_are_read_once() -> Iterator[None]:
    """A page reads a file for each of its parts."""
    read = Records.read
    once = cache(read)

    def read_once(path: Path | str) -> Records:
        return (once if RESULTS in Path(path).parents else read)(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Records, "read", read_once)
        yield
