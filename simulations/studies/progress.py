"""One line of progress over a set of runs, with the remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from simulations.reports.headline import headline
from simulations.runs.rows import FullRow
from simulations.studies.jobs import Job

_EVERY_S = 0.5


class Line:
    """A line on standard error that is overwritten, in a terminal or a notebook cell.

    Elsewhere, as in a log file, one line is written at the end.

    Args:
        todo: the runs.
        shown: whether to write anything.
        stream: output stream.
    """

    def __init__(self, todo: Sequence[Job], shown: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = shown and (self._stream.isatty() or "ipykernel" in sys.modules)
        self._shown, self._started, self._written = shown, time.monotonic(), 0.0
        self._rounds = {job.folder: 0 for job in todo}
        self._total = {job.folder: job.recipe.federation.rounds for job in todo}
        self._ended: set[str] = set()
        self._skipped: int | None = None
        self._long = 0

    def on_row(self, job: Job, row: FullRow) -> None:
        """Count a finished round."""
        self._rounds[job.folder] = row["round"]
        figures = job.folder
        if "loss" in row:
            name, value = headline(row)
            figures += f"  {name} {value:.3f}"
        self._write(figures)

    def on_end(self, job: Job) -> None:
        """Count an ended run."""
        self._rounds[job.folder] = self._total[job.folder]
        self._ended.add(job.folder)
        self._write(job.folder, now=True)

    def close(self, summary: bool = True) -> None:
        """End the line, with the number of ended runs or, after a mistake, without it."""
        if summary and self._shown:
            seconds = time.monotonic() - self._started
            self._put(f"study: {len(self._ended)} of {len(self._total)} runs in {_clock(seconds)}")
        if self._long:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, figures: str, now: bool = False) -> None:
        moment = time.monotonic()
        if not self._live or (moment - self._written < _EVERY_S and not now):
            return
        self._written = moment
        done, whole = sum(self._rounds.values()), sum(self._total.values())
        if self._skipped is None:
            self._skipped, self._started = done, moment  # finished before: they say nothing of the time that is left
        made = done - self._skipped
        left = _clock((moment - self._started) * (whole - done) / made) if made > 0 else "?"
        self._put(f"study: {len(self._ended)} of {len(self._total)} runs, {left} left  {figures}")

    def _put(self, text: str) -> None:
        self._stream.write(f"\r{text}".ljust(self._long + 1) if self._live else text)
        self._stream.flush()
        self._long = len(text)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
