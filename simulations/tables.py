"""Tables for the terminal, in one layout for all commands."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Cells = Sequence[str | Text]


def table(title: str | None, columns: Iterable[str], rows: Iterable[Cells] = (), *, left: Container[str] = ()) -> Table:
    """A table with a header; its cells may hold rich's markup.

    Args:
        title: heading, as plain text.
        columns: headings of the columns.
        rows: cells.
        left: columns of words, which are aligned to the left; the others hold figures.

    Example:
        >>> table("sizes", ["layer", "size"], [["a", "3"], ["b", "4"]], left=["layer"]).row_count
        2
    """
    made = Table(title=None if title is None else escape(title), title_justify="left")
    for name in columns:
        made.add_column(escape(name), justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def facts(rows: Iterable[Cells], title: str | None = None) -> Table:
    """Names and values without a header; values are copied, so they are never cut.

    Example:
        >>> facts([("rounds", "3"), ("epsilon", "8")]).row_count
        2
    """
    heading = None if title is None else escape(title)
    made = Table(title=heading, title_justify="left", show_header=False, box=None, pad_edge=False)
    made.add_column()
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def listed(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print names with a sentence each: aligned on a terminal; one line per name in a file, for `grep`.

    Example:
        >>> listed(Console(width=40, force_terminal=False), [("one", "first"), ("three", "third")])
        one    first
        three  third
    """
    widest = max(len(name) for name, _ in rows)
    if not console.is_terminal:
        for name, text in rows:
            console.print(f"{name:<{widest}}  {text}", markup=False, highlight=False, soft_wrap=True)
        return
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in rows:
        made.add_row(escape(name), escape(text))
    console.print(made)
