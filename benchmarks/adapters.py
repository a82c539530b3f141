"""Private fine-tuning of a public base: adapters, parts of the model and all of it; tables of
docs/results/adapters.md.

    python -m benchmarks.adapters BASE [--seeds 1 2 3] [--minutes M]   # continue the runs
    python -m benchmarks.adapters --write                              # the page's table

BASE is the file of `fedlgm pretrain text-adapters`. Every run is the recipe `text-adapters` with
the changes below, at the same proven epsilon. Learning rates are those of an earlier search, not
repeated here. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from benchmarks.kept import Kept
from benchmarks.pages import show, table
from fedlgm.planning.layers import LayerTable
from fedlgm.training import inputs, tasks
from fedlgm.training.models import digest_of_file
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

KEPT = Path(__file__).parents[1] / "docs" / "results" / "adapters.json"
PAGE = KEPT.with_suffix(".md")
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


def sized(base: str, changes: list[str]) -> int:
    """Trained parameters."""
    recipe = recipes.load("text-adapters", [f"model.weights={base}", *changes])
    return int(LayerTable.from_module(Assembly(recipe).model.module()).size)


def untrained(base: str) -> float:
    """Test perplexity of the base."""
    assembly = Assembly(recipes.load("text-adapters", [f"model.weights={base}"]))
    module, data, task = assembly.model.module().eval(), assembly.data.dataset, assembly.data.task
    x, y = inputs.tensors(data.test_x), torch.from_numpy(data.test_y)
    return float(tasks.evaluate(task, module, x, y)["perplexity"])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", help="file of `fedlgm pretrain text-adapters`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="processor time")
    parser.add_argument("--write", action="store_true", help="write the page's table")
    chosen = parser.parse_args()
    kept = Kept(KEPT, chosen.minutes)
    if chosen.base is not None:
        base, digest = str(Path(chosen.base).resolve()), digest_of_file(chosen.base)
        kept.keep(
            {"method": "nothing", "base": digest}, lambda: {"final": round(untrained(base), 3)}
        )
        for seed in chosen.seeds:
            for method, changes in (METHODS | (SCALES if seed == 1 else {})).items():
                name = {
                    "method": method,
                    "seed": seed,
                    "base": digest,
                    "parameters": sized(base, changes),
                }
                kept.measure(
                    name,
                    "text-adapters",
                    [f"model.weights={base}", "run.evaluate_every=1000", *changes],
                )
    if chosen.write or chosen.base is None:
        show(PAGE, {"comparison": page(kept), "scales": scales(kept)}, chosen.write)


def page(kept: Kept) -> str:
    """The table of the page."""
    rows = [["nothing", "0", "", *(f"{row['final']:.2f}" for row in kept.find(method="nothing"))]]
    for method in METHODS:
        found = kept.find(method=method)
        values = [row["final"] for row in found]
        each = ", ".join(f"{value:.3f}" for value in values)
        mean = f"{statistics.fmean(values):.3f}" if values else ""
        rows.append([method, f"{found[0]['parameters']:,}" if found else "", each, mean])
    return table(("trained", "parameters", "seeds 1, 2, 3", "mean"), rows)


def scales(kept: Kept) -> str:
    """The page's table of scales."""
    named = {"LoRA": "LoRA, a bound for A and one for B", "FFA-LoRA": "FFA-LoRA (B alone)"}
    found = [
        [
            method,
            *(
                f"{kept.find(method=name, seed=1)[0]['final']:.3f}"
                for name in (of, *(f"{method}, alpha {a}" for a in (8, 16)))
            ),
        ]
        for method, of in named.items()
    ]
    return table(("trained", "alpha 4", "alpha 8", "alpha 16"), found)


if __name__ == "__main__":
    main()
