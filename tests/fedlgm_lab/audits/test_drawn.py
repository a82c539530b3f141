"""Noise is also checked where no canaries can watch it: too small or shared noise fails, noise as planned passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scipy.stats

import fedlgm.noise.draws
import fedlgm.noise.release
from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.noise.integer_noise import DiscreteGaussian
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits import Audit, Subject
from fedlgm_lab.audits.drawn import drawn_checks

LAYERS = LayerTable.from_sizes({"weight": 600, "bias": 5})
LEVEL = 1e-6


def subject(name: str, trust: str) -> Subject:
    shares = Shares(20, 3) if trust == "distributed" else None
    relation = "add-remove" if trust == "central" else "replace-one"
    accountant = "pld" if shares is None else "rdp"
    facts = RunFacts(
        0.0, Sampling("poisson", 30, 1.0), relation, trust, 3, 8.0, 1e-5, accountant, shares=shares
    )  # fmt: skip
    mechanism = mechanisms.get(name)
    return Subject(name, Method.calibrated(mechanism, mechanism.table(LAYERS), facts))


CASES = [("water-filling", "local"), ("laplace-iid", "local"), ("laplace-iid", "central"), ("uniform", "distributed")]


def failed(of: Subject, seed: int | None = 0) -> list[str]:
    return [check.name for check in drawn_checks(of, seed, LEVEL) if not check.passed]


def of_one_round(draw: Callable[..., object]) -> Callable[..., object]:
    """The generators of round 1 in every round."""

    def drawn(self: KeyRing, purpose: Purpose, *path: int) -> object:
        return draw(self, purpose, *((1, *path[1:]) if purpose == Purpose.NOISE else path))

    return drawn


@pytest.mark.parametrize(("name", "trust"), CASES)
class TestEveryLawAndTrust:
    def test_noise_as_planned_passes(self, name, trust):
        assert failed(subject(name, trust)) == failed(subject(name, trust), None) == []

    def test_seven_tenths_of_the_noise_fail(self, name, trust, monkeypatch):
        add, draw = fedlgm.noise.draws.add_scaled_, DiscreteGaussian.draw
        monkeypatch.setattr(fedlgm.noise.draws, "add_scaled_", lambda piece, z, scale: add(piece, z, 0.7 * scale))
        monkeypatch.setattr(DiscreteGaussian, "draw", lambda self, v, *rest: draw(self, int(0.49 * v), *rest))
        assert failed(subject(name, trust)) == ["noise scale"]

    def test_noise_that_rounds_share_fails(self, name, trust, monkeypatch):
        for kind in ("torch_generator", "numpy_generator"):
            monkeypatch.setattr(KeyRing, kind, of_one_round(getattr(KeyRing, kind)))
        assert failed(subject(name, trust)) == ["noise repetition"]


@pytest.mark.parametrize(("name", "trust"), CASES[:3])
def test_noise_that_two_sums_share_fails(name, trust, monkeypatch):
    monkeypatch.setattr(fedlgm.noise.release, "_bound", lambda keys, exact, plan: keys)
    assert failed(subject(name, trust)) == ["noise repetition"]


@pytest.mark.parametrize(("name", "trust"), CASES[:3])
def test_noise_as_planned_fails_no_more_often_than_the_level_allows(name, trust):
    of = subject(name, trust)
    audits, level = 60, 0.2
    wrong = sum(not all(check.passed for check in drawn_checks(of, seed, level)) for seed in range(audits))
    assert wrong <= scipy.stats.binom.isf(1e-3, audits, level)


def test_audits_without_canaries_make_both_checks(monkeypatch):
    """The errors that a distinguisher counts in single releases did not show it."""
    of = subject("laplace-iid", "local")
    sound = Audit("distinguisher", trials=300, confidence=0.9, seed=1).mechanism(of)
    assert [check.name for check in sound.checks][-2:] == ["noise scale", "noise repetition"]
    assert (sound.passed, sound.confidence) == (True, 0.9)
    add = fedlgm.noise.draws.add_scaled_
    monkeypatch.setattr(fedlgm.noise.draws, "add_scaled_", lambda piece, z, scale: add(piece, z, 0.7 * scale))
    found = Audit("distinguisher", trials=300, confidence=0.9, seed=1).mechanism(of)
    assert [check.name for check in found.checks if not check.passed] == ["noise scale"]
    assert not found.passed
