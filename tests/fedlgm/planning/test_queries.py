"""Auxiliary queries own their bounds: what a client contributes never exceeds them, and no plan can
state others."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlgm.aggregation import bound_update
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.planning import queries
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import NoisyQuery, ReleasePlan, RunFacts, Sampling
from fedlgm.planning.queries import (
    AuxiliaryQuery,
    BelowBound,
    BelowShare,
    LayerStrength,
    LayerVote,
    layer_directions,
)
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.training.example_level import FlatClip
from fedlgm.training.example_level.bounding import bound_gradients

KINDS = (BelowBound, BelowShare, LayerVote, LayerStrength)


@dataclass(frozen=True)
class Wrong(AuxiliaryQuery):
    """Three values of 7 each, whatever its bound and size say."""

    name: ClassVar[str] = "wrong"

    size: int = 3
    bound: float = 1.0

    def encode(self, norms: Tensor, clip: Tensor) -> Tensor:
        return torch.full((len(norms), 3), 7.0)

    def decode(self, mean: Tensor) -> np.ndarray:
        return mean.double().numpy()


def plan(sizes: dict[str, int], *noisy: NoisyQuery) -> ReleasePlan:
    layers, facts = LayerTable.from_sizes(sizes), RunFacts(1.0, Sampling("poisson", 10, 0.5))
    ones = np.ones(len(layers))
    return ReleasePlan(layers, ones, ones, facts, Guarantee("proven", "test"), queries=noisy)


def test_a_plan_asks_the_query_that_clients_answer() -> None:
    """Clients make a query from its name: 50 bounds of a query that states a hundredth of the
    bundled one's."""

    class Small(AuxiliaryQuery):
        name, size, bound = "below-bound", 2, 0.01
        encode, decode = BelowBound.encode, BelowBound.decode

    for query in (Small((3, 2)), BelowBound((3,))):
        with pytest.raises(
            PrivacyError, match="differs from the query that clients answer under this name"
        ):
            plan({"a": 3, "b": 2}, NoisyQuery(query, 0.01))


def test_no_query_replaces_what_bounds_it() -> None:
    with pytest.raises(ConfigError, match="override encode instead"):

        class Free(BelowBound):
            def contribution(self, norms: Tensor, clip: Tensor) -> Tensor:
                return 1000 * norms


@pytest.mark.parametrize("kind", KINDS)
@given(
    norms=st.lists(st.floats(0, 2.0**100, width=32, allow_subnormal=False), min_size=4, max_size=4),
    clip=st.lists(st.floats(0, 2.0**20, width=32, allow_subnormal=False), min_size=4, max_size=4),
)
def test_contributions_stay_within_the_querys_own_bound(kind, norms, clip):
    query = kind((1, 30, 70, 5))
    made = query.contribution(torch.tensor([norms]), torch.tensor(clip))
    assert made.shape == (1, query.size)
    assert torch.linalg.vector_norm(made.double()) <= query.bound * (1 + 1e-7)


def test_quantile_bits_are_within_their_own_bound():
    sizes = {"a": 4, "b": 4, "c": 4}
    query = BelowBound((4, 4, 4))
    made = plan(sizes, NoisyQuery(query, 5.0))
    update = torch.cat([torch.full((4,), 0.1), torch.full((4,), 9.0), torch.zeros(4)])
    bits = bound_update(update, made)[12:]
    assert bits.tolist() == [0.5, -0.5, 0.5]
    assert float(bits.norm()) <= query.bound * (1 + 1e-12)


def test_bits_of_shares_do_not_depend_on_how_long_a_client_is():
    """Lengths 0.1, 0.8 and 0.6 (of 1.005) against equal shares of 0.577; bits of bounds see nothing
    if all are cut."""
    norms, clip = torch.tensor([[0.1, 0.8, 0.6]]), torch.full((3,), 0.01)
    for scale in (1e-3, 1.0, 1e6):
        assert BelowShare((4, 4, 4)).contribution(scale * norms, clip).tolist() == [
            [0.5, -0.5, -0.5]
        ]
    assert BelowBound((4, 4, 4)).contribution(norms, clip).tolist() == [[-0.5, -0.5, -0.5]]


