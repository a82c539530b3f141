"""Small recipes and federations whose clients have given updates, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clients import ClientData
from fedlgm.aggregation.contributions import AnsweredUpdates, Updates, raw_updates
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import ClientTask
from simulations.engines.local import LocalGrid
from strategies import LayerwiseFedAvg


def tiny_values() -> dict[str, Any]:
    """Twenty clients, three rounds, a small network on the bundled digits: under a second in one
    process."""
    return {
        "name": "tiny",
        "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.5},
        "model": {"name": "mlp", "hidden": [8], "activation": "tanh"},
        "federation": {"clients": 20, "rounds": 3, "rate": 0.5},
        "training": {"lr": 0.5, "epochs": 1, "batch_size": 16},
        "mechanism": {"name": "snr-consistent"},
        "privacy": {"epsilon": 8.0, "delta": 1e-5, "accountant": "rdp"},
        "run": {"seed": 3, "block_size": 3},
    }


class GivenUpdates:
    """A trainer whose clients' updates are given: client c is recognised by its only example, which
    holds c."""

    def __init__(self, updates: Callable[[int], Tensor]) -> None:
        self._updates = updates

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        for task in tasks:
            yield self._updates(int(task.x[0]))[None]


class GivenVotes:
    """Odd clients vote for water-filling, even ones for flat clipping."""

    def add_votes(
        self, updates: Updates, plan: ReleasePlan, model: Tensor, data: Iterable[ClientData]
    ) -> AnsweredUpdates:
        votes = torch.tensor([[int(own.x[0]) % 2 - 0.5] for own in data])
        return AnsweredUpdates(raw_updates(updates), {"cut-vote": votes})


@dataclass
class Federation:
    """A strategy with clients in this process.

    Attributes:
        strategy: the strategy, not yet started.
        grid: its clients.
        ledger: what it charges.
    """

    strategy: LayerwiseFedAvg
    grid: LocalGrid
    ledger: Ledger
    means: list[Tensor] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)

    def run(self, rounds: int) -> Tensor:
        """The model after `rounds` more rounds."""
        self.strategy.start(self.grid, self.strategy.initial_arrays(), num_rounds=rounds)
        return self.strategy.transcript.models[-1]
