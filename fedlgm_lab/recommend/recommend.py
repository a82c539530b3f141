"""`recommend`: choose a rule for a model from public examples only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlgm import data as data_sets
from fedlgm import mechanisms
from fedlgm.data import DataSet
from fedlgm.errors import ConfigError
from fedlgm.mechanisms import BoundsExamples
from fedlgm.mechanisms.method import Method
from fedlgm.planning import allocation
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.training.devices import plain_defaults, torch_threads
from fedlgm_lab.recommend.model_work import Work
from fedlgm_lab.recommend.picture import bars
from fedlgm_lab.recommend.score import Curvature, Landscape, score
from fedlgm_lab.recommend.score_rows import Advice, LayerAdvice, StageRow
from fedlgm_lab.recommend.setting import Setting, setting_of
from fedlgm_lab.recommend.units import Clients, Examples, Units, bound_of
from fedlgm_lab.recommend.verdict import FLAT, LEVELLED, verdict
from simulations.arguments import refuse_unknown
from simulations.config.assembly import Assembly
from simulations.config.overrides import Overrides
from simulations.config.recipe import Recipe
from simulations.figures import Figures

RULES = tuple(rule for rule in allocation.names() if rule != "max-snr-sum")
"""The scored allocation rules. max-snr-sum is not among them: it releases only one layer in a
round, which the score of a single round cannot judge.
"""
STAGES = (0.3, 0.6, 0.9)
"""Stages of the warm-up at which models are scored, as shares of the warm-up's total decrease of
the held-out loss.
"""
_AT_CHANCE = 0.95  # a warm-up has to get below this share of the loss of a constant prediction


class Recommendation(Figures):
    """A recommendation, as a JSON-compatible mapping with its figures as attributes.

    Attributes:
        scores: rule -> geometric mean, over the stages, of its score's ratio to the flat Gaussian's
            score.
        advice: what to use, in a sentence.

    Example:
        >>> Recommendation({"advice": "use gaussian.", "scores": {"gaussian": 1.0, "uniform": 1.1}})
        Recommendation(use gaussian. Scores: gaussian 1.00, uniform 1.10)
    """

    def __init__(self, values: Advice) -> None:
        super().__init__(values)
        self.scores: dict[str, float] = dict(values["scores"])
        self.advice: str = values["advice"]

    def __repr__(self) -> str:
        scores = ", ".join(f"{rule} {ratio:.2f}" for rule, ratio in self.scores.items())
        return f"Recommendation({self.advice} Scores: {scores})"

    def _repr_html_(self) -> str:
        lines = "\n".join(bars(self.scores))
        return f"<p>{self.advice}</p><pre>{lines}</pre>"


@plain_defaults()
def recommend(
    recipe: str | Path | Recipe | None = None,
    *,
    model: Any = None,
    data: Any = None,
    users: Any = None,
    public: Any = None,
    task: Any = None,
    overrides: Overrides = (),
    examples: int | None = None,
    **options: Any,
) -> Recommendation:
    """Score allocation rules on public examples, without reading a private example or spending
    budget.

    A short warm-up trains the model on the public examples. At a few stages of the warm-up, each
    rule gets the score

        (-g . m)^2 / sum_l trace(H_l) (sigma_l / (q N))^2

    with g and H the gradient and Hessian of the public loss, m the mean bounded update, sigma_l the
    noise of layer l and q N the expected cohort. Scores are ratios to the score of the flat
    Gaussian mechanism at the same bound. Scores assume that the server's learning rate is chosen
    for each rule separately. docs/results/recommend.md compares predictions with runs.

    Args:
        recipe: as for `simulate`; it gives population, sampling, local training, bound and budget.
        model: as for `simulate`.
        data: as for `simulate`; only shapes and test examples are read.
        users: as for `simulate`; only their number is read. If `users` names a column of tables,
            `federation.clients` gives the number.
        public: examples for the computation: "test" (the recipe's test examples), the name of a
            data set, such as "digits/public" for a recipe of "digits/private", or a `DataSet` or
            mapping, whose training examples are public; or (x [n, ...], y [n, ...]). None generates
            examples of the right shape, with a warning.
        task: as for `simulate`.
        overrides: as for `simulate`.
        examples: number of training examples of all clients together, if it is public; not needed
            for a bundled set.
        options: unknown arguments. They are refused, and the message names the recipe key that may
            be meant.

    Returns:
        The scores, the advice, and the layers' sizes, norms and suggested bounds. Repeated calls
        return the same result.

    Raises:
        ConfigError: the mechanism has no noise, or the warm-up did not get beyond chance, so that
            its models are not representative.
        DataError: the public examples do not fit.

    Example:
        >>> import simulations
        >>> found = simulations.recommend("digits", public="digits/public", overrides=["data.name=digits/private"])
        >>> found.scores["gaussian"], "uniform" in found.scores
        (1.0, True)
    """
    refuse_unknown("recommend", options)
    setting, source = setting_of(
        recipe, model, data_sets.with_users(data, users), public, task, overrides, examples
    )
    assembly, parsed = setting.assembly, setting.assembly.recipe
    with torch_threads(1):
        work = Work.of(assembly)
        units = _units(setting, work)
        methods = _methods(units.layers, setting.facts, assembly)
        landscape = Landscape(assembly, units.layers, work.held_out, work.probes)
        stages, layers = _stages(units, methods, landscape, work)
    scores = {
        rule: math.exp(float(np.mean([math.log(max(row["ratios"][rule], 1e-9)) for row in stages])))
        for rule in methods
    }
    sampling, facts = setting.facts.sampling, setting.facts
    expected, parties = (
        sampling.expected,
        math.sqrt(facts.noised_by.noises_in_sum(sampling.expected)),
    )
    if facts.steps:
        expected, parties = facts.steps.batch, 1.0
    return Recommendation(
        {
            "recipe": parsed.name,
            "unit": parsed.unit,
            "public": source,
            "advice": verdict(scores, parsed.protects.mechanisms),
            "scores": scores,
            "stages": stages,
            "layers": layers,
            "noise_multiplier": facts.noise_multiplier,
            "noise_on_mean": facts.noise_multiplier * parties / expected,
            "bound": bound_of(assembly),
            "suggested_bound": math.sqrt(sum(row["norm"] ** 2 for row in layers)),
            "examples_per_client": setting.share,
            "assumed": setting.assumed,
            "private_examples_read": 0,
        }
    )


def _methods(layers: LayerTable, facts: RunFacts, assembly: Assembly) -> dict[str, Method]:
    """Build the method of every rule at the recipe's bound; the flat rule comes first."""
    bound = bound_of(assembly)
    if isinstance(assembly.model.mechanism, BoundsExamples):
        by_rule = {FLAT: mechanisms.get("dp-sgd", bound=bound)}
        for rule in RULES:
            by_rule[rule] = mechanisms.get(
                "dp-sgd", bound=bound, style="per-layer", allocation=rule
            )
    else:
        by_rule = {rule: mechanisms.get(rule, bound=bound) for rule in (FLAT, *RULES, LEVELLED)}
    return {
        rule: Method(mechanism, mechanism.table(layers), facts)
        for rule, mechanism in by_rule.items()
    }


def _units(setting: Setting, work: Work) -> Units:
    if isinstance(setting.assembly.model.mechanism, BoundsExamples):
        return Examples(setting.assembly, work.stage)
    return Clients(setting.assembly, work.stage, setting.share)


def _stages(
    units: Units, methods: Mapping[str, Method], landscape: Landscape, work: Work
) -> tuple[list[StageRow], list[LayerAdvice]]:
    """Score the rules at stages of a warm-up, and summarise the layers over all stages."""
    rows: list[StageRow] = []
    norms: list[Tensor] = []
    traces = []
    start, path = _warmed_up(units, landscape, work)
    least = min(loss for _, _, loss in path)
    _refuse_chance(units.assembly.data.dataset, start, least)
    seen: dict[int, tuple[list[Tensor], list[ReleasePlan], Tensor, Curvature]] = {}
    for share in STAGES:
        target = start - share * (start - least)
        steps, model, _ = next(point for point in path if point[2] <= target)
        if steps not in seen:  # in a short warm-up one model may be the first to reach two stages
            seen[steps] = (*units.observe(model, list(methods.values())), landscape.at(model))
        means, plans, lengths, curvature = seen[steps]
        values = [score(curvature, mean, plan) for mean, plan in zip(means, plans, strict=True)]
        if values[0] <= 0:
            # the loss on public examples does not fall along the mean update: nothing can be
            # compared here
            continue
        ratios = {rule: value / values[0] for rule, value in zip(methods, values, strict=True)}
        rows.append(
            {"steps": steps, "metrics": curvature.metrics, "initial_loss": start, "ratios": ratios}
        )
        norms.append(lengths)
        traces.append(curvature.traces)
    if not rows:
        raise ConfigError(
            "the clients' mean update never lowers the loss on public examples, at any model of "
            "the warm-up: pass more public examples, or use a smaller learning rate"
        )
    together = torch.cat(norms)
    median, mean_traces = together.nanmedian(dim=0).values, np.mean(traces, axis=0)
    total = float(together.square().sum(dim=1).sqrt().nanmedian()) or 1.0
    scale = total / max(float(median.norm()), 1e-12)
    layers: list[LayerAdvice] = [
        {
            "layer": name,
            "size": int(size),
            "norm": float(length),
            "trace": float(trace),
            "suggested_bound": float(length) * scale,
        }
        for name, size, length, trace in zip(
            units.layers.names, units.layers.sizes, median, mean_traces, strict=True
        )
    ]
    return rows, layers


def _warmed_up(
    units: Units, landscape: Landscape, work: Work
) -> tuple[float, list[tuple[int, Tensor, float]]]:
    """Warm up without noise; return the held-out loss of the initial model, and the steps, model
    and loss at points of the warm-up.
    """
    model, done = units.assembly.model.initial(), 0
    start, path = landscape.metrics(model)["loss"], []
    for steps in work.points(units.layers.size):
        model = units.warm_up(model, work.batches(units.warming, done, steps))
        done = steps
        loss = landscape.metrics(model)["loss"]
        path.append((steps, model, loss if math.isfinite(loss) else math.inf))
    return start, path


def _refuse_chance(dataset: DataSet, start: float, least: float) -> None:
    """Refuse a warm-up that is still at chance, because scores of its models say nothing about
    later models.
    """
    constant = _constant_loss(dataset)
    chance, whose = min((constant, "a constant prediction"), (start, "the initial model"))
    if not least < _AT_CHANCE * chance:
        raise ConfigError(
            f"the warm-up is at chance: the loss on public examples is {least:.4g} at its best, "
            f"and {chance:.4g} for {whose}; such a model allows no advice: pass more or other "
            "public examples, or use another learning rate or a model that learns faster; if "
            "clients are the unit, they may choose: mechanism.name = 'voted-filling'"
        )


def _constant_loss(dataset: DataSet) -> float:
    """Compute the loss of predicting the frequencies of the classes; infinite without classes."""
    y = dataset.test_y
    if not np.issubdtype(y.dtype, np.integer) or dataset.classes is None:
        return math.inf
    counts = np.bincount(y[y >= 0].reshape(-1), minlength=1)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