def test_what_an_encoder_says_beyond_its_bound_is_cut():
    made = bound_update(torch.ones(6), plan({"a": 1, "b": 5}, NoisyQuery(Wrong((1, 5)), 1.0)))[6:]
    assert made.tolist() == pytest.approx([1 / math.sqrt(3)] * 3, rel=2e-5)
    assert float(made.norm()) <= 1.0


class Growing(AuxiliaryQuery):
    """A bound and a size that grow once they have been charged."""

    name, grown = "growing", False
    bound = property(lambda self: 1000.0 if Growing.grown else 1.0)
    size = property(lambda self: 4 if Growing.grown else 1)

    def encode(self, norms: Tensor, clip: Tensor) -> Tensor:
        return torch.full((len(norms), 1), 500.0)

    def decode(self, mean: Tensor) -> np.ndarray:
        return mean.double().numpy()


def test_a_query_is_bounded_as_it_was_charged(monkeypatch):
    """Where clients are bounded and where examples are."""
    made = plan({"a": 6}, NoisyQuery(Growing((6,)), 1.0))
    cost = made.event
    monkeypatch.setattr(Growing, "grown", True)
    answer = bound_update(torch.ones(6), made)[6:]
    assert answer.tolist() == pytest.approx([1.0], rel=2e-5)
    assert float(answer) <= 1.0
    of_examples = replace(made, queries=made.queries, bounded_by="trainer")
    answers = bound_gradients(torch.ones(1, 6), FlatClip(1.0), of_examples).answers
    assert (answers[0].bound, answers[0].values.shape) == (1.0, (1, 1))
    assert float(answers[0].values) <= 1.0
    assert of_examples.event == cost


def test_a_query_has_the_size_of_what_a_client_contributes():
    made = plan({"a": 1, "b": 5}, NoisyQuery(Wrong((1, 5), size=1000), 1.0))
    with pytest.raises(ConfigError, match=r"'wrong' encodes \(1, 3\) for 1 x 1000"):
        bound_update(torch.ones(6), made)


def test_unknown_queries_are_refused():
    with pytest.raises(
        ConfigError,
        match="unknown auxiliary query 'surprise'; known: below-bound, below-share, layer-vote",
    ):
        queries.get("surprise", (1, 5))
    text = plan({"a": 1, "b": 5}, NoisyQuery(BelowBound((1, 5)), 1.0)).to_json()
    with pytest.raises(ConfigError, match="surprise"):
        ReleasePlan.from_json(
            LayerTable.from_sizes({"a": 1, "b": 5}), text.replace("below-bound", "surprise")
        )
    with pytest.raises(ConfigError, match="choose another name"):
        queries.register(type("Other", (Wrong,), {"name": "below-bound"}))


@pytest.mark.parametrize("query", [Wrong((1,), bound=-0.5), Wrong((1,), bound=math.nan)])
def test_bounds_are_non_negative_numbers(query):
    with pytest.raises(ConfigError, match="must be a number of at least 0"):
        NoisyQuery(query, 4.0)
    for sigma in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="must be a number of at least 0"):
            NoisyQuery(BelowBound((1,)), sigma)


def test_released_means_are_read_by_the_query_that_made_them():
    sizes = {"a": 2, "b": 1}
    made = plan(sizes, NoisyQuery(BelowBound((2, 1)), 1.0), NoisyQuery(LayerStrength((2, 1)), 1.0))
    before = Transcript.start(torch.zeros(3))
    after = before.extend(
        torch.zeros(3), torch.tensor([9.0, 9.0, 9.0, -0.25, 0.75, 0.5, -0.1]), made
    )
    assert before.answer("below-bound") is None
    assert after.answer("below-bound").tolist() == [0.25, 1.25]
    assert after.answer("layer-strength").tolist() == [0.5, 0.0]
    assert after.answer("surprise") is None


def test_layer_strengths_are_directions_of_norms():
    rows = layer_directions(
        torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.inf, 1.0]], dtype=torch.float64)
    )
    torch.testing.assert_close(
        rows, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    )
    tiny = layer_directions(torch.tensor([[3e-200, 4e-200]], dtype=torch.float64))
    torch.testing.assert_close(tiny, torch.tensor([[0.6, 0.8]], dtype=torch.float64))
    assert LayerStrength((1, 2)).decode(torch.tensor([-0.5, 0.5])).tolist() == [0.0, 0.5]
