"""Private fine-tuning of a public base: adapters, parts of the model and all of it.

Every run is the recipe `text-adapters` with the changes below, at the same proven epsilon. Learning
rates are those of an earlier search, not repeated here.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from fedlgm.planning.layers import LayerTable
from fedlgm.training import inputs, tasks
from fedlgm.training.models import digest_of_file
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

SEEDS = (1, 2, 3)
_WHOLE = ["mechanism.name=gaussian", "mechanism.group_by=module"]
_FULL = [*_WHOLE, "model.adapters=none", "federation.server_lr=0.003"]


def _part(*names: str) -> list[str]:
    return [*_WHOLE, f"model.adapters={{rank = 0, also = [{', '.join(map(repr, names))}]}}"]


_LOW_RANK = "targets = ['query', 'value', 'expand', 'contract'], also = ['outputs.bias']"
_FFA = f"{_LOW_RANK}, style = 'ffa'"
METHODS: dict[str, list[str]] = {
    "everything, random start": [*_WHOLE, "model.adapters=none", "model.weights=none"],
    "everything, public base": _FULL,
    "LoRA, a bound for A and one for B": [],
    "A and B in turn": ["mechanism.name=alternate"],
    "FFA-LoRA (B alone)": [*_WHOLE, f"model.adapters={{rank = 4, {_FFA}}}"],
    "output layer and last norm": _part("outputs", "norm"),
    "LoRA, one bound": _WHOLE,
    "biases and norms": _part("bias", "norm", "norm1", "norm2"),
}
"""Changes of the recipe."""
SCALES = {
    f"{method}, alpha {alpha}": [*changes, f"model.adapters={{rank = 4, alpha = {alpha}, {keys}}}"]
    for method, changes, keys in (("LoRA", [], _LOW_RANK), ("FFA-LoRA", _WHOLE, _FFA))
    for alpha in (8, 16)
}
"""One seed of two methods with larger scales alpha than the recipe's 4."""


def count_parameters(base: str, changes: list[str]) -> int:
    """Trained parameters."""
    recipe = recipes.load("text-adapters", [f"model.weights={base}", *changes])
    return int(LayerTable.from_module(Assembly(recipe).model.module()).size)


def base_perplexity(base: str) -> float:
    """Test perplexity of the base."""
    assembly = Assembly(recipes.load("text-adapters", [f"model.weights={base}"]))
    module, data, task = assembly.model.module().eval(), assembly.data.dataset, assembly.data.task
    x, y = inputs.tensors(data.test_x), torch.from_numpy(data.test_y)
    return float(tasks.evaluate(task, module, x, y)["perplexity"])


def page(store: Kept) -> str:
    """The table of the page."""
    rows = [["nothing", "0", "", *(f"{row['final']:.2f}" for row in store.find(method="nothing"))]]
    for method in METHODS:
        found = store.find(method=method)
        values = [row["final"] for row in found]
        each = ", ".join(f"{value:.3f}" for value in values)
        mean = f"{statistics.fmean(values):.3f}" if values else ""
        rows.append([method, f"{found[0]['parameters']:,}" if found else "", each, mean])
    return table(("trained", "parameters", "seeds 1, 2, 3", "mean"), rows)


def scales(store: Kept) -> str:
    """The page's table of scales."""
    if not store.find(seed=1):
        return ""
    named = {"LoRA": "LoRA, a bound for A and one for B", "FFA-LoRA": "FFA-LoRA (B alone)"}
    found = [
        [
            method,
            *(
                f"{store.find(method=name, seed=1)[0]['final']:.3f}"
                for name in (of, *(f"{method}, alpha {a}" for a in (8, 16)))
            ),
        ]
        for method, of in named.items()
    ]
    return table(("trained", "alpha 4", "alpha 8", "alpha 16"), found)


def measure(store: Kept) -> None:
    """All methods, seed by seed; a different base is measured anew."""
    base = Path(store.input("base", "the file of fedlgm pretrain text-adapters")).resolve()
    digest = digest_of_file(base)
    untouched = {"method": "nothing", "base": digest}
    store.keep(untouched, lambda: {"final": round(base_perplexity(str(base)), 3)})
    for seed in SEEDS:
        for method, changes in (METHODS | (SCALES if seed == 1 else {})).items():
            name = {"method": method, "seed": seed, "base": digest}
            name["parameters"] = count_parameters(str(base), changes)
            overrides = [f"model.weights={base}", "run.evaluate_every=1000", *changes]
            store.measure(name, "text-adapters", overrides)


def texts(store: Kept) -> Pages:
    """The comparison, and the scales of adapters."""
    return {"adapters.md": {"comparison": page(store), "scales": scales(store)}}


MAKER = Maker(
    "adapters.json",
    texts,
    measure,
    inputs={"base": "the file of fedlgm pretrain text-adapters"},
    partial=True,
)
