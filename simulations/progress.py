"""One progress bar on standard error, for all commands with one long task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

OnProgress = Callable[[int, int, str], None]
"""Called with the number of finished steps, the total number of steps and a description of the last
step.
"""


@contextmanager
def progress(name: str, shown: bool, total: int | None = None) -> Iterator[OnProgress]:
    """A bar with the number of finished steps, the description of the last step and the remaining
    time.

    Args:
        name: name of the task.
        shown: whether anything is written.
        total: number of steps, if it is known before the first.

    Example:
        >>> with progress("an example", shown=False) as on_progress:
        ...     on_progress(1, 2, "half of it")
    """
    if not shown:
        yield lambda done, total, what: None
        return
    from rich.progress import (  # commands that show no bar start without it
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, emoji=False)
    bar = Progress(*columns, console=console)
    task = bar.add_task(escape(name), total=total, what="starting")

    def on_progress(done: int, total: int, what: str) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, what=escape(what))

    # outside a terminal, an error before the first step is printed without a bar
    if console.is_terminal:
        bar.start()
    try:
        yield on_progress
    finally:
        if bar.live.is_started:
            bar.stop()
