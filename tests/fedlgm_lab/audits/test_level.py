"""A sound release fails a whole audit no more often than the stated confidence allows, however much
is looked at."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits import Canaries, Reported, Subject, audit_record
from fedlgm_lab.audits.level import Shares

LAYERS = LayerTable.from_sizes({"a": 30, "b": 120, "c": 50, "d": 20, "e": 80})


@given(
    confidence=st.floats(0.51, 0.9999),
    layers=st.integers(1, 50),
    numbers=st.tuples(*[st.integers(0, 10**9)] * 3),
    per_layer=st.booleans(),
)
def test_the_levels_of_all_statements_add_up_to_that_of_the_audit(
    confidence, layers, numbers, per_layer
):
    distances, pairs, cells = numbers
    shares = Shares.of(
        confidence, layers, distances=distances, pairs=pairs, cells=cells, per_layer=per_layer
    )
    spent = shares.whole + layers * (shares.layer + shares.scale) + distances * shares.distance
    spent += pairs * shares.pair + cells * shares.cell
    assert spent <= (1 - confidence) * (1 + 1e-9)
    assert shares.whole > 0
    assert (shares.layer > 0) == per_layer


def failed(audits: int, confidence: float, per_layer: bool) -> int:
    """How many audits of two rounds that are exactly as planned fail: other canaries and other
    noise in each."""
    of = Subject.of("snr-consistent", rounds=2, layers=LAYERS)
    plan = of.method.plan(of.start)
    reported = Reported(of.name, of.reported_epsilon(plan), of.delta, of.multipliers(plan))
    count = 0
    for number in range(audits):
        canaries, keys = Canaries(LAYERS, 24, KeyRing(2 * number)), KeyRing(2 * number + 1)
        for round_ in (1, 2):
            total = torch.zeros(plan.size, dtype=torch.float64)
            canaries.insert(round_, plan, total)
            canaries.observe(round_, plan, release(total, plan, keys, round_))
        count += not audit_record(
            canaries.record(), LAYERS, reported, confidence=confidence, per_layer=per_layer
        ).passed
    return count


@pytest.mark.parametrize("per_layer", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("audits", [200, pytest.param(600, marks=pytest.mark.slow)])
def test_sound_releases_fail_no_more_often_than_the_confidence_allows(audits, per_layer):
    found = failed(audits, 0.8, per_layer)
    assert found <= scipy.stats.binom.isf(1e-3, audits, 0.2)
    assert found >= audits * 0.2 / 4  # the level is shared, not given away


def test_the_whole_level_for_every_statement_would_be_noticed(monkeypatch):
    """As if the bound on the release, the layers' together, and each check had the level of the
    audit."""

    def whole(confidence, layers, *, distances=1, pairs=1, cells=1, per_layer=True):
        level = 1 - confidence
        several = (level / max(1, number) for number in (distances, pairs, cells))
        return Shares(level, level / layers, level / layers, *several)

    monkeypatch.setattr(Shares, "of", staticmethod(whole))
    assert failed(200, 0.8, True) > scipy.stats.binom.isf(1e-3, 200, 0.2)
