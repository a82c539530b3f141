"""Clients that noise their own steps: which of them one process takes together changes nothing."""

from __future__ import annotations

import pytest
import torch

from clients import PartitionedSource, example_level
from fedlgm.aggregation.client_release import Asked, Keys
from fedlgm.noise.keys import KeyRing
from simulations.config.assembly import Assembly
from tests.support.example_level import federated

CLIENTS = [4, 0, 3, 1, 2]


def releases(assembly: Assembly) -> tuple[list[int], list[tuple[int, str, torch.Tensor]]]:
    """Sizes of the groups, and every client's release."""
    source = PartitionedSource(*assembly.data.division)
    work = assembly.recipe.protects.work(assembly.model, source)
    steps, plan = example_level.ExampleSteps(work), assembly.privacy.first_plan()
    asked = Asked(plan, assembly.model.layers.flatten(assembly.model.module()), 1, CLIENTS)
    keys = Keys(KeyRing.from_seed(1), KeyRing(5, secret=True))
    made = [(noised.client, noised.name, noised.total) for noised in steps.releases(asked, keys)]
    return [len(group) for group in steps._groups(CLIENTS, plan)], made


def test_groups_fit_the_cache_and_change_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly = Assembly(federated())
    size = 8 * assembly.privacy.first_plan().size
    data = max(example_level._bytes(PartitionedSource(*assembly.data.division)(c)) for c in CLIENTS)
    groups, expected = releases(assembly)
    assert groups == [5]
    assert [client for client, *_ in expected] == CLIENTS
    for most, held, sizes in [
        (2 * size, 1 << 30, [2, 2, 1]),
        (1, 1 << 30, [1] * 5),
        (1 << 30, 3 * data, [3, 2]),
        (1 << 30, 1, [1] * 5),
    ]:
        monkeypatch.setattr(example_level, "GROUP_BYTES", most)
        monkeypatch.setattr(example_level, "HELD_BYTES", held)
        groups, found = releases(assembly)
        assert groups == sizes
        for (client, name, total), other in zip(expected, found, strict=True):
            assert (client, name) == other[:2]
            assert torch.equal(total, other[2])
