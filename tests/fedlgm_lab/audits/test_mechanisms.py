"""Every registered mechanism is audited in short form: sound ones pass, published ones are
caught."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits import Audit, Subject
from fedlgm_lab.audits.distinguisher import divergence
from fedlgm_lab.audits.probe import probe

LAYERS = LayerTable.from_sizes({"a": 60, "b": 300, "c": 12})
OPEN = ("none", "sgd")  # no privacy is asked for
SHORT = {"trials": 150, "canaries": 200, "seed": 0}
CASES: list[tuple[str, dict]] = [
    (name, {}) for name in mechanisms.names(None) if name != "client-ladp"
]
CASES += [
    ("snr-consistent", {"clip": "med", "norms": norms})
    for norms in ("public", "stale", "quantile", "shares")
]
CASES += [("ladp", {"threshold": 0.5})]
CASES += [("dp-sgd", {"style": "per-layer", "allocation": "snr-consistent"})]
CASES += [("lm-dp-sgd", {"weights": weights}) for weights in ("public", "stale")]
IDS = [" ".join([name, *(f"{k}={v}" for k, v in options.items())]) for name, options in CASES]
PUBLISHED = [
    ("uniform", {}),
    ("snr-consistent", {}),
    ("ladp", {}),
    ("ladp", {"threshold": 9.0}),
    ("lm-dp-sgd", {}),
]
PUBLISHED += [("dp-sgd", {}), ("dp-sgd", {"allocation": "snr-consistent"})]


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_sound_mechanisms_pass(name, options):
    result = Audit(**SHORT).mechanism(Subject.of(name, layers=LAYERS, **options))
    assert result.passed, result
    assert result.method == (
        "distinguisher" if name.startswith("laplace") or name in OPEN else "one-run-gaussian"
    )
    assert {check.name for check in result.checks} >= {"whitened sensitivity", "plan purity"}
    if name in OPEN:
        assert math.isinf(result.epsilon_reported)
        assert result.guarantee.startswith("NOT PRIVATE")
    else:
        least = (
            0.02 if result.method == "distinguisher" else 0.15
        )  # 0.07 to 0.20 in 150 trials, by the noise drawn
        assert least * result.epsilon_reported < result.epsilon_lower <= result.epsilon_reported


def test_a_mechanism_of_two_releases_a_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="two releases in a round"):
        Subject.of("client-ladp", layers=LAYERS)


@pytest.mark.parametrize(("name", "options"), PUBLISHED)
def test_published_mechanisms_are_caught(name, options):
    subject = Subject.of(name, "published", epsilon=1.0, layers=LAYERS, **options)
    result = Audit(**SHORT).mechanism(subject)
    assert result.method == "distinguisher"
    assert result.exceeded
    assert not result.passed
    assert "plan purity" in [check.name for check in result.checks if not check.passed]


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_probe_is_exact(name, options):
    """It needs no statistics: one client moves the whitened sum by what is accounted for, and by no
    more."""
    if name in OPEN:
        return
    subject = Subject.of(name, layers=LAYERS, **options)
    result = Audit(method="probe").mechanism(subject)
    assert result.passed
    assert result.confidence == 1
    # Auxiliary queries and layers cannot all be at their bounds at once.
    least = 0.8 if options.get("norms") in ("quantile", "shares") or name == "lm-dp-sgd" else 0.98
    assert (
        least * result.epsilon_reported
        <= result.epsilon_lower
        <= result.epsilon_reported * (1 + 1e-9)
    )


def test_the_probe_sees_what_the_plan_does_not_account_for(monkeypatch):
    """A mechanism whose noise is made for half of its bounds."""
    from fedlgm.mechanisms.layerwise_gaussian import LayerwiseGaussian

    monkeypatch.setattr(ReleasePlan, "effective_multiplier", property(lambda plan: 2 * float(
        1 / np.linalg.norm(plan.clip / plan.sigma)
    )))  # fmt: skip
    monkeypatch.setattr(
        LayerwiseGaussian, "costs", lambda self, layers, rounds: np.full(rounds, 0.25)
    )  # in step with it
    subject = Subject.of("snr-consistent", layers=LAYERS)
    assert isinstance(subject.method.mechanism, LayerwiseGaussian)
    reading = probe(subject)
    assert reading.ratio == pytest.approx(2, rel=1e-3)
    assert not Audit(method="probe").mechanism(subject).passed


def test_one_client_changes_the_plan_of_published_medclip():
    reading = probe(Subject.of("uniform", "published", layers=LAYERS))
    assert not reading.pure
    assert reading.changed == "bounds and noise scales"


def test_the_most_telling_neighbours_are_taken():
    subject = Subject.of("ladp", "published", layers=LAYERS)
    pairs = list(subject.neighbours(subject.start))
    assert max(divergence(*pair) for pair in pairs) > 10 * min(divergence(*pair) for pair in pairs)


def test_an_audit_of_one_seed_repeats_itself():
    first, second = (
        Audit(**SHORT).mechanism(Subject.of("gaussian", layers=LAYERS)) for _ in range(2)
    )
    assert first.epsilon_lower == second.epsilon_lower
    fresh = Audit(**(SHORT | {"seed": None})).mechanism(Subject.of("gaussian", layers=LAYERS))
    assert fresh.epsilon_lower != first.epsilon_lower


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Audit(method="best"), ConfigError, "known: auto, probe"),
        (lambda: Audit(confidence=1.0), ConfigError, "confidence"),
        (
            lambda: Audit(trials=5).mechanism(Subject.of("laplace-iid", layers=LAYERS)),
            ConfigError,
            "at least 32",
        ),
        (
            lambda: Audit(canaries=1).mechanism(Subject.of("gaussian", layers=LAYERS)),
            ConfigError,
            "at least 2",
        ),
        (
            lambda: Audit(method="one-run").mechanism(Subject.of("laplace-iid", layers=LAYERS)),
            ConfigError,
            "Gaussian noise",
        ),
        (
            lambda: Audit(method="one-run").mechanism(
                Subject.of("uniform", "published", layers=LAYERS)
            ),
            ConfigError,
            "private data",
        ),
        (
            lambda: Audit().mechanism(Subject.of("ladp", threshold=1e9, layers=LAYERS)),
            ConfigError,
            "releases nothing",
        ),
        (lambda: Subject.of("gaussian", "published"), ConfigError, "no variant"),
    ],
)
def test_what_cannot_be_audited_is_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
