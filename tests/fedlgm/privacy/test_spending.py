"""What participants have spent is that of the worst-off, and equal spendings are composed once."""

from __future__ import annotations

import json

import pytest

from fedlgm.privacy import spending
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import encode, gaussian_event
from fedlgm.privacy.spending import Spending

LITTLE, MUCH = (json.dumps(encode(gaussian_event(multiplier))) for multiplier in (8.0, 4.0))
DELTA = 1e-5


def epsilon(little: int, much: int) -> float:
    return composed_epsilon(
        [(gaussian_event(8.0), little), (gaussian_event(4.0), much)], DELTA, "pld"
    )


def test_the_servers_releases_are_everybodys():
    rows = [(-1, LITTLE, 2), (0, LITTLE, 1), (0, MUCH, 1), (1, MUCH, 3)]
    spent = Spending.of(rows, -1)
    assert spent == Spending({LITTLE: 2}, {0: {LITTLE: 1, MUCH: 1}, 1: {MUCH: 3}})
    assert spent.client_epsilons(DELTA, "pld") == {
        0: pytest.approx(epsilon(3, 1)),
        1: pytest.approx(epsilon(2, 3)),
    }
    assert spent.epsilon(DELTA, "pld") == pytest.approx(epsilon(2, 3))
    assert Spending.of([], -1).epsilon(DELTA, "pld") == 0


def test_only_undominated_spendings_are_composed_each_once(monkeypatch):
    """A hundred thousand clients have few different spendings."""
    seen, composed = [], spending._profile_epsilon
    monkeypatch.setattr(
        spending,
        "_profile_epsilon",
        lambda profile, *rest: seen.append(profile) or composed(profile, *rest),
    )
    rows = [(client, LITTLE, 1 + client % 3) for client in range(300)] + [(300, MUCH, 1)]
    assert Spending.of(rows, -1).epsilon(DELTA, "pld") == pytest.approx(
        max(epsilon(3, 0), epsilon(0, 1))
    )
    assert sorted(map(dict, seen), key=str) == sorted([{LITTLE: 3}, {MUCH: 1}], key=str)
