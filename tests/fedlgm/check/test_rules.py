"""Each rule finds its mistake, and nothing in a run without it; figures are upper bounds."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm import mechanisms
from fedlgm.check import Report, Settings, build_settings, check
from fedlgm.check.proof import group_epsilon, prove
from fedlgm.check.report import RULES
from fedlgm.check.settings import MECHANISMS, MEDCLIP_RULES
from fedlgm.check.verdict import Verdict
from fedlgm.errors import ConfigError
from fedlgm.planning import allocation
from fedlgm.privacy import attack_rates, calibrate, epsilon, gaussian_epsilon

SOUND = Settings(
    noise_multiplier=2.0,
    clip=1.0,
    clipping="unit",
    sampler="poisson",
    batch_size=100,
    population=10_000,
    steps=500,
    denominator="expected",
    weights="uniform",
    delta=1e-5,
    epsilon=2.0,
    accounted_as="poisson",
    stated_for="run",
)
SHUFFLED = replace(SOUND, sampler="shuffle", accounted_as="none", epsilon=8.0)
Z = 2.0 * (1 - 1e-12)


def broken(report: Report) -> list[str]:
    return [verdict.rule for verdict in report.verdicts if verdict.status == "broken"]


def test_a_sound_run_holds_with_the_accountants_epsilon() -> None:
    report = check(SOUND)
    assert (report.status, report.missing) == ("holds", ()), str(report)
    assert report.epsilon == epsilon(Z, 1e-5, steps=500, sampling_rate=0.01)
    rates = attack_rates(2.0, sampling_rate=0.01, steps=500)
    assert report.rates is not None
    assert report.rates.tpr(0.01) == pytest.approx(rates.tpr(0.01), rel=1e-9)
    report = check(SHUFFLED)
    assert (report.status, report.relation) == ("holds", "zero-out")
    assert report.epsilon == pytest.approx(gaussian_epsilon(5**0.5 / 2, 1e-5), rel=1e-6)


MISTAKES: list[tuple[str, str, dict[str, Any], float | None]] = [
    # rule, verdict, settings, mu of the Gaussian release that has the proven epsilon (0: none)
    ("mechanism", "broken", {"mechanism": "percentile"}, 0),
    ("mechanism", "broken", {"mechanism": "lm-dp-sgd:published"}, 0),
    ("mechanism", "broken", {"mechanism": "snr-consistent:published"}, 0),
    ("mechanism", "broken", {"mechanism": "ladp:published"}, 0),
    ("mechanism", "conditional", {"mechanism": "gaussian-inid:published"}, 0),
    ("mechanism", "broken", {"mechanism": "laplace", "norm": "l2"}, 0),
    ("mechanism", "conditional", {"mechanism": "laplace"}, 0),
    ("mechanism", "broken", {"noise_multiplier": 0}, 0),
    ("mechanism", "broken", {"noise_seed": "public"}, 0),
    ("sampling", "broken", {"accounted_as": "poisson"}, 5**0.5 / 2),
    ("sampling", "broken", {"sampler": "fixed", "accounted_as": "poisson"}, 500**0.5 / 2),
    ("sampling", "conditional", {"sampler": "fixed", "accounted_as": "fixed"}, 500**0.5 / 2),
    ("sampling", "conditional", {"accounted_as": None}, 5**0.5 / 2),
    ("sampling", "conditional", {"sampler": None}, 500**0.5 / 2),
    ("sampling", "broken", {"trust": "local", "unit": "client", "sampler": "poisson",
                            "accounted_as": "poisson"}, 500**0.5 / 2),
    ("last batch", "broken", {"sampler": "poisson", "drop_last": True}, 500**0.5 / 2),
    ("last batch", "holds", {"drop_last": True}, 5**0.5 / 2),
    ("denominator", "broken", {"sampler": "poisson", "denominator": "realised"}, 500**0.5 / 2),
    ("denominator", "conditional", {"denominator": "realised"}, 5**0.5 / 2),
    ("denominator", "conditional", {"denominator": None}, 5**0.5 / 2),
    ("weights", "broken", {"weights": "examples"}, 0),
    ("clipping", "broken", {"clipping": "batch"}, 0),
    ("clipping", "broken", {"clipping": "none"}, 0),
    ("clipping", "broken", {"clipping": "mixed"}, 0),
    ("clipping", "broken", {"clipping": "rescaled", "sampler": None}, 500**0.5),
    ("clipping", "holds", {"clipping": "rescaled"}, 5**0.5 / 2),
    ("clipping", "broken", {"clipping": "microbatch"}, 5**0.5),
    ("clipping", "broken", {"clipping": "adaptive-late"}, 0),
    ("clipping", "conditional", {"clipping": "adaptive"}, 0),
    ("clipping", "conditional", {"clipping": "adaptive", "count_std": 2.0, "epsilon": 9.0},
     10**0.5 / 2),
    ("scale of the noise", "broken", {"noise_scale": "mean"}, 100 * 5**0.5 / 2),
    ("scale of the noise", "conditional", {"noise_on": "mean"}, 5**0.5 / 200),
    ("scale of the noise", "conditional", {"noise_on": "mean", "denominator": "realised"},
     5**0.5 / 2),
    ("scale of the noise", "broken", {"noise_size": 400}, 4 * 5**0.5 / 2),
    ("scale of the noise", "conditional", {"noise_size": 25}, 5**0.5 / 8),
    ("scale of the noise", "conditional", {"noise_size": 25, "batch_size": None}, 0),
    ("repeated noise", "conditional", {"noise_additions": 2}, 5**0.5 / 8**0.5),
    ("repeated noise", "conditional", {"noise_additions": 2, "trust": "local", "unit": "client"},
     5**0.5 / 2),
    ("layers", "broken", {"layers": 9, "layer_claim": "parallel"}, 3 * 5**0.5 / 2),
    ("layers", "holds", {"layers": 9, "layer_claim": "sum", "epsilon": 50.0}, 3 * 5**0.5 / 2),
    ("layers", "holds", {"layers": 9}, 5**0.5 / 2),
    ("neighbours", "conditional", {"relation": "replace-one", "epsilon": 20.0}, 5**0.5),
    ("neighbours", "conditional", {"relation": "add-remove"}, 5**0.5 / 2),
    ("people", "broken", {"units_per_person": 3}, 3 * 5**0.5 / 2),
    ("scope", "broken", {"stated_for": "round"}, 5**0.5 / 2),
    ("scope", "broken", {"stated_for": "epoch"}, 5**0.5 / 2),
    ("scope", "broken", {"stated_for": "part"}, 5**0.5 / 2),
    ("accounted values", "broken", {"accounted": {"noise_multiplier": 3.0}}, 5**0.5 / 2),
    ("accounted values", "broken", {"accounted": {"steps": 300}}, 5**0.5 / 2),
    ("accounted values", "broken", {"accounted": {"steps": 300}, "noise_multiplier": None}, None),
    ("accounted values", "conditional", {"accounted": {"noise_multiplier": 1.0}}, 5**0.5 / 2),
    ("accounted values", "conditional", {"accounted": {"epochs": 9}}, 5**0.5 / 2),
    ("accounted values", "broken", {"accounted": {"batch_size": 50}}, 5**0.5 / 2),
    ("accounted values", "conditional", {"accounted": {"batch_size": 200}}, 5**0.5 / 2),
    ("accounted values", "broken", {"accounted": {"population": 20_000}, "sampler": "poisson",
                                    "accounted_as": "poisson"}, None),
    ("accounted values", "holds", {"accounted": {"noise_multiplier": 2.0}}, 5**0.5 / 2),
    ("accountant", "broken", {"delta": 0}, 0),
    ("accountant", "broken", {"delta": 0, "mechanism": "laplace", "norm": "l1",
                              "accountant": "rdp"}, None),
    ("accountant", "conditional", {"accountant": "gdp"}, 5**0.5 / 2),
    ("accountant", "conditional", {"accountant": "classical"}, 5**0.5 / 2),
    ("orders", "conditional", {"orders": [32, 64]}, 5**0.5 / 2),
    ("orders", "holds", {"orders": [2, 3, 4, 5, 6, 8]}, 5**0.5 / 2),
    ("delta", "broken", {"delta": 1e-4}, None),
    ("delta", "conditional", {"population": None, "batch_size": None, "epochs": 5}, 5**0.5 / 2),
    ("search", "broken", {"runs": 4, "search_charged": False}, 5**0.5),
    ("search", "holds", {"runs": 4, "search_charged": True, "epsilon": 20.0}, 5**0.5),
    ("search", "conditional", {"runs": 4, "epsilon": 20.0}, 5**0.5),
    ("stated epsilon", "broken", {"epsilon": 4.0}, 5**0.5 / 2),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "status", "changes", "mu"), MISTAKES)
def test_a_mistake_is_found(
    rule: str, status: str, changes: dict[str, Any], mu: float | None
) -> None:
    report = check(replace(SHUFFLED, **changes))
    (verdict,) = [verdict for verdict in report.verdicts if verdict.rule == rule]
    assert (verdict.status, report.status) == (status, report.status), str(report)
    if status == "broken":
        assert broken(report)[0] == rule or rule == "stated epsilon"
    if mu:
        assert report.epsilon == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-6)
    elif mu is not None:
        assert (report.epsilon, report.rates) == (None, None)


def test_every_rule_has_a_mistake() -> None:
    assert {*RULES, "stated epsilon"} == {"description", *(rule for rule, *_ in MISTAKES)}


def test_the_rules_know_all_published_forms() -> None:
    names = {f"{name}:published" for name in mechanisms.names(None) if has_published(name)}
    assert names <= set(MECHANISMS)
    for name in names:
        assert check(Settings(mechanism=name)).status == "broken"


def has_published(name: str) -> bool:
    options = [{}, {"clip": "med"}, {"threshold": 1.0}]
    for values in options:
        try:
            mechanisms.get(name, variant="published", **values)
        except ConfigError:
            continue
        return True
    return False


def test_a_round_of_poisson_samples_for_the_run() -> None:
    single = epsilon(2.0, 1e-5, steps=1, sampling_rate=0.01)
    report = check(replace(SOUND, epsilon=single, stated_for=None))
    assert broken(report) == ["stated epsilon"]


@pytest.mark.parametrize("sampler", ["poisson", "shuffle", "fixed", "all", None])
@pytest.mark.parametrize("accounted", ["poisson", "fixed", "none"])
def test_a_run_of_one_full_batch_is_one_release(sampler: str | None, accounted: str) -> None:
    """The sampler does not matter where everyone takes part, and neither does its accounting."""
    changes = {"sampler": sampler, "accounted_as": accounted, "steps": None, "epochs": 1.0}
    single = gaussian_epsilon(0.5, 1e-5)
    report = check(replace(SOUND, **changes, batch_size=10_000, epsilon=single, stated_for=None))
    assert (report.status, report.epsilon) == ("holds", pytest.approx(single, rel=1e-6))
    more = check(
        replace(SOUND, **changes, batch_size=10_000, epsilon=single, accounted={"steps": 2})
    )
    assert more.status == "conditional"


def test_a_stated_epsilon_that_happens_to_be_that_of_one_release_holds() -> None:
    single = gaussian_epsilon(0.5, 1e-5)
    assert check(replace(SOUND, epsilon=single, stated_for=None)).epsilon < single
    assert check(replace(SOUND, epsilon=single, stated_for=None)).status == "holds"


def test_a_rate_that_was_accounted_for_is_compared_with_a_full_batch() -> None:
    report = check(replace(SOUND, batch_size=10_000, accounted={"sampling_rate": 0.01}))
    assert {"sampling", "accounted values"} <= set(broken(report))


def test_rescaled_contributions_move_by_less_than_twice_the_bound() -> None:
    """Sums of clip(g / n) with and without one example, and of clip(n g)."""
    generator = np.random.default_rng(0)
    for power in (-1, 1):
        for size in (1, 2, 5, 40):
            others = generator.normal(size=(2000, size, 3)) * generator.lognormal(size=(2000, 1, 1))
            extra = generator.normal(size=(2000, 3)) * 10

            def bounded(parts: np.ndarray) -> np.ndarray:
                norms = np.linalg.norm(parts, axis=-1, keepdims=True)
                return parts * np.minimum(1, 1 / norms)

            less = bounded(others * float(size) ** power).sum(1)
            more = bounded(others * float(size + 1) ** power).sum(1)
            more += bounded(extra * float(size + 1) ** power)
            assert np.linalg.norm(more - less, axis=-1).max() <= 2


def test_replaced_units_of_poisson_samples() -> None:
    """By two steps of the profile; twice the multiplier is enough for twice the bound."""
    report = check(replace(SOUND, relation="replace-one"))
    rates = attack_rates(2.0, sampling_rate=0.01, steps=500)
    assert 2 * check(SOUND).epsilon < report.epsilon == group_epsilon(rates, 2, 1e-5)
    assert report.rates is not None
    assert report.rates.units == 2


@given(mu=st.floats(0.05, 1.5), units=st.integers(2, 20))
@settings(max_examples=20, deadline=None)
def test_a_groups_epsilon_is_never_below_the_exact_one(mu: float, units: int) -> None:
    """k Gaussian units together are one Gaussian unit of k mu."""
    bound = group_epsilon(attack_rates(1 / mu), units, 1e-5)
    assert bound >= gaussian_epsilon(units * mu, 1e-5)


def test_shuffled_batches_by_simulation() -> None:
    """The optimal test of one batch per epoch, with the place drawn at random, stays below the
    proven rates, and is near them if the place is known."""
    generator, epochs, batches, noise = np.random.default_rng(3), 4, 3, 2.0
    report = check(replace(SHUFFLED, noise_multiplier=noise, steps=epochs * 100))
    assert report.rates is not None
    place = generator.integers(0, batches, size=(200_000, epochs))
    absent = generator.normal(0, noise, size=(200_000, epochs, batches))
    present = generator.normal(0, noise, size=(200_000, epochs, batches))
    present += np.arange(batches) == place[..., None]

    def tpr(scores: tuple[np.ndarray, np.ndarray], fpr: float) -> float:
        return float((scores[1] > np.quantile(scores[0], 1 - fpr)).mean())

    mixed = [np.log(np.exp(x / noise**2).mean(-1)).sum(-1) for x in (absent, present)]
    known = [np.take_along_axis(x, place[..., None], 2).sum((1, 2)) for x in (absent, present)]
    for fpr in (0.1, 0.01):
        bound = report.rates.tpr(fpr)
        assert tpr((mixed[0], mixed[1]), fpr) < bound
        assert tpr((known[0], known[1]), fpr) == pytest.approx(bound, abs=0.01)


@given(
    factor=st.floats(0.2, 1.0),
    times=st.integers(1, 5),
    units=st.integers(1, 5),
    scheduled=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_no_mistake_lowers_the_figure(
    factor: float, times: int, units: int, scheduled: bool
) -> None:
    effect = Verdict("broken", "", factor=factor, times=times, units=units, scheduled=scheduled)
    run = replace(SOUND, steps=20)
    sound = prove(run, [])
    other = prove(run, [effect])
    assert sound.epsilon is not None
    assert other.epsilon is None or other.epsilon >= sound.epsilon * (1 - 1e-9)


def test_people_with_many_units_of_poisson_samples() -> None:
    few = check(replace(SOUND, units_per_person=2)).epsilon
    many = check(replace(SOUND, units_per_person=1000))
    assert few is not None
    assert many.epsilon is not None
    assert (
        few < many.epsilon == pytest.approx(gaussian_epsilon(1000 * 500**0.5 / 2, 1e-5), rel=1e-6)
    )


def test_laplace_noise_in_the_l1_norm() -> None:
    run = replace(SHUFFLED, mechanism="laplace", norm="l1", delta=0, noise_multiplier=10.0)
    report = check(replace(run, epsilon=0.5))
    assert report.status == "holds", str(report)
    assert report.epsilon == pytest.approx(0.5, rel=1e-9)


def test_accounted_values_of_laplace_noise_are_compared_as_laplace_noise() -> None:
    """Epsilons of Laplace noise add up: twice the noise makes up for two steps, not for four."""
    run = replace(SHUFFLED, mechanism="laplace", norm="l1", noise_multiplier=20.0, delta=0.0)
    for steps, status in ((1000, "holds"), (2000, "broken")):
        settings = replace(run, steps=steps, accounted={"noise_multiplier": 10.0, "steps": 500})
        (verdict,) = [one for one in check(settings).verdicts if one.rule == "accounted values"]
        assert verdict.status == status, verdict


def test_layers_of_laplace_noise_add_up() -> None:
    run = replace(SHUFFLED, mechanism="laplace", norm="l1", delta=0, noise_multiplier=10.0)
    report = check(replace(run, layers=4, layer_claim="sum", epsilon=2.0))
    assert (report.status, report.epsilon) == ("holds", pytest.approx(2.0, rel=1e-9))


def test_less_than_an_epoch_is_one_participation() -> None:
    assert Settings(sampler="shuffle", epochs=1e-300).participation_count == 1
    assert Settings(sampling_rate=0.5, epochs=1e-300).releases == 1


def test_an_unknown_number_of_rounds_is_missing() -> None:
    report = check(Settings(epsilon=1.0, stated_for="round"))
    assert (report.status, "steps" in report.missing) == ("conditional", True)


def test_calibrated_noise_holds_and_a_little_less_does_not() -> None:
    noise = calibrate(2.0, 1e-5, steps=500, sampling_rate=0.01)
    assert check(replace(SOUND, noise_multiplier=noise)).status == "holds"
    assert broken(check(replace(SOUND, noise_multiplier=0.97 * noise))) == ["stated epsilon"]


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_hardly_any_noise_has_no_figure(mechanism: str) -> None:
    changes = {"mechanism": mechanism, "norm": "l1", "epsilon": 1.0, "accountant": "gdp"}
    report = check(replace(SOUND, noise_multiplier=1e-9, **changes))
    assert (report.epsilon, report.rates) == (None, None)
    assert broken(report) == ["amount of noise"]
    assert report.sentence() == "epsilon stated: 1 at delta 1e-05; proven: none"


def test_extreme_settings_end_with_a_figure_or_none() -> None:
    for changes in (
        {"noise_multiplier": 1e300},
        {"noise_multiplier": 1e300, "clipping": "adaptive", "count_std": 1e-300},
        {"clipping": "adaptive", "count_std": 1e-300},
        {"runs": 10**15},
        {"mechanism": "laplace", "norm": "l1", "runs": 10**15, "noise_multiplier": 0.1},
        {"units_per_person": 10**15, "relation": "replace-one"},
        {"steps": 10**6, "noise_multiplier": 2e-3},
        {"layers": 10**15, "layer_claim": "sum"},
        {"noise_on": "mean", "batch_size": 10**15, "population": 10**15, "steps": 1},
    ):
        report = check(replace(SOUND, **changes))
        assert report.epsilon is None or math.isfinite(report.epsilon), changes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"noise_multiplier": math.nan}, "noise_multiplier must be finite"),
        ({"noise_multiplier": True}, "noise_multiplier must be a number"),
        ({"noise_multiplier": "1"}, "noise_multiplier must be a number"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be finite"),
        ({"noise_multiplier": 10**400}, "noise_multiplier must be a number"),
        ({"epsilon": math.inf}, "epsilon must be finite"),
        ({"delta": 1.0}, "delta must lie in"),
        ({"sampling_rate": 0}, "sampling_rate must lie in"),
        ({"sampling_rate": 1.5}, "sampling_rate must lie in"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"population": 10**400}, "population must be a whole number"),
        ({"steps": 10**7}, "more than 1,000,000 steps"),
        ({"epochs": 1e300, "sampling_rate": 1e-300}, "more than 1,000,000 steps"),
        ({"sampler": "Poisson"}, "unknown sampler 'Poisson'; known: poisson"),
        ({"sampler": ["poisson"]}, "unknown sampler"),
        ({"drop_last": 1}, "drop_last must be true or false"),
        ({"accounted": 3}, "accounted must be a mapping"),
        ({"accounted": {"sigma": 3}}, "unknown accounted 'sigma'"),
        ({"accounted": {"steps": 0.5}}, "steps must be a whole number"),
        ({"orders": []}, "orders must be a list"),
        ({"orders": [1.0]}, "1 / order"),
        ({"orders": ["2"]}, "orders must be a list of numbers"),
        ({"mechanism": "dp"}, "unknown mechanism 'dp'"),
        ({"batch_size": 10, "population": 5}, "batch_size 10 is larger than population 5"),
        ({"batch_size": 10, "population": 100, "sampling_rate": 0.2}, "contradicts"),
        ({"steps": 1, "epochs": 10, "sampling_rate": 0.1}, "contradict epochs and rate"),
        ({"rounds": 1, "steps": 1}, "two names of one setting"),
        ({"sampler_": "all"}, "unknown setting 'sampler_'; did you mean 'sampler'"),
        ({"unit": None}, "unknown unit None"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")) as error:
        build_settings(values)
    assert "\n" not in str(error.value)


def test_a_rule_is_one_function_of_the_settings() -> None:
    assert all(callable(rule) for rule in RULES.values())
    folder = Path(__file__).parents[3] / "fedlgm" / "check"
    for file in ("rules.py", "claims.py"):
        for node in ast.parse((folder / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                assert [argument.arg for argument in node.args.args] == ["settings"]


def test_every_allocation_rule_has_a_published_form_that_the_check_knows() -> None:
    assert set(MEDCLIP_RULES) == {"dp-sgd", *allocation.names()}
