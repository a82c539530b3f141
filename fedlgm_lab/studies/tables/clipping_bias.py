"""Bias of LM-DP-SGD for several budgets, thresholds and emphasis factors (Figures 5 (b), 6 (b) and
7 (b) of its paper).

The settings and grids are those of the studies 002-figure-5 to 002-figure-7. The bias is ||mean
scaled gradient - mean gradient|| over 500 private examples, with the weights and the plan of a
step; it is averaged over five steps.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from fedlgm.noise.keys import KeyRing
from fedlgm.training import inputs
from fedlgm_lab.studies import files
from fedlgm_lab.studies.jobs import Job, grid_jobs
from fedlgm_lab.studies.statistics import difference, holm
from fedlgm_lab.studies.study import base_of
from fedlgm_lab.studies.tables.lm_dp_sgd_runs import LOOKS, private_run
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import interval, table
from fedlgm_lab.studies.tables.store import Kept, Row
from simulations.config.assembly import Assembly

METHOD, SEEDS = "lm-dp-sgd", 3
STUDIES = {  # study -> key of the grid, and what the paper says about the bias as the key grows
    "002-figure-5": ("privacy.epsilon", "lower"),
    "002-figure-6": ("mechanism.bound", "lower"),
    "002-figure-7": ("mechanism.emphasis", "higher"),
}


def jobs(study: str) -> list[Job]:
    """List the runs of LM-DP-SGD in a study."""
    asked = files.load(study)
    grid = asked.grid | {"mechanism": [METHOD]}
    # all three figures use the recipe's learning rate
    changes = {key: value for key, value in asked.set.items() if key != "training.lr"}
    base, own, options = base_of(asked.recipe, grid, {}, changes)
    return grid_jobs(base, grid, range(SEEDS), options, own)


def measure_bias(job: Job, store: Kept) -> Row:
    """Measure the bias in one training.

    Runs that have the same settings in several studies also have the same seed, and are measured
    once.
    """
    for row in store.find(run=str(job.recipe.run.seed)):
        return {key: row[key] for key in ("run", "bias", "epsilon", "guarantee")}
    assembly = Assembly(job.recipe)
    module, seed = assembly.model.module(), int(job.recipe.run.seed or 0)
    x, y = (
        inputs.tensors(assembly.data.dataset.train_x),
        torch.from_numpy(assembly.data.dataset.train_y),
    )
    lr = job.recipe.training.lr
    found = private_run(
        assembly.privacy.method, module, x, y, lr, KeyRing.from_seed(seed), looks=LOOKS
    )
    return {"run": str(seed)} | {key: found[key] for key in ("bias", "epsilon", "guarantee")}


def measure(store: Kept) -> None:
    """Make all runs, seed by seed."""
    for seed in range(SEEDS):
        for study, (key, _) in STUDIES.items():
            for job in jobs(study):
                if job.repetition == seed:
                    name = {"study": study, "key": key, "value": job.point[key], "seed": seed}
                    store.keep(name, partial(measure_bias, job, store))


def biases(store: Kept, **name: Any) -> list[float]:
    """Return the mean bias of each run, in the order of the seeds."""
    return [
        statistics.fmean(row["bias"])
        for row in sorted(store.find(**name), key=lambda row: row["seed"])
    ]


def page(store: Kept) -> str:
    """Make the table with one row per figure: the bias at each value of the key, and a test whether
    the bias at the last value differs from the bias at the first value.
    """
    rows, tests = [], []
    for study, (key, expected) in STUDIES.items():
        values = files.load(study).grid[key]
        found = [biases(store, study=study, value=value) for value in values]
        if min(map(len, found)) < SEEDS:
            continue
        cells = [f"{value:g}: {interval(one)}" for value, one in zip(values, found, strict=True)]
        rows.append([f"{study.removeprefix('002-figure-')} (b)", key, ", ".join(cells), expected])
        tests.append(difference(found[-1], found[0]))
    adjusted = holm([test.p for test in tests])
    for row, test, p in zip(rows, tests, adjusted, strict=True):
        same = (test.mean > 0) == (row[-1] == "higher")
        outcome = "not decided" if p >= 0.05 else "reproduced" if same else "refuted"
        row += [f"{test.mean:+.3f} ({test.low:+.3f} to {test.high:+.3f}), p {p:.2g}", outcome]
    header = [
        "figure",
        "key",
        "value: bias",
        "paper, at the last value",
        "last minus first",
        "outcome",
    ]
    return table(header, rows)


MAKER = Maker(
    "clipping-bias.json", lambda store: {"lm-dp-sgd.md": {"bias by key": page(store)}}, measure
)
