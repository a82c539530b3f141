"""Differences of the accuracy grid at neighbouring learning rates:
`python -m benchmarks.neighbouring_rates`.

A difference between two cells, each at its own best rate, may come from the search: one of them may
lie nearer to a point of the grid. So the two are also compared with both one step below and both
one step above their best rates, on the seed of the search. It reads the kept runs, trains nothing,
and writes the table to its page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import put

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGE, MARK = RESULTS / "data" / "neighbouring-rates.md", "neighbouring rates"
SEARCH_SEED = 100
SECRET = "independent, secret Poisson sampling"
FIXED = ("flat", "uniform", "SNR-consistent")
Curve = dict[float, float]
"""Rate -> accuracy in per cent, or perplexity, on the seed of the search."""


def curves() -> dict[tuple[str, str, str], Curve]:
    """The search of each (task, noise, split)."""
    found: dict[tuple[str, str, str], Curve] = {}
    for row in json.loads((RESULTS / "noise-and-split.json").read_text()):
        if row["seed"] == SEARCH_SEED:
            found.setdefault((row["task"], row["noise"], row["split"]), {})[row["rate"]] = row[
                "late"
            ]
    return found


def three(first: Curve, second: Curve, lower_is_better: bool) -> list[float | None]:
    """Differences first - second: one step below both best rates, at them, one step above; None
    beyond a curve.
    """
    places = []
    for curve in (first, second):
        rates = sorted(curve)
        best = (min if lower_is_better else max)(rates, key=curve.__getitem__)
        places.append((curve, rates, rates.index(best)))
    values: list[float | None] = []
    for step in (-1, 0, 1):
        inside = all(0 <= at + step < len(rates) for _, rates, at in places)
        a, b = ((curve[rates[at + step]] if inside else 0.0) for curve, rates, at in places)
        values.append(a - b if inside else None)
    return values


def verdict(values: list[float | None]) -> str:
    """Verdict on three differences."""
    if None in values:
        return "not decided: a best rate lies at an edge"
    signs = {value > 0 for value in values if value is not None}
    return "holds" if len(signs) == 1 else "does not hold"


def comparisons() -> Iterator[tuple[str, str, list[float | None]]]:
    """(task, comparison, its three differences)."""
    found = curves()
    for task in sorted({task for task, _, _ in found}):
        noises = sorted({noise for known, noise, _ in found if known == task})
        for noise in noises:
            for split in FIXED if noise != SECRET else ():
                pair = found[task, noise, split], found[task, SECRET, split]
                yield (
                    task,
                    f"{noise}, against secret sampling, {split}",
                    three(*pair, "text" in task),
                )
        for noise in noises:
            for split in ("adaptive", "adaptive, span 2"):
                if (task, noise, split) in found:
                    pair = found[task, noise, split], found[task, noise, "flat"]
                    yield task, f"{split}, against flat, {noise}", three(*pair, "text" in task)


def table() -> str:
    """The comparisons as Markdown."""
    lines = [
        "| task | comparison | one step below | best rates | one step above | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for task, what, values in comparisons():
        cells = ["" if value is None else f"{value:+.2f}" for value in values]
        lines.append(f"| {task} | {what} | {' | '.join(cells)} | {verdict(values)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the table into the page and print it."""
    put(PAGE, MARK, table())
    print(table())


if __name__ == "__main__":
    main()
