"""Differentially private proximal coordinate descent (DP-CD) with scale-perturb-rescale, i.n.i.d.
or i.i.d. noise.

One pass visits the coordinates in order. The private step of coordinate i is a sum over rows of
clipped partial derivatives plus noise; all other steps are post-processing. The sum is additive
over disjoint sets of rows, so each client can add up its rows (`coordinate_gradient_sum`) and a
server can do everything else.

Neighbours under the relation "replace-one" differ by at most 2 C_i in a sum of derivatives clipped
to C_i, and neighbours under "add-remove" by at most C_i. The divisor N is public under both
relations. Sources: DP-CD (Mangold, Bellet, Salmon and Tommasi 2022); i.n.i.d. noise paper, section
VI-A and Algorithm 2. The paper adds noise t_i to the update. Here the noise t_i N / tau_i is added
to the sum, as a client or an aggregator could do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
from dp_accounting import dp_event

from fedlgm.checks import check_count, check_positive
from fedlgm.errors import ConfigError, DataError
from fedlgm.mechanisms.inid import Rule, laplace_budget, noise_scales
from fedlgm.noise.draws import Family, draw
from fedlgm.privacy.gaussian import gaussian_mu
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Guarantee, Relation
from fedlgm_lab.applications.objectives import Array, Objective
from fedlgm_lab.applications.sums import sum_rows


@dataclass(frozen=True, eq=False)
class DescentPlan:
    """The rates, bounds and noise of a private run, which depend only on public numbers.

    Attributes:
        rates: learning rate tau_i of each coordinate, shape [K].
        clip: bound C_i of each row's partial derivative, shape [K].
        noise: noise scale of each coordinate's SUM of clipped derivatives, shape [K] (std, or
            Laplace parameter).
        passes: number L of passes over the coordinates.
        rows: public number N of rows, the divisor of every sum.
        family: law of the noise.
        event: accounting event of the whole run.
        guarantee: status of the privacy claim.
    """

    rates: Array
    clip: Array
    noise: Array
    passes: int
    rows: int
    family: Family
    event: dp_event.DpEvent
    guarantee: Guarantee


def pass_budget(family: Family, epsilon: float, delta: float, passes: int) -> float:
    """Compute the share of an (epsilon, delta) budget for each of `passes` equal passes.

    For Gaussian noise, where mu_0 is the mu of the complete budget, the share is mu_0 /
    sqrt(passes), which is exact because squared mu's of adaptive Gaussian releases add up. For
    Laplace noise it is epsilon / passes of pure DP by basic composition (delta must be 0). If an
    accountant proves a larger budget for `DescentPlan.event` at some delta > 0, that budget may be
    used instead.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_count("passes", passes)
    if family == "gaussian":
        return gaussian_mu(epsilon, delta) / math.sqrt(passes)
    if delta != 0:
        raise ConfigError(
            f"basic composition of Laplace noise is pure DP: delta must be 0, got {delta}"
        )
    return laplace_budget(epsilon) / passes


def plan_descent(
    smoothness: npt.ArrayLike,
    *,
    budget: float,
    rule: Rule,
    clip: float,
    rate: float,
    passes: int,
    rows: int,
    family: Family = "gaussian",
    relation: Relation = "replace-one",
) -> DescentPlan:
    """Choose the learning rates, clipping bounds and noise of a private run.

    Rates are tau_i = rate / M_i and clipping constants C_i = clip * sqrt(M_i / sum_j M_j). With
    rule "spr" (DP-CD) every coordinate spends an equal share of a pass's budget; with "inid"
    (improved DP-CD) the shares minimise the summed squared noise of the updates, sum_i (tau_i
    noise_i / N)^2; with "iid" the updates of all coordinates get the same noise. All three spend
    the budget exactly.

    Args:
        smoothness: public or privately estimated coordinate smoothness constants M_i > 0, shape
            [K].
        budget: budget of one pass (`pass_budget`): mu for Gaussian noise, epsilon for Laplace
            noise.
        rule: "inid", "spr" or "iid".
        clip: l2 bound C of a row's clipped gradient, > 0.
        rate: learning rate tau relative to 1 / M_i, > 0.
        passes: number of passes, >= 1.
        rows: public number of rows, >= 1.
        family: "gaussian" or "laplace".
        relation: neighbouring relation, whose unit is one row.

    Returns:
        The plan.

    Raises:
        ConfigError: an argument is out of range, or a rule, family or relation is unknown.
    """
    m = np.asarray(smoothness, dtype=np.float64)
    if m.ndim != 1 or m.size == 0 or not np.all(np.isfinite(m)) or np.any(m <= 0):
        raise ConfigError(
            "smoothness constants must be a vector of finite numbers > 0; private estimates need a "
            "floor"
        )
    check_positive(budget=budget, clip=clip, rate=rate)
    check_count("passes", passes)
    check_count("rows", rows)
    if (
        family not in get_args(Family)
        or rule not in get_args(Rule)
        or relation not in SENSITIVITY_FACTOR
    ):
        raise ConfigError(
            f"unknown choice ({family!r}, {rule!r}, {relation!r}); family: gaussian, laplace; "
            f"rule: inid, spr, iid; relation: {', '.join(SENSITIVITY_FACTOR)}"
        )
    rates, bounds = rate / m, clip * np.sqrt(m / m.sum())
    sensitivity = SENSITIVITY_FACTOR[relation] * bounds
    if rule == "iid":  # noise of the updates; an update is a rate times a sum
        noise = noise_scales(family, rule, sensitivity * rates, budget) / rates
    else:  # the error of an update is (tau_i / N)^2 times the error of its sum
        noise = noise_scales(family, rule, sensitivity, budget, weights=rates**2)
    guarantee = Guarantee(
        "proven",
        "every release is a sum of clipped derivatives plus noise",
        relation,
        trust="central",
        unit="example",
    )
    event = _event(family, sensitivity / noise, passes)
    return DescentPlan(rates, bounds, noise, passes, rows, family, event, guarantee)


