"""The hospitals' files of the table of random allocation."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.errors import ConfigError
from fedlgm_lab.studies.tables.random_allocation import hospitals

HEADER = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,target\n"
ROWS = "63,1,3,145,233,1,0,150,0,2.3,0,0,1,1\n37,1,2,130,250,0,1,187,0,3.5,0,0,2,0\n" * 3


def test_every_fifth_row_of_all_hospitals_is_a_test_row(tmp_path: Path) -> None:
    for name in ("hungarian", "va"):
        (tmp_path / f"processed.{name}.data").write_text(HEADER + ROWS)
    parts = hospitals(tmp_path)
    assert [len(parts[part][1]) for part in ("train", "test")] == [9, 3]
    assert [len(held) for held in parts["clients"]] == [4, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no files processed"), (ROWS, "has no column 'age': its first line must name")],
)
def test_other_folders_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "processed.va.data").write_text(content)
    with pytest.raises(ConfigError, match=message):
        hospitals(tmp_path)
