"""Progress of a run that is started from Python: one line in a terminal or in a notebook's cell,
and a plain line every 30 seconds in a log.
"""

from __future__ import annotations

import inspect
import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from fedlgm.errors import ConfigError
from simulations.config.recipe import Recipe
from simulations.runs.headline import headline
from simulations.runs.rows import FullRow, OnRound

_EVERY_S = 30.0
_WIDTH = 79


class _Cell(io.TextIOBase):
    """One output of a notebook's cell. Each text replaces the output, so a saved notebook has one
    line and no carriage returns.
    """

    def __init__(self) -> None:
        from IPython.display import display

        self._handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> int:
        self._handle.update({"text/plain": text.strip()}, raw=True)
        return len(text)


def live_stream() -> TextIO | None:
    """The stream for a progress line that is overwritten; None where lines cannot be overwritten,
    as in a log.
    """
    if _in_a_cell():
        return _Cell()  # type: ignore[return-value]
    return sys.stderr if sys.stderr.isatty() else None


def _in_a_cell() -> bool:
    """Whether this runs in a notebook's kernel. A process may have imported a kernel for another
    purpose.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _takes_one(function: Any) -> bool:
    """Whether a function can be called with one argument; true if that is not known."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # some functions of C state no signature
        return True
    return True


@contextmanager
def progress_line(
    recipe: Recipe, progress: OnRound | Literal[False] | None = None
) -> Iterator[OnRound | None]:
    """A function of each round's row that shows the run's progress.

    Args:
        recipe: the run's recipe.
        progress: a user's function, which is returned instead; False for none.

    Raises:
        ConfigError: `progress` is not a function of one argument.

    Example:
        >>> from simulations.config import recipe as recipes
        >>> with progress_line(recipes.load("digits")) as on_round:
        ...     on_round({"round": 1})
    """
    if progress is not None:
        if progress is not False and not (callable(progress) and _takes_one(progress)):
            raise ConfigError(
                "progress must be a function that is called with each round's row, such as print; "
                f"got {progress!r}"
            )
        yield progress or None
        return
    rounds, stream, start = recipe.federation.rounds, live_stream(), time.monotonic()
    first, latest, figures = 0, start, ""

    def on_round(row: FullRow) -> None:
        nonlocal first, latest, figures
        number, now = int(row["round"]), time.monotonic()
        first = first or number
        if "loss" in row:
            name, value = headline(row)
            figures = f", {name} {value:.3f}, epsilon {row['epsilon']:.3g}"
        left = (now - start) / (number - first + 1) * (rounds - number)
        text = f"{recipe.name}: round {number} of {rounds}{figures}, {left:.0f} s left"
        if stream is not None:
            stream.write(f"\r{text:{_WIDTH}}")
            stream.flush()
        elif now - latest >= _EVERY_S:
            print(text, file=sys.stderr, flush=True)
        else:
            return
        latest = now

    try:
        yield on_round
    finally:
        if stream is not None and first:
            stream.write(f"\r{'':{_WIDTH}}\r")
            stream.flush()