def coordinate_gradient_sum(
    objective: Objective,
    features: Array,
    targets: Array,
    margins: Array,
    coordinate: int,
    clip: float,
) -> float:
    """Add up the rows' partial derivatives of the loss, each clipped to [-clip, clip].

    Args:
        objective: the loss.
        features: the caller's rows, which may be any subset of the data, shape [n, K].
        targets: the rows' targets, shape [n].
        margins: features @ theta at the current public theta, shape [n].
        coordinate: index i in [0, K).
        clip: bound C_i.

    Returns:
        The sum; a non-finite derivative counts as zero.
    """
    derivatives = objective.margin_gradient(margins, targets) * features[:, coordinate]
    return float(
        sum_rows(np.clip(np.nan_to_num(derivatives, nan=0.0, posinf=0.0, neginf=0.0), -clip, clip))
    )


def descend(
    objective: Objective,
    features: npt.ArrayLike,
    targets: npt.ArrayLike,
    plan: DescentPlan,
    rng: np.random.Generator,
) -> Array:
    """Run cyclic proximal coordinate descent from theta = 0.

    Args:
        objective: the objective.
        features: shape [N, K].
        targets: shape [N].
        plan: rates, clipping and noise.
        rng: stream of the noise.

    Returns:
        theta at the start and after every pass, shape [passes + 1, K]. The plan's guarantee covers
        this whole path.

    Raises:
        DataError: the shapes differ from the plan's, or an entry is not finite.
    """
    x, y = check_rows(features, targets)
    if x.shape[1] != plan.clip.size:
        raise DataError(
            f"the plan is for {plan.clip.size} coordinates, but the features have {x.shape[1]}"
        )
    noise = draw(plan.family, plan.noise, rng, size=(plan.passes, plan.noise.size))
    path = np.zeros((plan.passes + 1, plan.clip.size))
    margins = np.zeros(len(x))
    for step in range(plan.passes):
        theta = path[step + 1]
        theta[:] = path[step]
        for i, rate in enumerate(plan.rates):
            total = (
                coordinate_gradient_sum(objective, x, y, margins, i, plan.clip[i]) + noise[step, i]
            )
            moved = objective.prox(theta[i] - rate * total / plan.rows, rate)
            margins += x[:, i] * (moved - theta[i])
            theta[i] = moved
    return path


def check_rows(features: npt.ArrayLike, targets: npt.ArrayLike) -> tuple[Array, Array]:
    """Check features [N, K] and targets [N], and convert them to double precision.

    Raises:
        DataError: a shape is wrong or an entry is not finite.
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise DataError(
            f"features must have shape [N, K] and targets [N], got {x.shape} and {y.shape}"
        )
    if not (np.all(np.isfinite(x)) and np.all(np.isfinite(y))):
        raise DataError("features and targets must be finite; drop or impute missing values first")
    return x, y


def _event(family: Family, ratios: Array, passes: int) -> dp_event.DpEvent:
    """Build the event of all passes; `ratios` are sensitivity over noise scale, per coordinate."""
    if family == "gaussian":
        return dp_event.GaussianDpEvent(1 / math.sqrt(passes * float(ratios @ ratios)))
    one_pass = dp_event.ComposedDpEvent(
        [dp_event.LaplaceDpEvent(1 / float(ratio)) for ratio in ratios]
    )
    return dp_event.SelfComposedDpEvent(one_pass, passes)
