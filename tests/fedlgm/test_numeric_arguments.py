"""Every public function that takes a number refuses numbers without a meaning, in one sentence."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fedlgm import LayerTable, RunFacts, Sampling, mechanisms, privacy
from fedlgm.aggregation import contributions
from fedlgm.aggregation.bounded_sum import BoundedSum
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms import adaptive, group_noise, inid, ladp, ladp_frame, lm_dp_sgd, mechanism
from fedlgm.mechanisms.profiles import as_profile
from fedlgm.planning import allocation, clipping, facts, filling, plan, queries, records, trust
from fedlgm.privacy import accounting, attackers, events, floor, gaussian, participation, selection
from fedlgm.privacy.guarantee import Guarantee

PACKAGES = ("mechanisms", "aggregation", "privacy", "planning")
NOT_NUMBERS = (math.nan, np.float32("nan"), -math.inf, -1, np.int64(-1), True, "1", None)
"""No argument takes one, not even an optional one in the place of its number."""
BEYOND: dict[str, tuple[Any, ...]] = {
    "positive": (0, math.inf),
    "non-negative": (math.inf,),
    "at least 0": (),
    "at least 1": (0, 0.5, math.inf),
    "above 1": (0, 1, math.inf),
    "order": (0,),
    "share": (0, 1, 1.5, math.inf),
    "below one": (1, 1.5, math.inf),
    "rate": (0, 1.5, math.inf),
    "fraction": (1.5, math.inf),
    "count": (0, 0.5, math.inf),
    "number": (0.5, math.inf),
}
"""Values beyond the range of each kind of argument."""
LAYERS = LayerTable.from_sizes({"a": 2, "b": 3})
FACTS = RunFacts(1.0, Sampling("poisson", 100, 0.1))
ONE = events.gaussian_event(1.0)
RATES = attackers.AttackRates.of_budget(1.0, 1e-5)


def sum_of(clients: int) -> BoundedSum:
    bounded = BoundedSum(
        plan.ReleasePlan(LAYERS, [1.0, 1.0], [1.0, 1.0], FACTS, Guarantee("proven", "an example")),
        torch.zeros(5),
    )
    bounded.skip(clients)
    return bounded


def quantile_bounds(**options: float) -> np.ndarray:
    return clipping.next_quantile_bounds(np.array([0.6, 0.8]), np.array([1.0, 0.0]), **options)


def trained(bound: float) -> torch.Tensor:
    updates = contributions.BoundedUpdates(torch.ones(1, 1), (bound,))
    return contributions.require_bounds(updates, (2.0,))


def answered(bound: float) -> torch.Tensor:
    answer = contributions.BoundedAnswer("q", torch.ones(1, 1), bound)
    updates = contributions.BoundedUpdates(torch.ones(1, 1), (1.0,), (answer,))
    return contributions.require_bounds(updates, (2.0,), (("q", 1, 2.0),))


BUDGET = {"epsilon": (1.0, "positive"), "delta": (1e-5, "share")}
PURE = {"epsilon": (1.0, "positive"), "delta": (1e-5, "below one")}
STEPS = {"steps": (3, "number"), "sampling_rate": (0.5, "rate")}
AT_LEAST_1_STEP = STEPS | {"steps": (3, "count")}
SHARES_OF_NOISE = {
    "deviation": (3.0, "positive"), "parties": (3, "count"), "sensitivity": (1.0, "positive"),
    "dimension": (4, "count"), "rounds": (2, "count"), "delta": (1e-5, "share"),
}  # fmt: skip
PROFILE = [1.0, 2.0]
ONES = torch.ones(2, 2)

CALLS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, str]]]] = {
    "adaptive.within": (
        lambda **given: adaptive.within(np.ones(2), np.ones(2), **given),
        {"span": (2.0, "at least 1")},
    ),
    "group_noise.calibrate_laplace": (group_noise.calibrate_laplace, PURE | AT_LEAST_1_STEP),
    "inid.gaussian_inid": (
        lambda **given: inid.gaussian_inid(PROFILE, **given),
        BUDGET | {"p": (2.0, "at least 1")},
    ),
    "inid.laplace_inid": (
        lambda **given: inid.laplace_inid(PROFILE, **given),
        PURE | {"p": (2.0, "at least 1")},
    ),
    "inid.laplace_budget": (inid.laplace_budget, PURE),
    "inid.noise_scales": (
        lambda **given: inid.noise_scales("gaussian", "inid", PROFILE, **given),
        {"budget": (1.0, "positive"), "p": (2.0, "at least 1")},
    ),
    "ladp.check_range": (
        lambda **given: ladp.check_range("ladp", **given),
        {"score_floor": (0.5, "positive"), "score_cap": (2.0, "positive")},
    ),
    "ladp_frame.theorem3_constant": (ladp_frame.theorem3_constant, BUDGET),
    "ladp_frame.theorem3_delta": (ladp_frame.theorem3_delta, BUDGET),
    "ladp_frame.noise_constant": (
        lambda **given: ladp_frame.noise_constant("classical", **given),
        BUDGET,
    ),
    "lm_dp_sgd.aggregate": (
        lambda **given: lm_dp_sgd.aggregate([ONES], **given),
        {"clip": (1.0, "positive"), "emphasis": (1.0, "at least 1")},
    ),
    "lm_dp_sgd.check_risk": (
        lambda **given: lm_dp_sgd.check_risk(None, layers=2, **given),
        {"emphasis": (1.0, "at least 1")},
    ),
    "lm_dp_sgd.published_weights": (
        lambda **given: lm_dp_sgd.published_weights(np.ones((2, 2)), **given),
        {"clip": (1.0, "positive"), "emphasis": (1.0, "at least 1")},
    ),
    "lm_dp_sgd.risk_weights": (
        lambda **given: lm_dp_sgd.risk_weights(np.ones(2), **given),
        {"emphasis": (1.0, "at least 1"), "floor": (0.05, "fraction")},
    ),
    "mechanism.released_scales": (
        lambda **given: mechanism.released_scales(
            "uniform", layers=LAYERS, released=np.array([True, True]), **given
        ),
        {"bound": (1.0, "positive"), "multiplier": (1.0, "non-negative")},
    ),
    "Profile.norm": (as_profile(PROFILE).norm, {"order": (2.0, "order")}),
    "accounting.epsilon": (
        accounting.epsilon,
        {"noise_multiplier": (1.0, "non-negative"), "delta": (1e-5, "share")} | STEPS,
    ),
    "accounting.epsilon, allocation": (
        lambda **given: accounting.epsilon(1.0, 1e-5, sampling="allocation", **given),
        {"steps": (3, "count"), "participations": (1, "count")},
    ),
    "accounting.calibrate": (accounting.calibrate, BUDGET | AT_LEAST_1_STEP),
    "accounting.calibrate_levels": (
        lambda level, count, **given: accounting.calibrate_levels({level: count}, **given),
        BUDGET | {"level": (1.0, "positive"), "count": (2, "count"), "draws": (0.5, "rate")},
    ),
    "accounting.composed_epsilon": (
        lambda count, **given: accounting.composed_epsilon([(ONE, count)], **given),
        {"count": (1, "number"), "delta": (1e-5, "below one")},
    ),
    "accounting.is_resolved": (
        lambda **given: accounting.is_resolved([(ONE, 1)], **given),
        {"delta": (1e-5, "below one")},
    ),
    "accounting.quick_epsilon": (
        lambda **given: accounting.quick_epsilon([(ONE, 1)], **given),
        {"delta": (1e-5, "below one")},
    ),
    "attackers.attack_rates": (
        attackers.attack_rates,
        {"source": (1.0, "positive")} | STEPS,
    ),
    "AttackRates.of_budget": (
        attackers.AttackRates.of_budget,
        {"epsilon": (1.0, "at least 0"), "delta": (1e-5, "share")},
    ),
    "AttackRates.of_units": (RATES.of_units, {"units": (2, "count")}),
    "AttackRates.tpr": (RATES.tpr, {"false_positive_rate": (0.1, "fraction")}),
    "distributed.discrete_gaussian_tau": (
        privacy.discrete_gaussian_tau,
        {"deviation": (3.0, "positive"), "parties": (3, "count")},
    ),
    "distributed.distributed_epsilon": (
        lambda **given: privacy.distributed_epsilon("discrete-gaussian", **given),
        SHARES_OF_NOISE,
    ),
    "distributed.distributed_epsilon, Skellam": (
        lambda **given: privacy.distributed_epsilon("skellam", **given),
        SHARES_OF_NOISE,
    ),
    "events.gaussian_event": (
        events.gaussian_event,
        {"multiplier": (1.0, "at least 0"), "sampling_rate": (0.5, "rate")},
    ),
    "events.allocation_event": (
        events.allocation_event,
        {"multiplier": (1.0, "at least 0"), "participations": (1, "count"), "rounds": (3, "count")},
    ),
    "events.laplace_event": (
        events.laplace_event,
        {"epsilon": (1.0, "at least 0"), "sampling_rate": (0.5, "rate")},
    ),
    "events.pure_event": (events.pure_event, {"epsilon": (1.0, "at least 0")}),
    "events.subsample_event": (
        lambda **given: events.subsample_event(ONE, **given),
        {"sampling_rate": (0.5, "rate")},
    ),
    "events.repeat_event": (
        lambda **given: events.repeat_event(ONE, **given),
        {"count": (2, "count")},
    ),
    "events.unfold_event": (
        lambda **given: events.unfold_event(ONE, **given),
        {"count": (2, "number")},
    ),
    "WholeOrdersDpEvent": (
        lambda rho: accounting.composed_epsilon([(events.WholeOrdersDpEvent(rho), 1)], 1e-5, "rdp"),
        {"rho": (1.0, "at least 0")},
    ),
    "floor.at_least": (
        lambda **given: floor.at_least(ONE, **given),
        {"multiplier": (1.0, "at least 0"), "delta": (1e-5, "share")},
    ),
    "gaussian.gaussian_mu": (gaussian.gaussian_mu, BUDGET),
    "gaussian.gaussian_delta": (
        gaussian.gaussian_delta,
        {"mu": (1.0, "at least 0"), "epsilon": (1.0, "non-negative")},
    ),
    "gaussian.gaussian_epsilon": (
        gaussian.gaussian_epsilon,
        {"mu": (1.0, "at least 0"), "delta": (1e-5, "share")},
    ),
    "participation.release_event": (
        participation.release_event,
        {"multiplier": (1.0, "at least 0"), "draws": (0.5, "rate")},
    ),
    "participation.draws_of": (
        lambda **given: participation.draws_of(
            "poisson", participations=None, relation="add-remove", **given
        ),
        STEPS,
    ),
    "participation.check_participations": (
        participation.check_participations,
        {"participations": (1, "count"), "rounds": (3, "count")},
    ),
    "selection.selection_event": (
        lambda **given: selection.selection_event(ONE, **given),
        {"expected_runs": (3.0, "above 1")},
    ),
    "selection.draw_runs": (
        lambda **given: selection.draw_runs(
            law="logarithmic", generator=np.random.default_rng(0), **given
        ),
        {"expected_runs": (3.0, "above 1")},
    ),
    "selection.selection_epsilon": (
        privacy.selection_epsilon,
        {
            "noise_multiplier": (1.0, "positive"),
            "sampling_rate": (0.5, "rate"),
            "steps": (2, "count"),
            "delta": (1e-5, "share"),
            "expected_runs": (3.0, "above 1"),
        },
    ),
    "allocation.allocate": (
        lambda **given: allocation.allocate("uniform", [1.0, 1.0], [1, 2], **given),
        {"noise_multiplier": (1.0, "positive")},
    ),
    "allocation.spread": (
        lambda **given: allocation.spread(np.array([0.5, 0.5]), [1.0, 1.0], **given),
        {"noise_multiplier": (1.0, "non-negative")},
    ),
    "clipping.eq_clip": (clipping.eq_clip, {"bound": (1.0, "positive"), "layers": (2, "count")}),
    "clipping.med_clip": (
        lambda **given: clipping.med_clip(norms=np.array(PROFILE), **given),
        {"bound": (1.0, "positive"), "floor": (0.1, "fraction")},
    ),
    "clipping.med_clip_published": (
        lambda **given: clipping.med_clip_published(private_norms=np.ones((2, 2)), **given),
        {"bound": (1.0, "positive")},
    ),
    "clipping.next_quantile_bounds": (
        quantile_bounds,
        {"bound": (1.0, "positive"), "target": (0.5, "share"), "rate": (0.2, "positive")},
    ),
    "filling.level": (lambda bound: filling.level(ONES, bound), {"bound": (1.0, "positive")}),
    "filling.cut_to_level": (
        lambda bound: filling.cut_to_level(ONES, ONES, (1, 1), bound),
        {"bound": (1.0, "positive")},
    ),
    "filling.cut_row_to_level": (
        lambda bound: filling.cut_row_to_level(torch.ones(2), (1, 1), bound),
        {"bound": (1.0, "positive")},
    ),
    "queries.beside_layers": (
        lambda **given: queries.beside_layers(queries.BelowBound, LAYERS, **given),
        {"multiplier": (1.0, "at least 0"), "share": (0.5, "share")},
    ),
    "NoisyQuery": (
        lambda sigma: queries.NoisyQuery(queries.BelowBound((2, 3)), sigma),
        {"sigma": (1.0, "at least 0")},
    ),
    "records.least_threshold": (
        records.least_threshold,
        {"nodes": (5, "number"), "colluders": (1, "number")},
    ),
    "Shares": (records.Shares, {"threshold": (3, "count"), "colluders": (1, "number")}),
    "Shares.check": (records.Shares(3).check, {"asked": (4, "number")}),
    "Sampling": (
        lambda **given: Sampling("poisson", **given),
        {"population": (10, "count"), "rate": (0.5, "rate")},
    ),
    "Sampling.rate_of_any": (FACTS.sampling.rate_of_any, {"clients": (2, "count")}),
    "trust.gaussian_norm": (trust.gaussian_norm, {"size": (3, "number")}),
    "LocalTraining": (
        facts.LocalTraining,
        {
            "lr": (0.1, "non-negative"),
            "momentum": (0.1, "below one"),
            "epochs": (2, "count"),
            "batch_size": (3, "count"),
            "gradient_clip": (1.0, "positive"),
        },
    ),
    "LocalTraining.steps": (facts.LocalTraining().steps, {"examples": (10, "number")}),
    "LocalSteps": (
        facts.LocalSteps,
        {"count": (2, "count"), "rate": (0.5, "rate"), "batch": (3.0, "positive")},
    ),
    "RunFacts": (
        lambda **given: RunFacts(sampling=FACTS.sampling, **given),
        {
            "noise_multiplier": (1.0, "non-negative"),
            "rounds": (2, "count"),
            "epsilon": (1.0, "positive"),
            "delta": (1e-5, "below one"),
            "overlap": (1, "count"),
        },
    ),
    "RunFacts, local trust": (
        lambda **given: RunFacts(1.0, FACTS.sampling, "replace-one", "local", **given),
        {"max_participations": (1, "count")},
    ),
    "LayerTable.from_sizes": (
        lambda size: LayerTable.from_sizes({"a": size}),
        {"size": (3, "count")},
    ),
    "BoundedSum.skip": (sum_of, {"clients": (2, "number")}),
    **{
        f"mechanisms.get({name!r})": (
            lambda name=name, **given: mechanisms.get(name, **given),
            options,
        )
        for name, options in {
            "uniform": {
                "bound": (1.0, "positive"),
                "floor": (0.1, "fraction"),
                "quantile": (0.5, "share"),
                "quantile_rate": (0.2, "positive"),
            },
            "adaptive": {"memory": (0.9, "fraction"), "span": (2.0, "at least 1")},
            "ladp": {"threshold": (0.1, "non-negative"), "memory": (0.9, "below one")},
            "layer-vote": {"winners": (1, "count"), "share": (0.5, "share")},
            "lm-dp-sgd": {"emphasis": (1.0, "at least 1"), "share": (0.1, "share")},
            "dp-psac": {"stabiliser": (0.1, "positive")},
        }.items()
    },
}
"""Calls with arguments that have a meaning, each with its value and its kind."""
ELSEWHERE = {
    **dict.fromkeys(
        ("device_sum.bound_on", "layout.empty_block", "ops.add_noise_", "philox.noise_key",
         "torch_kernels.layer_moments", "torch_kernels.accumulate", "triton_kernels.layer_moments",
         "triton_kernels.accumulate"),
        "a kernel, whose counts are shapes of its tensors",
    ),
    **dict.fromkeys(
        ("grid.sampled_gaussian", "grid.least_epsilon", "random_allocation.one_of_rounds",
         "renyi.best_orders", "accounting.compose", "accounting.with_gaussian"),
        "a step of `composed_epsilon`, which has checked the numbers",
    ),
    **dict.fromkeys(
        ("attackers.percent", "guarantee.at_nodes", "allocation.floor_digits"),
        "the text or the rounding of a computed figure",
    ),
    "reuse.require_rounds": "compares a ledger with facts that were checked",
    "spending.claimed_epsilon": "composes with `composed_epsilon`",
    "signed.anchor_text": "the text of a row that is in a ledger",
}  # fmt: skip
"""Functions that no user calls with a number of their own, and why."""


@pytest.mark.parametrize(
    ("name", "argument"), [(name, key) for name, (_, given) in CALLS.items() for key in given]
)
@pytest.mark.filterwarnings("error")
def test_numbers_without_a_meaning_are_refused(name: str, argument: str) -> None:
    function, arguments = CALLS[name]
    given = {key: value for key, (value, _) in arguments.items()}
    accepted = []
    for value in (*NOT_NUMBERS, *BEYOND[arguments[argument][1]]):
        if value is None and is_optional(function, argument):
            continue
        try:
            accepted.append((value, function(**{**given, argument: value})))
        except ConfigError as error:
            accepted += [error] if "\n" in str(error) else []
    assert accepted == []


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("error")
def test_numbers_with_a_meaning_are_accepted_also_as_numpys(name: str) -> None:
    function, arguments = CALLS[name]
    function(**{key: value for key, (value, _) in arguments.items()})
    function(**{key: np.array([value])[0] for key, (value, _) in arguments.items()})


def is_optional(function: Callable[..., Any], argument: str) -> bool:
    """Whether None has a meaning: that the argument is left out."""
    parameters = inspect.signature(function).parameters
    return argument in {"gradient_clip", "epsilon", "delta", "max_participations"} and (
        argument not in parameters or "None" in str(parameters[argument].annotation)
    )


def functions_of_numbers() -> Iterator[str]:
    """Public functions with an argument of type float or int, by module and name."""
    for package in PACKAGES:
        root = importlib.import_module(f"fedlgm.{package}")
        for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                is_own = inspect.isfunction(value) and value.__module__ == info.name
                if is_own and not name.startswith("_"):
                    kinds = {
                        str(parameter.annotation).removesuffix(" | None")
                        for parameter in inspect.signature(value).parameters.values()
                    }
                    if kinds & {"float", "int"}:
                        yield f"{info.name.rpartition('.')[2]}.{name}"


def test_every_function_of_numbers_is_tried_here() -> None:
    found = {*functions_of_numbers()}
    assert len(found) > 60
    assert found - {*CALLS} - {*ELSEWHERE} == set(), "try it here, or say why not in ELSEWHERE"
    assert {*ELSEWHERE} <= found


@pytest.mark.parametrize("function", [trained, answered])
def test_bounds_of_a_trainer_without_a_meaning_are_refused(
    function: Callable[[float], torch.Tensor],
) -> None:
    function(1.0)
    for bound in (math.nan, -1.0, math.inf, -math.inf):
        with pytest.raises(PrivacyError):
            function(bound)
