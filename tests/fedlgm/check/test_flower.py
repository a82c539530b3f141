"""Strategies, mods and accountants of the installed Flower."""

from __future__ import annotations

import math
from typing import Any

import pytest
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import PrivacyConfig, RdpAccountant
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
)
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    SamplingMethod,
)

import fedlgm.check
from fedlgm.errors import ConfigError
from fedlgm.privacy import gaussian_epsilon

SERVER = DifferentialPrivacyServerSideFixedClipping


def config(
    relation: str = "ADD_OR_REMOVE_ONE", sampling: str = "NO_AMPLIFICATION", **options: Any
) -> PrivacyConfig:
    return PrivacyConfig(
        target_delta=1e-5,
        population_size=100,
        neighboring_relation=NeighboringRelation[relation],
        sampling_method=SamplingMethod[sampling],
        **options,
    )


@pytest.mark.parametrize("kind", [SERVER, DifferentialPrivacyClientSideFixedClipping])
def test_default_weights_are_private(kind: Any) -> None:
    tenth = FedAvg(fraction_train=0.1)
    report = fedlgm.check.flower(kind(tenth, 1.0, 1.0, 10), rounds=10, population=100)
    assert (report.status, report.epsilon, report.settings.unit) == ("broken", None, "client")
    report = fedlgm.check.flower(
        kind(tenth, 1.0, 1.0, 10), rounds=10, population=100, weights="uniform", delta=1e-5
    )
    assert report.status == "conditional"  # on replies of all clients
    assert report.epsilon == pytest.approx(gaussian_epsilon(10**0.5, 1e-5), rel=1e-6)


def test_flowers_accountant() -> None:
    accountant = RdpAccountant(config())
    strategy = SERVER(FedAvg(), 5.0, 1.0, 10, accountant=accountant)
    assert fedlgm.check.flower(strategy).missing == ("steps",)
    accountant.compose(GaussianPrivacyEvent(5.0, 10, 100), 20)
    report = fedlgm.check.flower(strategy)
    assert report.settings.epsilon == accountant.get_epsilon(1e-5)
    assert (report.settings.steps, report.settings.weights) == (20, "uniform")
    assert report.epsilon == pytest.approx(gaussian_epsilon(20**0.5 / 5, 1e-5), rel=1e-6)
    (conditional,) = [verdict for verdict in report.verdicts if verdict.status != "holds"]
    assert (conditional.rule, conditional.status) == ("neighbours", "conditional")
    with pytest.raises(ConfigError, match="population is 100 in what was read, and 10"):
        fedlgm.check.flower(strategy, sampler="all", population=10)


@pytest.mark.parametrize(
    ("strategy", "factor", "status"),
    [
        (FedAvg(fraction_train=0.1), 10 / 50, "broken"),
        (FedAvg(fraction_train=0.01, min_train_nodes=20), 20 / 50, "broken"),
        (FedAvg(fraction_train=0.5), 1, "holds"),
        (FedAvg(), 2, "conditional"),
    ],
)
def test_the_noise_is_scaled_for_another_number_of_clients(
    strategy: FedAvg, factor: float, status: str
) -> None:
    """Flower divides the deviation by `num_sampled_clients`, whatever the strategy samples."""
    facts = {"rounds": 4, "population": 100, "weights": "uniform", "denominator": "expected"}
    wrapped = SERVER(strategy, 1.0, 1.0, 50)
    report = fedlgm.check.flower(wrapped, **facts, delta=1e-3, accounted_as="none")
    assert report.status == status, str(report)
    assert report.epsilon == pytest.approx(gaussian_epsilon(2 / factor, 1e-3), rel=1e-6)


@pytest.mark.parametrize("cohort", [{"batch_size": 10}, {"sampling_rate": 0.1}])
def test_a_stated_cohort_does_not_change_for_whom_the_noise_is_scaled(
    cohort: dict[str, Any],
) -> None:
    values = {"noise_multiplier": 1.0, "clipping_norm": 1.0, "num_sampled_clients": 50}
    facts = {"rounds": 4, "weights": "uniform", "denominator": "expected", "delta": 1e-3}
    name = SERVER.__name__
    report = fedlgm.check.flower(name, values, **facts, **cohort, population=100)
    assert report.status == "broken"
    assert report.epsilon == pytest.approx(gaussian_epsilon(2 / 0.2, 1e-3), rel=1e-6)
    report = fedlgm.check.flower(name, values, **facts, sampling_rate=0.1, sampler="poisson")
    assert (report.epsilon, "batch_size" in report.missing) == (None, True)


