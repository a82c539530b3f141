"""Differences between cells of `noise_and_split` at neighbouring learning rates.

A difference between two cells, each at its best rate, may be caused by the search, because the
optimum of one cell may lie nearer to a tried rate than the optimum of the other cell. The two cells
are therefore also compared with both rates one step lower and with both rates one step higher, on
the seed of the search. Nothing is trained; the figures come from the runs of `noise_and_split`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedlgm.errors import ConfigError
from fedlgm_lab.studies.tables import noise_and_split
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept

SEARCH_SEED = 100
SECRET = "independent, secret Poisson sampling"
FIXED = ("flat", "uniform", "SNR-consistent")
Curve = dict[float, float]
"""Rate -> accuracy in per cent, or perplexity, on the seed of the search."""


def curves(store: Kept) -> dict[tuple[str, str, str], Curve]:
    """Collect the figures of the search by rate, for each (task, noise, split)."""
    found: dict[tuple[str, str, str], Curve] = {}
    for row in store.find(seed=SEARCH_SEED):
        cell = row["task"], row["noise"], row["split"]
        found.setdefault(cell, {})[row["rate"]] = row["late"]
    return found


def three(first: Curve, second: Curve, lower_is_better: bool) -> list[float | None]:
    """Compute the differences first - second one step below both best rates, at the best rates, and
    one step above them. A difference is None if a step leads beyond the end of a curve.
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
    """State whether all three differences have the same sign."""
    if None in values:
        return "not decided: a best rate lies at an edge"
    signs = {value > 0 for value in values if value is not None}
    return "holds" if len(signs) == 1 else "does not hold"


def comparisons(store: Kept) -> Iterator[tuple[str, str, list[float | None]]]:
    """Yield the task, the name and the three differences of every comparison."""
    found = curves(store)
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


def texts(store: Kept) -> Pages:
    """Make the table of the comparisons."""
    lines = [
        [
            task,
            what,
            *("" if value is None else f"{value:+.2f}" for value in values),
            verdict(values),
        ]
        for task, what, values in comparisons(store)
    ]
    header = ["task", "comparison", "one step below", "best rates", "one step above", ""]
    return {"data/neighbouring-rates.md": {"neighbouring rates": table(header, lines)}}


def measure(store: Kept) -> None:
    """Measure nothing, since the runs belong to another study.

    Raises:
        ConfigError: the folder has no such runs.
    """
    if not store.rows:
        raise ConfigError("neighbouring-rates reads other runs: fedlgm study noise-and-split")


MAKER = Maker(noise_and_split.MAKER.file, texts, measure)
