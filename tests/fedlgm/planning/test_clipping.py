"""Bounds always add up to S, and released norms lose their noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlgm.planning.clipping import (
    eq_clip,
    med_clip,
    med_clip_published,
    next_quantile_bounds,
    released_norms,
)
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.privacy.guarantee import Guarantee


@given(st.floats(1e-3, 1e3), st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0, 1))
def test_bounds_add_up_to_the_total(bound, norms, floor):
    norms = np.array(norms)
    for s in (eq_clip(bound, len(norms)), med_clip(bound, norms, floor)):
        assert math.sqrt(np.sum(s**2)) == pytest.approx(bound)
    if floor > 0.01 and norms.any():
        assert (
            med_clip(bound, norms, floor).min()
            >= floor * bound / math.sqrt(len(norms)) / math.sqrt(1 + floor**2) * 0.999
        )


@pytest.mark.parametrize("trust", ["central", "local"])
def test_norms_of_a_release_lose_their_noise(trust):
    layers = LayerTable.from_sizes({"a": 100_000, "b": 100_000, "c": 10})
    relation = "replace-one" if trust == "local" else "add-remove"
    facts = RunFacts(1.0, Sampling("poisson", 100, 0.5), relation, trust)
    made = ReleasePlan(
        layers, np.ones(3), np.array([2.0, 2.0, math.inf]), facts, Guarantee("proven", "test")
    )
    generator = torch.Generator().manual_seed(0)
    signal = torch.cat([torch.full((100_000,), 0.05), torch.zeros(100_000)])
    # Under local trust each of the fifty expected clients adds its own.
    spread = 2.0 * math.sqrt(50) if trust == "local" else 2.0
    noise = torch.randn(200_000, generator=generator) * spread / 50
    assert made.noise_norms[:2] == pytest.approx(
        [float(part.norm()) for part in noise.split(100_000)], rel=0.01
    )
    mean = signal + noise
    found = released_norms(mean, made)
    if trust == "local":
        assert found[0] == pytest.approx(0.05 * math.sqrt(100_000), rel=0.06)
        assert found[1] < 12  # its noise alone has norm 89
        return
    assert found[0] == pytest.approx(0.05 * math.sqrt(100_000), rel=0.01)
    assert found[1] < 2.0  # its noise alone has norm 12.6
    assert found[2] == 0


def test_published_medclip_has_the_papers_shape():
    norms = np.array([[1.0, 1.0], [3.0, 1.0], [2.0, 1.0]])
    assert med_clip_published(0.5, norms).tolist() == pytest.approx([1 / 3, 1 / 6])
    assert med_clip_published(0.5, np.zeros((3, 2))).tolist() == pytest.approx(
        eq_clip(0.5, 2).tolist()
    )


def test_quantile_bounds_keep_the_total():
    moved = next_quantile_bounds(np.array([0.6, 0.8]), np.array([2.0, -1.0]), 1.0, 0.5, 0.2)
    assert math.sqrt(np.sum(moved**2)) == pytest.approx(1.0)
    # Shares outside [0, 1] are noise: the first bound shrinks, the second grows, both by at most
    # one step.
    assert moved[0] / moved[1] == pytest.approx(0.75 * math.exp(-0.2))
    # Half of the clients below: too many for the lower quartile, too few for the upper one.
    for target, step in ((0.25, -0.05), (0.75, 0.05)):
        one = next_quantile_bounds(np.array([0.6, 0.8]), np.array([0.5, target]), 1.0, target, 0.2)
        assert one[0] / one[1] == pytest.approx(0.75 * math.exp(step))
