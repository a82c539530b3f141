"""Tables on the pages of results, and their places."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Mean, with the standard deviation if there are at least two values; "" for none."""
    if not values:
        return ""
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    return mean + (f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put(page: Path, name: str, text: str) -> None:
    """Put `text` between the two markers `<!-- name -->` of a page.

    Raises:
        ValueError: the page does not have two such markers.
    """
    marker = f"<!-- {name} -->"
    before, first, rest = page.read_text(encoding="utf-8").partition(marker)
    _, second, after = rest.partition(marker)
    if not (first and second):
        raise ValueError(f"{page.name} has no two markers {marker}")
    page.write_text(f"{before}{marker}\n{text}\n{marker}{after}", encoding="utf-8")


def show(page: Path, texts: Mapping[str, str], write: bool) -> None:
    """Print parts of a page by name, and with `write` put those that are not empty into the
    page.
    """
    for name, text in texts.items():
        print(f"\n{name}\n\n{text}")
        if write and text:
            put(page, name, text)
