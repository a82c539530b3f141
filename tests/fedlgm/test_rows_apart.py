"""What a user's query or scaling remembers of one row never reaches another row."""

from __future__ import annotations

import pytest
import torch

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.example_level.scaling import FlatClip, one_by_one
from fedlgm.queries import AuxiliaryQuery

CLIP = torch.ones(2)


class FirstSeen(AuxiliaryQuery):
    """Answers for the first row that it has ever seen."""

    name, size, bound = "first-seen", 1, 1.0

    def encode(self, norms, clip):
        if not hasattr(self, "first"):
            object.__setattr__(self, "first", norms.clone())
        return (self.first[:, :1] > 1).float()

    def decode(self, mean):
        return mean.double().numpy()


class FirstNorm(FlatClip):
    """Clips to the norm of the first example that it has ever seen."""

    def factors(self, norms):
        if not hasattr(self, "first"):
            object.__setattr__(self, "first", float(norms.norm()))
        return (self.first / norms).clamp(max=1.0)


def answers(first: float) -> torch.Tensor:
    """Sum of the answers of three clients that are encoded one by one, as in a round's sum."""
    query = FirstSeen((5, 2))
    rows = torch.tensor([[first, 0.2], [0.3, 0.1], [0.2, 0.2]])
    return sum(query.contribution(row[None], CLIP) for row in rows)


def test_one_client_moves_the_sum_by_its_own_bound_alone():
    """It moved the answers of all clients, since each was encoded in a call of its own."""
    assert float((answers(5.0) - answers(0.1)).abs()) <= FirstSeen.bound


def test_the_first_row_of_a_block_is_not_the_answer_of_the_others():
    rows = torch.tensor([[5.0, 0.2], [0.3, 0.1]])
    with pytest.raises(PrivacyError, match="query 'first-seen' remembers what it has seen"):
        FirstSeen((5, 2)).contribution(rows, CLIP)


def test_an_example_does_not_scale_those_of_other_steps():
    scaling = one_by_one(FirstNorm(4.0))
    ordinary = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    alone = scaling.factors(ordinary)
    scaling.factors(torch.tensor([[0.1, 0.0]], dtype=torch.float64))
    assert torch.equal(scaling.factors(ordinary), alone)
    with pytest.raises(PrivacyError, match="scaling remembers what it has seen"):
        scaling.factors(torch.tensor([[0.1, 0.0], [2.0, 0.0]], dtype=torch.float64))


def test_an_object_that_cannot_be_copied_is_refused():
    query = FirstSeen((5, 2))
    object.__setattr__(query, "rows", (row for row in range(3)))
    with pytest.raises(ConfigError, match="query 'first-seen' cannot be copied"):
        query.contribution(torch.ones(1, 2), CLIP)
