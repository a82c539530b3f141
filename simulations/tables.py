"""Tables for the terminal, in one layout for all commands."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text, TextType

Cells = Sequence[str | Text]


class _WholeWords(Table):
    """A table that breaks no word. If it does not fit, it is drawn without lines, and further
    columns continue below.
    """

    keys = 1  # columns that name a row, which every part repeats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or its parts."""
        parts = [self] if self._fits(console, options) else self._parts(console, options)
        for part in parts:
            if part is not parts[0]:
                yield Text()
            part._set_widths(console, options)
            yield from Table.__rich_console__(part, console, options)

    def _fits(
        self, console: Console, options: ConsoleOptions, *, whole_cells: bool = False
    ) -> bool:
        sizes = (self._measure_column(console, options, column) for column in self.columns)
        widths = (size.maximum if whole_cells else size.minimum for size in sizes)
        return sum(widths) + self._extra_width <= options.max_width

    def _parts(self, console: Console, options: ConsoleOptions) -> list[_WholeWords]:
        full_table = self._of(self.columns, self.title, gap=1)
        if full_table._fits(console, options):
            return [full_table]
        names, rest = self.columns[: self.keys], self.columns[self.keys :]
        parts = [self._of([*names, *rest[:1]], self.title)]
        for column in rest[1:]:
            wider = self._of([*parts[-1].columns, column], parts[-1].title)
            if wider._fits(console, options, whole_cells=True):
                parts[-1] = wider
            else:
                parts.append(self._of([*names, column]))
        return parts

    def _of(
        self, columns: Sequence[Column], title: TextType | None = None, gap: int = 2
    ) -> _WholeWords:
        """Some of the columns, without lines."""
        part = _WholeWords(
            title=title, title_justify="left", box=None, padding=(0, gap, 0, 0), pad_edge=False
        )
        part.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
        part.rows = self.rows
        return part

    def _set_widths(self, console: Console, options: ConsoleOptions) -> None:
        """Shrink the column with the most room to spare until all fit; rich would shrink the widest
        below its words.
        """
        sizes = [self._measure_column(console, options, column) for column in self.columns]
        widths, room = [size.maximum for size in sizes], options.max_width - self._extra_width
        spare = [size.span for size in sizes]
        while sum(widths) > room and max(spare) > 0:
            index = spare.index(max(spare))
            widths[index], spare[index] = widths[index] - 1, spare[index] - 1
        for index, column in enumerate(self.columns):
            column.width = widths[index] - self._get_padding_width(column._index)


def table(
    title: str | None,
    columns: Iterable[str],
    rows: Iterable[Cells] = (),
    *,
    left: Container[str] = (),
    keys: int = 1,
) -> Table:
    """A table with a header; its cells may hold rich's markup.

    Args:
        title: heading, as plain text.
        columns: headings of the columns.
        rows: cells.
        left: columns of words, which are aligned to the left; the others hold figures.
        keys: number of first columns that name a row. If the terminal is too narrow for whole
            words, the other columns continue below, each part with these first columns.

    Example:
        >>> table("sizes", ["layer", "size"], [["a", "3"], ["b", "4"]], left=["layer"]).row_count
        2
    """
    result = _WholeWords(title=None if title is None else escape(title), title_justify="left")
    result.keys = keys
    for name in columns:
        result.add_column(
            escape(name), justify="left" if name in left else "right", overflow="fold"
        )
    for row in rows:
        result.add_row(*row)
    return result


def facts(rows: Iterable[Cells], title: str | None = None) -> Table:
    """Names and values without a header. Users copy the values, so they are never cut.

    Example:
        >>> facts([("rounds", "3"), ("epsilon", "8")]).row_count
        2
    """
    heading = None if title is None else escape(title)
    result = Table(title=heading, title_justify="left", show_header=False, box=None, pad_edge=False)
    result.add_column()
    result.add_column(overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def print_names(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print names with a sentence each, aligned on a terminal, and with one line per name in a
    file, for `grep`.

    Example:
        >>> print_names(Console(width=40, force_terminal=False), [("one", "first"), ("three", "third")])
        one    first
        three  third
    """
    widest = max(len(name) for name, _ in rows)
    if not console.is_terminal:
        for name, text in rows:
            console.print(
                f"{name:<{widest}}  {text}", markup=False, highlight=False, soft_wrap=True
            )
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(escape(name), escape(text))
    console.print(grid)
