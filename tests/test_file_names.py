"""Files of the packages have names of their own, and load what they name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fedlgm.package_conflicts import PACKAGES

ROOT = Path(__file__).parents[1]
FILES = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]


def test_no_name_of_a_file_occurs_more_than_twice() -> None:
    counts = Counter(file.name for file in FILES if file.name != "__init__.py")
    assert not {name for name, count in counts.items() if count > 2}


def test_few_files_import_for_annotations_alone() -> None:
    """The others keep a process from loading what it does not run."""
    assert sum("if TYPE_CHECKING:" in file.read_text(encoding="utf-8") for file in FILES) <= 10
