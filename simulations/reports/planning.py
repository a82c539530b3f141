"""A recipe's plan and partition, without training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedlgm.errors import PrivacyError
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.accounting import composed_epsilon
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.reports.rounds import described, noise_over_rounds
from simulations.reports.rows import Beliefs, InShares, NoiseProcess, PartitionReport, PlanReport
from simulations.runs.rows import LayerRow


def plan_report(recipe: Recipe) -> PlanReport:
    """First round's plan of a recipe as plain values, with the cost of all rounds by both accountants.

    Bundled data sets need not be present, because their published figures suffice for a plan.
    """
    return planned(Assembly(recipe, planned=True))


def planned(assembly: Assembly) -> PlanReport:
    """See `plan_report`."""
    recipe = assembly.recipe
    mechanism, layers, facts = assembly.mechanism, assembly.layers, assembly.facts
    plan = assembly.first_plan()
    privacy = recipe.privacy
    costs = mechanism.costs(layers, facts.rounds)
    # Under local trust a client may be drawn in the dearest rounds.
    releases = np.sort(costs)[-facts.releases :] / costs[0]
    return {
        "recipe": recipe.name,
        "mechanism": recipe.mechanism.name,
        "variant": recipe.mechanism.variant,
        "layers": layer_rows(plan),
        "parameters": layers.size,
        "bound": float(np.linalg.norm(plan.clip[plan.released], ord=2 if plan.family == "gaussian" else 1)),
        "noise_norm": math.sqrt(float((plan.noise_norms**2).sum())),
        "noise_multiplier": facts.noise_multiplier,
        "effective_multiplier": plan.effective_multiplier,
        "rounds": recipe.federation.rounds,
        "unit": recipe.unit,
        "sampling": recipe.protects.words(assembly),
        "delta": privacy.delta,
        "epsilon_pld": _epsilon(plan, releases, privacy.delta, "pld"),
        "epsilon_rdp": _epsilon(plan, releases, privacy.delta, "rdp"),
        "guarantee": plan.guarantee.sentence(noise_reproducible=recipe.run.seed is not None),
        "guarantee_status": plan.guarantee.status,
        "noise_reproducible": recipe.run.seed is not None,
        **_beliefs(assembly),
        **_in_shares(plan),
        **_over_rounds(recipe, plan),
    }


def _beliefs(assembly: Assembly) -> Beliefs:
    return {"stated": assembly.stated} if assembly.stated else {}


def _in_shares(plan: ReleasePlan) -> InShares:
    facts = plan.facts
    readers = facts.noised_by.readers_epsilon(facts, facts.rounds)
    return {} if readers is None else {"shares": facts.noised_by.planned(plan), "readers_epsilon": readers}


def _over_rounds(recipe: Recipe, plan: ReleasePlan) -> NoiseProcess:
    """Noise over the rounds, if they are one mechanism."""
    found = noise_over_rounds(plan.facts, plan.sigma, plan.layers.sizes, recipe.workload)
    if found is None:
        return {}
    return {
        "noise_process": described(recipe),
        "correlated": plan.facts.noise is not None,
        "noise_over_rounds": found.rows(),
        "error_of_the_model": found.means(),
    }


def _epsilon(first: ReleasePlan, releases: np.ndarray, delta: float, accountant: str) -> float:
    """Cost of releases at the given costs relative to the first; `inf` if the accountant has no bound for them."""
    if first.size == 0:
        return 0.0  # nothing is released, so the model does not move and nothing ever will be
    run = first.facts.run
    if run is None or not first.protected:
        events = [
            (replace(first, sigma=first.sigma / math.sqrt(cost)).event, int(count))
            for cost, count in zip(*np.unique(releases, return_counts=True), strict=True)
        ]
    else:
        events = run.events(first.facts.least_multiplier)
    try:
        return composed_epsilon(events, delta, accountant)
    except PrivacyError:  # RDP: sampled Laplace noise
        return math.inf


def layer_rows(plan: ReleasePlan) -> list[LayerRow]:
    """One row per layer, with sizes, bound, noise, share and SNR."""
    columns = zip(
        plan.layers.names, plan.layers.sizes, plan.clip, plan.sigma, plan.shares, plan.snr, plan.noise_norms,
        plan.released, strict=True,
    )  # fmt: skip
    return [
        {
            "layer": name,
            "size": int(size),
            "clip": float(clip),
            "sigma": float(sigma),
            "share": float(share),
            "snr": float(snr),
            "noise_norm": float(noise),
            "released": bool(released),
        }
        for name, size, clip, sigma, share, snr, noise, released in columns
    ]


def partition_report(recipe: Recipe, picture: Path) -> PartitionReport:
    """Label histogram of every client, drawn to `picture`."""
    from simulations.reports.figures import draw_partition

    assembly = Assembly(recipe)
    dataset, sizes = assembly.dataset, assembly.sizes
    labelled = dataset.classes is not None and dataset.train_y.ndim == 1
    labels = dataset.train_y if labelled else np.zeros(len(dataset.train_y), dtype=np.int64)
    classes = (dataset.classes or 1) if labelled else 1
    histogram = assembly.partition.label_histogram(labels, classes)
    draw_partition(histogram, f"{dataset.name}, {recipe.data.partition}", picture)
    return {
        "recipe": recipe.name,
        "scheme": recipe.data.partition,
        "clients": len(sizes),
        "classes": classes,
        "sizes": {
            "min": int(sizes.min()),
            "median": float(np.median(sizes)),
            "max": int(sizes.max()),
            "empty": int((sizes == 0).sum()),
        },
        "histogram": histogram.tolist(),
        "picture": str(picture),
    }
