"""Private coordinate descent at equal proven budgets (Figures 5 and 6 and Table V of the i.n.i.d.
noise paper).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from dp_accounting.pld import privacy_loss_distribution

from fedlgm.mechanisms import inid
from fedlgm.noise.draws import Family
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.privacy.gaussian import gaussian_mu
from fedlgm_lab.applications import coordinate_descent as cd
from fedlgm_lab.applications.datasets import TabularData, load_tabular
from fedlgm_lab.applications.objectives import Array, Lasso, Logistic, Objective
from fedlgm_lab.applications.smoothness import smoothness
from fedlgm_lab.studies.tables.pages import interval
from fedlgm_lab.studies.tables.private_smoothness import private_smoothness

Rows = list[dict[str, Any]]
Setting = tuple[int, float, float]  # passes, clip, rate
TUNING_SEEDS, SEEDS = range(1000, 1005), range(20)
RULES: tuple[inid.Rule, ...] = ("spr", "inid")
GRID: list[Setting] = list(
    itertools.product((2, 5, 10, 20, 50), (0.1, 0.3, 1.0, 3.0, 10.0, 30.0), (0.1, 0.3, 1.0))
)
SETS = tuple(
    itertools.product(("diabetes", "breast-cancer"), ("range", "centered", "standardized"))
)


@lru_cache
def laplace_pass_budget(epsilon: float, delta: float, size: int, passes: int) -> float:
    """Compute the largest epsilon per pass for which `passes * size` equal Laplace releases are
    (epsilon, delta)-DP, by their privacy loss distribution.
    """

    def fits(budget: float) -> bool:
        one = privacy_loss_distribution.from_laplace_mechanism(
            size / budget, value_discretization_interval=1e-4
        )
        return bool(one.self_compose(size * passes).get_delta_for_epsilon(epsilon) <= delta)

    low, high = (
        epsilon / passes,
        4 * gaussian_mu(epsilon, delta) * math.sqrt(size / passes) + 2 * epsilon,
    )
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Problem(NamedTuple):
    """A task with its non-private optimum and smoothness constants."""

    data: TabularData
    objective: Objective
    smoothness: Array
    best: float

    @classmethod
    def load(cls, name: str, scaling: str) -> Problem:
        data = load_tabular(name, scaling=scaling)
        objective: Objective = Logistic(0.01) if data.classification else Lasso(0.01)
        m, count = smoothness(objective, data.features), len(data.targets)
        plan = cd.plan_descent(
            m, budget=1.0, rule="spr", clip=1.0, rate=1.0, passes=4000, rows=count
        )
        plan = replace(plan, clip=np.full(m.size, np.inf), noise=np.zeros(m.size))
        theta = cd.descend(
            objective, data.features, data.targets, plan, KeyRing(0).numpy_generator(Purpose.NOISE)
        )[-1]
        return cls(data, objective, m, objective.value(theta, data.features, data.targets))


class Variant(NamedTuple):
    """How noise is drawn and accounted for. The share `share` of epsilon pays for private
    smoothness constants.
    """

    label: str
    family: Family
    share: float = 0.0
    by_pld: bool = False


def descent_errors(
    problem: Problem, variant: Variant, rule: inid.Rule, setting: Setting, seeds: range
) -> Array:
    """Compute each seed's objective relative to the optimum, as an excess in per cent, at epsilon 1
    and delta 1/N^2.
    """
    (passes, clip, rate), count = setting, len(problem.data.targets)
    epsilon, delta, size = 1.0 - variant.share, 1 / count**2, problem.smoothness.size
    if variant.by_pld:
        budget = laplace_pass_budget(epsilon, delta, size, passes)
    else:
        budget = cd.pass_budget(
            variant.family, epsilon, delta if variant.family == "gaussian" else 0.0, passes
        )
    x, y, objective, out = problem.data.features, problem.data.targets, problem.objective, []
    for seed in seeds:
        keys, m = KeyRing.from_seed(seed), problem.smoothness
        if variant.share:
            rng = keys.numpy_generator(Purpose.PROBE)
            m = private_smoothness(
                objective, x, np.ones(size), epsilon=variant.share, rows=count, rng=rng
            )
        plan = cd.plan_descent(
            m,
            budget=budget,
            rule=rule,
            clip=clip,
            rate=rate,
            passes=passes,
            rows=count,
            family=variant.family,
        )
        theta = cd.descend(objective, x, y, plan, keys.numpy_generator(Purpose.NOISE))[-1]
        out.append(100 * (objective.value(theta, x, y) / problem.best - 1))
    return np.array(out)


def descent() -> Rows:
    """Compare DP-CD with improved DP-CD at equal proven budgets, with each method's settings tuned
    on separate seeds.
    """
    rows: Rows = []
    for name, scaling in SETS:
        problem = Problem.load(name, scaling)
        update = problem.smoothness**-0.5  # profile of the updates, up to a constant factor
        gain = 10 * math.log10(update.size * float(update @ update) / float(update.sum()) ** 2)
        variants = [Variant("Gaussian", "gaussian"), Variant("Laplace, (eps, 0)", "laplace")]
        variants += (
            [Variant("Gaussian, M private (10 %)", "gaussian", share=0.1)]
            if scaling == "range"
            else []
        )
        for variant in [*variants, Variant("Laplace, (eps, delta) by PLD", "laplace", by_pld=True)]:
            measured: dict[str, Array] = {}
            for rule in RULES[: 1 if variant.by_pld else 2]:
                scores = [
                    descent_errors(problem, variant, rule, s, TUNING_SEEDS).mean() for s in GRID
                ]
                measured[rule] = descent_errors(
                    problem, variant, rule, GRID[int(np.argmin(scores))], SEEDS
                )
            row: dict[str, Any] = {
                "data": f"{name}, {scaling}",
                "K": update.size,
                "noise": variant.label,
            }
            row |= {"gain in noise (dB)": gain, "DP-CD (%)": interval(measured["spr"], 2)}
            both = "inid" in measured
            row["improved DP-CD (%)"] = interval(measured["inid"], 2) if both else "-"
            row["improved minus DP-CD"] = (
                interval(measured["inid"] - measured["spr"], 2) if both else "-"
            )
            rows.append(row)
    return rows
