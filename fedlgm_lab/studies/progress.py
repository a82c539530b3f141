"""Shows the progress of a study's runs and the remaining time in a line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from fedlgm_lab.studies.jobs import Job
from simulations.live import live_stream
from simulations.runs.headline import headline
from simulations.runs.rows import FullRow


class Line:
    """A line on standard error that is overwritten, in a terminal or a notebook cell.

    Other outputs, such as a log file, get one line at the end.

    Args:
        todo: the runs.
        shown: whether to write anything.
    """

    def __init__(self, todo: Sequence[Job], shown: bool = True) -> None:
        self._stream, self._shown = sys.stderr, shown
        live = live_stream() if shown else None
        self._rounds = {job.folder: 0 for job in todo}
        self._ended: set[str] = set()
        self._bar = tqdm(
            total=sum(job.recipe.federation.rounds for job in todo),
            file=live or self._stream,
            disable=live is None,
            mininterval=0.5,
            delay=0.5,
            leave=False,
            bar_format="study: {desc}, {remaining} left{postfix}",
        )

    def on_row(self, job: Job, row: FullRow) -> None:
        """Count a finished round."""
        figures = job.folder
        if "loss" in row:
            name, value = headline(row)
            figures += f"  {name} {value:.3f}"
        self._count(job, row["round"], figures)

    def on_end(self, job: Job) -> None:
        """Count a run that has ended."""
        self._ended.add(job.folder)
        self._count(job, job.recipe.federation.rounds, job.folder)
        self._bar.refresh()

    def close(self, summary: bool = True) -> None:
        """Remove the line, and write the number of ended runs unless `summary` is False."""
        self._bar.close()
        if summary and self._shown:
            self._stream.write(f"study: {self._runs()}\n")
            self._stream.flush()

    def _count(self, job: Job, rounds: int, figures: str) -> None:
        new, self._rounds[job.folder] = rounds - self._rounds[job.folder], rounds
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.set_description_str(self._runs(), refresh=False)
        self._bar.update(new)

    def _runs(self) -> str:
        return f"{len(self._ended)} of {len(self._rounds)} runs"
