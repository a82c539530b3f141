"""Can accuracy be forecast from public examples? Figures of the last section of docs/results/recommend.md.

    python -m benchmarks.rehearsal            # makes the missing rehearsals of the settings on digits
    python -m benchmarks.rehearsal --write    # the table of the page

A rehearsal trains on public examples with the run's noise: in every round as many public clients as a run's cohort
has, the plan's bounds, noise of the standard deviation that the run adds to the mean, and the run's server step. Its
accuracy on held-out public examples is the forecast. No private example is read, and no forecast uses a measured
accuracy; only the server learning rate is that of the measured runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.kept import Kept
from benchmarks.pages import show, table
from benchmarks.recommend import FLAT, KEPT, PAGE, RULES, SETTINGS, Setting, measured
from fedlgm import data, inputs, mechanisms
from fedlgm.aggregation.bounded_sum import bound_update
from fedlgm.contributions import unbounded
from fedlgm.devices import torch_threads
from fedlgm.keys import KeyRing, Purpose
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.method import Method
from fedlgm.training import ClientTask
from fedlgm.transcript import Transcript
from simulations.advice.recommend import _setting
from simulations.advice.score import Landscape

REHEARSED = PAGE.with_name("rehearsal.json")
SEED = 1


def rehearse(setting: Setting, rule: str, rate: float, seed: int) -> dict[str, Any]:
    """Accuracy (%) of a rehearsal on held-out public examples."""
    changes = [
        *setting.changes,
        *setting.of(rule),
        f"{setting.rate}={rate}",
        "training.vectorize=on",
        f"run.seed={seed}",
    ]
    found, _ = _setting(setting.recipe, None, None, setting.public, None, changes, setting.examples)
    assembly, facts = found.assembly, found.facts
    recipe, public, rng = assembly.recipe, assembly.dataset, np.random.default_rng(seed)
    layers = LayerTable.from_module(assembly.module())
    mechanism = mechanisms.get(rule, bound=float(getattr(assembly.mechanism, "bound", 1.0)))
    method = Method(mechanism, mechanism.table(layers), facts)
    count = max(2, round(len(public.train_y) / max(found.share, 1.0)))
    options = recipe.data.options
    division = data.divide(public, count, recipe.data.partition, seed=seed, **options)
    clients = [rows.astype(np.int64) for rows in division if len(rows)]
    x, y = inputs.tensors(public.train_x), torch.from_numpy(public.train_y)
    trainer, step, keys = assembly.trainer(True, compiled=False), assembly.server_optimizer(), KeyRing.from_seed(seed)
    model = assembly.initial_model()
    expected = facts.sampling.expected
    parties = math.sqrt(facts.noised_by.noises_in_sum(expected))
    generator = torch.Generator().manual_seed(seed)
    plan = method.plan(Transcript.start(model))
    sigma = torch.cat(
        [torch.full((int(size),), float(s)) for size, s in zip(plan.layers.sizes, plan.sigma, strict=True)]
    )
    with torch_threads(1):
        for t in range(recipe.federation.rounds):
            drawn = rng.binomial(recipe.federation.clients, expected / recipe.federation.clients)
            cohort = [clients[i] for i in rng.choice(len(clients), size=min(drawn, len(clients)), replace=False)]
            tasks = [
                ClientTask(
                    inputs.take(x, rows), y[rows], keys.torch_generator(Purpose.PROBE, t, i), recipe.training.epochs
                )
                for i, rows in enumerate(cohort)
            ]
            total = torch.zeros(plan.size, dtype=torch.float64)
            for block in trainer.updates(model, tasks):
                for update in unbounded(block):
                    total += bound_update(update, plan)
            total *= drawn / max(len(cohort), 1)
            noise = sigma * torch.randn(plan.size, generator=generator) * parties
            model = step.step(model, plan.expand(((total + noise) / expected).float()))
    landscape = Landscape(assembly, layers, len(public.test_y), 1)
    return {"forecast": round(100 * landscape.metrics(model)["accuracy"], 3)}


def rates(name: str, setting: Setting) -> dict[str, float]:
    """The rate of each rule's measured runs."""
    if setting.kept is None:
        rows = Kept(KEPT).find(setting=name)
        return {row["rule"]: row["rate"] for row in rows if row["seed"] != setting.search.seed}
    from benchmarks import adaptive

    task = "small" if "64-32-10" in name else "deep"
    names = {"flat Gaussian": FLAT, "uniform": "uniform", "SNR-consistent": "snr-consistent"}
    rows = Kept(adaptive.PAGE.with_suffix(".json")).find(task=task)
    chosen: dict[str, float] = {}
    for label, rule in names.items():
        own = {row["rate"]: row["accuracy"] for row in rows if row["method"] == label and row["seed"] == 100}
        chosen[rule] = max(own, key=lambda rate: own[rate])
    return chosen


def settings() -> dict[str, Setting]:
    """Settings in which whole clients of the digits are protected."""
    return {name: one for name, one in SETTINGS.items() if one.recipe == "digits"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        show(PAGE, page(), write=True)
        return
    kept = Kept(REHEARSED)
    for rule in (FLAT, *RULES):
        for name, setting in settings().items():
            if (rate := rates(name, setting).get(rule)) is not None:
                label = {"setting": name, "rule": rule, "rate": rate, "seed": SEED}
                kept.keep(label, partial(rehearse, setting, rule, rate, SEED))


def page() -> dict[str, str]:
    """The table of forecasts, and what they amount to."""
    kept, runs = Kept(REHEARSED), Kept(KEPT)
    rows, errors, gaps = [], [], []
    for name, setting in settings().items():
        found = measured(name, setting, runs)
        flat: tuple[float, float] | None = None
        for rule in (FLAT, *RULES):
            told = [row["forecast"] for row in kept.find(setting=name, rule=rule)]
            if not told or not found.get(rule):
                continue
            values = list(found[rule].values())
            forecast, accuracy, spread = told[0], statistics.fmean(values), f"{min(values):.1f} to {max(values):.1f}"
            rows.append([name, rule, f"{forecast:.1f}", f"{accuracy:.1f}", spread, f"{forecast - accuracy:+.1f}"])
            errors.append(forecast - accuracy)
            if flat is None:
                flat = (forecast, accuracy)
            else:
                gaps.append((forecast - flat[0], accuracy - flat[1]))
    header = ["setting", "rule", "forecast", "measured", "seeds from", "error"]
    root = math.sqrt(statistics.fmean(error**2 for error in errors))
    agree = sum(told * seen > 0 for told, seen in gaps)
    summary = (
        f"{len(errors)} forecasts: mean error {statistics.fmean(errors):+.1f} points, root mean square {root:.1f}, "
        f"largest {max(errors, key=abs):+.1f}. The sign of the difference from the flat Gaussian is right in {agree} "
        f"of {len(gaps)} cases."
    )
    return {"forecasts": table(header, rows), "forecast errors": summary}


if __name__ == "__main__":
    main()
