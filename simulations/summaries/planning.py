"""A recipe's plan and partition, without training."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from dp_accounting import dp_event

from fedlgm.errors import PrivacyError
from fedlgm.planning import charging
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.accountants import ACCOUNTANTS
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.attackers import attack_rates
from fedlgm.privacy.guarantee import Accountant
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.runs.rows import LayerRow
from simulations.summaries.report_types import PlanReport
from simulations.summaries.rounds import noise_in_words, noise_over_rounds


def plan_report(recipe: Recipe) -> PlanReport:
    """First round's plan of a recipe as plain values, with the cost of all rounds by every
    accountant.

    Bundled data sets need not be present, because their published figures suffice for a plan.
    """
    return plan_report_of(Assembly(recipe, planned=True))


def plan_report_of(assembly: Assembly) -> PlanReport:
    """The report of a run's objects, as from `plan_report`."""
    recipe = assembly.recipe
    mechanism, layers, facts = (
        assembly.model.mechanism,
        assembly.model.layers,
        assembly.privacy.facts,
    )
    plan = assembly.privacy.first_plan()
    delta = recipe.privacy.delta
    costs = mechanism.costs(layers, facts.rounds)
    # Under local trust a client may be drawn in the most expensive rounds.
    releases = np.sort(costs)[-facts.releases :] / costs[0]
    charged = _events(plan, releases)
    rates = attack_rates(
        dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(*event) for event in charged])
    )
    report: PlanReport = {
        "recipe": recipe.name,
        "mechanism": recipe.mechanism.name,
        "variant": recipe.mechanism.variant,
        "layers": layer_rows(plan),
        "parameters": layers.size,
        "bound": float(
            np.linalg.norm(plan.clip[plan.released], ord=2 if plan.family == "gaussian" else 1)
        ),
        "noise_norm": math.sqrt(float((plan.noise_norms**2).sum())),
        "noise_multiplier": facts.noise_multiplier,
        "effective_multiplier": plan.effective_multiplier,
        "rounds": recipe.federation.rounds,
        "unit": recipe.unit,
        "sampling": recipe.protects.words(recipe.sampling, facts),
        "delta": delta,
        "epsilons": {name: _epsilon(charged, delta, name) for name in ACCOUNTANTS},
        "attack_rates": rates.figures(),
        "attack": rates.sentence(recipe.units),
        "guarantee": plan.guarantee.sentence(noise_reproducible=recipe.run.seed is not None),
        "guarantee_status": plan.guarantee.status,
        "noise_reproducible": recipe.run.seed is not None,
    }
    if assembly.privacy.stated:
        report["stated"] = assembly.privacy.stated
    readers = facts.noised_by.readers_epsilon(facts, facts.rounds)
    if readers is not None:
        report["shares"], report["readers_epsilon"] = facts.noised_by.public_figures(plan), readers
    noise = noise_over_rounds(facts, plan.sigma, plan.layers.sizes, recipe.workload)
    if noise is not None:
        report["noise_process"], report["correlated"] = (
            noise_in_words(recipe),
            facts.noise is not None,
        )
        report["noise_over_rounds"], report["error_of_the_model"] = noise.rows(), noise.means()
    return report


def _events(first: ReleasePlan, releases: np.ndarray) -> list[tuple[dp_event.DpEvent, int]]:
    """Events with their numbers of releases. `releases` are the costs of the releases relative to
    the first release.
    """
    if first.size == 0:
        # nothing is released, so the model does not change and later rounds release nothing either
        return []
    process = charging.of(first.facts)
    if process.joint and first.protected:
        return process.run_events()
    return [
        (replace(first, sigma=first.sigma / math.sqrt(cost)).event, int(count))
        for cost, count in zip(*np.unique(releases, return_counts=True), strict=True)
    ]


def _epsilon(
    events: list[tuple[dp_event.DpEvent, int]], delta: float, accountant: Accountant
) -> float:
    """Cost of releases; `inf` if the accountant has no bound for them."""
    try:
        return composed_epsilon(events, delta, accountant)
    except PrivacyError:  # RDP: sampled Laplace noise
        return math.inf


def layer_rows(plan: ReleasePlan) -> list[LayerRow]:
    """One row per layer, with sizes, bound, noise, share and SNR."""
    columns = zip(
        plan.layers.names,
        plan.layers.sizes,
        plan.clip,
        plan.sigma,
        plan.shares,
        plan.snr,
        plan.noise_norms,
        plan.released,
        strict=True,
    )
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


def class_counts(assembly: Assembly) -> np.ndarray:
    """Examples by client and class, int64 [clients, classes]; one column if the targets are not
    classes.
    """
    data_set = assembly.data.dataset
    if data_set.classes is None or data_set.train_y.ndim != 1:
        return assembly.data.sizes[:, None]
    return assembly.data.partition.label_histogram(data_set.train_y, data_set.classes)
