"""Private fine-tuning of a public base model, by adapters, of parts of the model, or of the
complete model.

Every run uses the recipe `text-adapters` with the changes in `adapters.toml`, at the same proven
epsilon. The learning rates come from an earlier search, which is not repeated.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedlgm.planning.layers import LayerTable
from fedlgm.training import inputs, tasks
from fedlgm.training.models import digest_of_file
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.runs import cells, measure_cells
from fedlgm_lab.studies.tables.store import Kept
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

NAME = "adapters"
SCALED = {
    "LoRA": "LoRA, a bound for A and one for B",
    "FFA-LoRA": "FFA-LoRA (B alone)",
}
"""Methods that are also run with scales alpha above the recipe's 4, with a single seed."""


def base_perplexity(base: str) -> float:
    """Measure the test perplexity of the base model."""
    assembly = Assembly(recipes.load("text-adapters", {"model.weights": base}))
    module, data, task = assembly.model.module().eval(), assembly.data.dataset, assembly.data.task
    x, y = inputs.tensors(data.test_x), torch.from_numpy(data.test_y)
    return float(tasks.evaluate(task, module, x, y)["perplexity"])


def texts(store: Kept) -> Pages:
    """Make the table of all methods, and the table of the scales of adapters."""
    runs = {str(cell.name["method"]): cell for cell in cells(store, NAME)}
    figures = {method: cell.figures() for method, cell in runs.items()}
    rows = [["nothing", "0", "", *(f"{row['final']:.2f}" for row in store.find(method="nothing"))]]
    for method, cell in runs.items():
        if len(cell.seeds) > 1:
            accuracies, each = (
                figures[method],
                ", ".join(f"{value:.3f}" for value in figures[method]),
            )
            count = f"{int(cell.figures('parameters').iloc[0]):,}" if len(accuracies) else ""
            rows.append(
                [method, count, each, f"{accuracies.mean():.3f}" if len(accuracies) else ""]
            )
    scales = [
        [
            method,
            *(
                f"{figures[name][1]:.3f}"
                for name in (of, *(f"{method}, alpha {a}" for a in (8, 16)))
            ),
        ]
        for method, of in SCALED.items()
        if len(figures[of])
    ]
    scaled = table(("trained", "alpha 4", "alpha 8", "alpha 16"), scales) if scales else ""
    header = ("trained", "parameters", "seeds 1, 2, 3", "mean")
    return {"adapters.md": {"comparison": table(header, rows), "scales": scaled}}


def measure(store: Kept) -> None:
    """Make the runs of all methods, seed by seed. With a different base model, all runs are made
    anew.
    """
    base = Path(store.input("base", "the file of fedlgm pretrain text-adapters")).resolve()
    digest, runs = digest_of_file(base), []
    untouched = {"method": "nothing", "base": digest}
    store.keep(untouched, lambda: {"final": round(base_perplexity(str(base)), 3)})
    for cell in cells(store, NAME):
        changes = {"model.weights": str(base)} | cell.changes
        model = Assembly(recipes.load(cell.recipe, changes)).model.module()
        size = int(LayerTable.from_module(model).size)
        name = {**cell.name, "base": digest, "parameters": size}
        runs.append(replace(cell, name=name, changes=changes))
    measure_cells(runs)


MAKER = Maker(
    "adapters.json",
    texts,
    measure,
    inputs={"base": "the file of fedlgm pretrain text-adapters"},
    partial=True,
)
