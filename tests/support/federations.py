"""Small recipes and federations whose clients have given updates, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedlgm.privacy.ledger import Ledger
from fedlgm.training import ClientTask
from simulations.engines.local import LocalGrid
from strategies import LayerwiseFedAvg


def tiny_values() -> dict[str, Any]:
    """Twenty clients, three rounds, a small network on the bundled digits: under a second in one process."""
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
    """A trainer whose clients' updates are given: client c is recognised by its only example, which holds c."""

    def __init__(self, updates: Callable[[int], Tensor]) -> None:
        self._updates = updates

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        for task in tasks:
            yield self._updates(int(task.x[0]))[None]


class OneNodeEach(LocalGrid):
    """Every client has a node of its own, with a random-looking id, as in a deployment.

    What a client raises comes back as an error message, as Flower does it.
    """

    def __init__(self, apps: Sequence[ClientApp]) -> None:
        super().__init__(apps[0])
        self._apps = apps
        self._contexts = [Context(1, self.node_of(c), {}, RecordDict(), {}) for c in range(len(apps))]

    def get_node_ids(self) -> list[int]:
        return [self.node_of(client) for client in range(len(self._apps))]

    @staticmethod
    def node_of(client: int) -> int:
        return 1000 - 7 * client

    @staticmethod
    def client_of(message: Message) -> int:
        return (1000 - message.metadata.dst_node_id) // 7

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        for message in messages:
            yield self.answer(message)

    def answer(self, message: Message) -> Message:
        client = self.client_of(message)
        try:
            return self._apps[client](message, self._contexts[client])
        except Exception as error:
            return Message(Error(code=1, reason=str(error)), reply_to=message)


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
