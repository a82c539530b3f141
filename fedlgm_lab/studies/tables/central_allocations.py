"""Table 2 of the SNR-consistent paper, which compares allocations of the noise over the layers in
centralised training, at a proven epsilon of 3.

The runs train the CNN with 26,010 parameters on all 60,000 examples of FashionMNIST. In every cell,
the learning rate is searched in the same way on a separate seed, and the best rate is then run on
other seeds.
"""

from __future__ import annotations

from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import cells, labels, measure_cells, search_table
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change

NAME = "central-allocations"
STEPS, EARLIER = labels(NAME, "steps")
"""Number of steps of the runs, and of earlier, shorter runs."""
PAPER = {
    # rule: the paper's figures under EqClip and MedClip
    "flat": ("86.41 ± 0.02", ""),
    "uniform": ("85.53 ± 0.55", "86.29 ± 0.21"),
    "sensitivity-proportional": ("85.53 ± 0.53", "86.14 ± 0.20"),
    "dimension-adjusted": ("85.58 ± 0.47", "86.31 ± 0.11"),
    "min-total-noise": ("86.23 ± 0.36", "86.28 ± 0.19"),
    "snr-consistent": ("86.23 ± 0.36", "86.81 ± 0.23"),
}
SAME = {"sensitivity-proportional": "uniform", "min-total-noise": "snr-consistent"}
"""Rules that under EqClip are the same as another rule."""


def results(store: Kept, steps: int) -> str:
    """Make the table of results, with a row for every cell."""
    runs = {
        (cell.name["rule"], cell.name["clip"]): cell for cell in cells(store, NAME, steps=steps)
    }
    flat, rows = runs["flat", "EqClip"], []
    for rule, (equal, median) in PAPER.items():
        for clip in labels(NAME, "clip"):
            cell = runs.get((SAME.get(rule, rule) if clip == "EqClip" else rule, clip))
            if cell is None or not cell.tried():
                continue
            figures = cell.figures()
            paper = {"EqClip": equal, "MedClip, published": median}
            rows.append([
                "standard Gaussian (flat)" if rule == "flat" else rule,
                "-" if rule == "flat" else clip,
                f"{cell.rate():g}",
                spread(figures),
                len(figures),
                *(change(figures, flat.figures()) if cell != flat else [""] * len(CHANGE)),
                paper.get(str(clip), ""),
            ])  # fmt: skip
    header = ["rule", "bounds", "lr", "accuracy", "seeds", *CHANGE, "paper, highest"]
    return table(header, rows)


def search(store: Kept, steps: int) -> str:
    """Make the table of the searches' accuracies."""
    return search_table(cells(store, NAME, steps=steps), {"rule": "rule", "clip": "bounds"}, 2)


def texts(store: Kept) -> Pages:
    """Make the tables of results and searches, for these runs and for the earlier, shorter runs."""
    return {
        "central-allocations.md": {"results": results(store, STEPS)},
        "data/central-allocations.md": {
            "search": search(store, STEPS),
            "results-earlier": results(store, EARLIER),
            "search-earlier": search(store, EARLIER),
        },
    }


MAKER = Maker(
    "central-allocations.json",
    texts,
    lambda store: measure_cells(cells(store, NAME, steps=STEPS)),
    partial=True,
)
