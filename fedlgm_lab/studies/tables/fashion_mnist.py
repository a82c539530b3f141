"""The federated FashionMNIST setting of the SNR-consistent paper: the settings on which its
accuracy depends, and cells of Table 3.

Every run uses the recipe `fashion-mnist` with the changes in `fashion-mnist.toml`.
"""

from __future__ import annotations

from torch import nn

from fedlgm.training.models.convolutional import cnn
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import cells, measure_cells, settings
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change

NAME = "fashion-mnist"
FIGURES = {"last round": "final", "mean of the last five evaluated": "late", "highest": "highest"}


def glorot_cnn(in_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build the paper's network with Glorot's uniform weights and zero biases, the initialisation
    of Keras.
    """
    module = cnn(in_shape, classes, activation="sigmoid")
    for child in module.modules():
        if isinstance(child, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(child.weight)
            nn.init.zeros_(child.bias)  # type: ignore[arg-type]
    return module


def texts(store: Kept) -> Pages:
    """Make a table for each study with finished runs."""
    pages: dict[str, dict[str, str]] = {"fashion-mnist.md": {}, "data/fashion-mnist.md": {}}
    for study in (group["name"]["study"] for group in settings(NAME)["groups"]):
        first, *_ = runs = cells(store, NAME, study=study)
        rows = [
            [
                cell.name["variant"],
                *(spread(cell.figures(name)) for name in FIGURES.values()),
                ", ".join(map(str, sorted(cell.figures().index))),
                *(
                    change(cell.figures("late"), first.figures("late"))
                    if cell != first
                    else [""] * 3
                ),
            ]
            for cell in runs
            if len(cell.figures())
        ]
        if rows:
            page = "fashion-mnist.md" if study == "table-3" else "data/fashion-mnist.md"
            pages[page][study] = table(["variant", *FIGURES, "seeds", *CHANGE], rows)
    return pages


MAKER = Maker(
    "fashion-mnist.json", texts, lambda store: measure_cells(cells(store, NAME)), partial=True
)