def test_a_setting_cannot_replace_what_was_read() -> None:
    strategy = SERVER(FedAvg(), 1.0, 1.0, 50)
    for name, value in (("noise_multiplier", 5.0), ("clip", 2.0), ("noise_size", 10)):
        with pytest.raises(ConfigError, match=f"{name} is .* in what was read, and"):
            fedlgm.check.flower(strategy, **{name: value})


def test_replace_one_needs_noise_for_twice_the_bound() -> None:
    half = {"noise_multiplier": 2.0, "sampler": "fixed", "rounds": 1, "clipping": "unit"}
    source = config("REPLACE_ONE", "WITHOUT_REPLACEMENT", max_epsilon=4.3)
    report = fedlgm.check.flower(source, **half, denominator="expected")
    assert report.epsilon == pytest.approx(gaussian_epsilon(1.0, 1e-5), rel=1e-6)
    assert (report.status, report.relation) == ("broken", "replace-one")


def test_a_privacy_config_alone_names_what_is_missing() -> None:
    report = fedlgm.check.flower(config(max_epsilon=3.0))
    assert report.settings.epsilon == 3.0
    assert (report.status, report.epsilon) == ("conditional", None)
    assert {"noise_multiplier", "clipping", "steps", "sampler"} <= set(report.missing)


def test_a_median_is_no_mean() -> None:
    report = fedlgm.check.flower(SERVER(FedMedian(), 1.0, 1.0, 10), rounds=1, weights="uniform")
    assert (report.status, report.rates) == ("conditional", None)
    assert "FedMedian" in str(report)


def test_own_weights_must_be_stated() -> None:
    strategy = SERVER(FedAvg(weighted_by_key="trust"), 1.0, 1.0, 10)
    assert "weights" in fedlgm.check.flower(strategy, rounds=1).missing


def test_adaptive_bounds_have_no_figure() -> None:
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, 20)
    report = fedlgm.check.flower(strategy, rounds=10, population=100, weights="uniform")
    assert (report.status, report.rates) == ("broken", None)


def test_a_local_mod_states_one_message() -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=1.0, delta=1e-5)
    single = fedlgm.check.flower(mod, rounds=1, population=1000)
    assert single.status == "conditional"
    assert single.epsilon < 1.0 == single.settings.epsilon  # the classical formula is loose here
    many = fedlgm.check.flower(mod, rounds=30, population=1000)
    assert [verdict.rule for verdict in many.verdicts if verdict.status == "broken"] == [
        "scope",
        "stated epsilon",
    ]
    large = LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=20.0, delta=1e-5)
    report = fedlgm.check.flower(large, rounds=1, population=1000)
    exact = gaussian_epsilon(20 / (2 * math.log(1.25e5)) ** 0.5, 1e-5)
    assert 25.4 < report.epsilon == pytest.approx(exact, rel=1e-6)  # the formula is false there
    assert report.status == "broken"


def test_wrong_objects_and_arguments_are_refused() -> None:
    for source, values, words in (
        (FedAvg(), None, "unknown class 'FedAvg'"),
        ("LocalDPMod", {}, "did you mean 'LocalDpMod'"),
        ("LocalDpMod", {"noise": 1}, "unknown argument 'noise'"),
        ("LocalDpMod", {"epsilon": 1.0}, "no attribute 'clipping_norm'"),
        (
            "LocalDpMod",
            {"clipping_norm": 1.0, "sensitivity": 1.0, "epsilon": 0, "delta": 0.1},
            "epsilon must be finite and positive",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            fedlgm.check.flower(source, values)
    strategy = SERVER(FedAvg(), 1.0, 1.0, 10)
    strategy.num_sampled_clients = "ten"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="noise_size must be a whole number"):
        fedlgm.check.flower(strategy)
