"""The figures of a comparison, and what the terminal shows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console

from fedlgm_lab.studies import comparison
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.records import Records
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.study_rows import Row


def summary_of(todo: Sequence[Job], out: Path, failed: Mapping[str, str] | None = None) -> Row:
    """The summary of runs in a folder."""
    return comparison.summarise(Study(out, Records.of_runs(out, todo, failed)))


def shown(summary: Row, width: int = 250) -> str:
    """Its tables as text."""
    console = Console(width=width, record=True, file=StringIO())
    console.print(comparison.tables(summary))
    return console.export_text()
