"""What a user's query or scaling remembers of one row never reaches another row."""

from __future__ import annotations

import pytest
import torch

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.planning.queries import AuxiliaryQuery
from fedlgm.training.example_level.scaling import FlatClip, one_by_one

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


class RunningMean(AuxiliaryQuery):
    """Compares a row with the mean of all rows so far, which it keeps in its class."""

    name, size, bound = "running-mean", 1, 1.0
    total, count = 0.0, 0

    def encode(self, norms, clip):
        kind = type(self)
        kind.total, kind.count = kind.total + float(norms.sum()), kind.count + 1
        return (norms.sum(dim=1, keepdim=True) * kind.count / (10 * kind.total)).clamp(max=1.0)

    def decode(self, mean):
        return mean.double().numpy()


class FirstInClass(FirstSeen):
    """Keeps the first row in its class."""

    name = "first-in-class"
    first = None

    def encode(self, norms, clip):
        if type(self).first is None:
            type(self).first = norms.clone()
        return (type(self).first[:, :1] > 1).float()


class FirstNorm(FlatClip):
    """Clips to the norm of the first example that it has ever seen."""

    def factors(self, norms):
        if not hasattr(self, "first"):
            object.__setattr__(self, "first", float(norms.norm()))
        return (self.first / norms).clamp(max=1.0)


@pytest.mark.parametrize("kind", [FirstSeen, RunningMean])
def test_a_query_that_remembers_is_refused_though_rows_come_one_by_one(kind):
    """In a round's sum each client is encoded in a call of its own; the first one moved the answers
    of all."""
    with pytest.raises(PrivacyError, match=f"query '{kind.name}' remembers what it has seen"):
        kind((5, 2)).contribution(torch.tensor([[5.0, 0.2]]), CLIP)


def test_what_is_kept_outside_of_the_object_is_of_a_public_row():
    for first in (5.0, 0.1):
        FirstInClass.first, query = None, FirstInClass((5, 2))
        rows = torch.tensor([[first, 0.2], [0.3, 0.1], [0.2, 0.2]])
        assert [float(query.contribution(row[None], CLIP)) for row in rows] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("first", [0.1, 2.0])
def test_a_scaling_that_remembers_is_refused(first):
    with pytest.raises(PrivacyError, match="scaling remembers what it has seen"):
        one_by_one(FirstNorm(4.0)).factors(
            torch.tensor([[first, 0.0], [2.0, 0.0]], dtype=torch.float64)
        )


def test_an_object_that_cannot_be_copied_is_refused():
    query = FirstSeen((5, 2))
    object.__setattr__(query, "rows", (row for row in range(3)))
    with pytest.raises(ConfigError, match="query 'first-seen' cannot be copied"):
        query.contribution(torch.ones(1, 2), CLIP)
