"""Formats tables and writes them between markers on the pages of results."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlgm_lab.studies.statistics import interval as student


def spread(values: Collection[float], scale: float = 1.0, digits: int = 2) -> str:
    """Format the mean, with the standard deviation if there are two or more values; "" if none."""
    if not len(values):
        return ""
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    return mean + (f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def interval(values: Collection[float], digits: int = 3) -> str:
    """Format the mean, with half the width of the 95 % interval if there are two or more values."""
    low, high = student(values)
    reach = f" ± {(high - low) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{reach}"


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


@contextmanager
def picture(
    path: Path, size: tuple[float, float], columns: int = 1, dpi: int = 80
) -> Iterator[list[Axes]]:
    """Yield axes side by side, and write them as a picture at the end of the block."""
    figure = Figure(figsize=size)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    yield axes
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=dpi)


def put(page: Path, name: str, text: str) -> None:
    """Put `text` between the two markers `<!-- name -->` of a page; a page without these markers
    gets them at its end.

    Raises:
        ValueError: the page has one such marker, or more than two.
    """
    marker = f"<!-- {name} -->"
    page.parent.mkdir(parents=True, exist_ok=True)
    content = page.read_text(encoding="utf-8") if page.exists() else ""
    if marker not in content:
        content += f"\n{marker}\n{marker}\n"
    if content.count(marker) != 2:
        raise ValueError(f"{page.name} must have the marker {marker} twice")
    before, _, after = content.split(marker)
    page.write_text(f"{before}{marker}\n{text}\n{marker}{after}", encoding="utf-8")
