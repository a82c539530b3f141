"""The clients that one client object represents. These clients are fixed when the object is built,
and are never read from a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedlgm import wire
from fedlgm.errors import ConfigError, PrivacyError


@dataclass(frozen=True)
class AnyClient:
    """A worker of a simulation. It holds all clients' data and represents every client.

    Example:
        >>> AnyClient().place()
        {'partition-id': -1, 'num-partitions': -1}
    """

    def check(self, asked: list[int]) -> None:
        """Accept any clients."""

    def place(self) -> dict[str, int]:
        """Return the answer to the strategy's query: any client is served, whatever the number of
        clients.
        """
        return {wire.PARTITION: wire.ANY_CLIENT, wire.PARTITIONS: wire.ANY_CLIENT}


@dataclass(frozen=True)
class OneClient:
    """A node that holds one client's data and represents only that client.

    Attributes:
        number: the client's number, from 0.
        population: number N of registered clients.
        simulated: whether the node belongs to a simulation or a test, in which a public seed is
            allowed.

    Raises:
        ConfigError: the number is outside [0, N).

    Example:
        >>> OneClient.of_node({"partition-id": "3", "num-partitions": "10"}, population=10).check([4])
        Traceback (most recent call last):
            ...
        fedlgm.errors.PrivacyError: this node is client 3 of 10: it does not answer for [4]
    """

    number: int
    population: int
    simulated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.population:
            raise ConfigError(
                f"client numbers run from 0 to {self.population - 1} for {self.population} "
                f"clients, got {self.number}"
            )

    @classmethod
    def of_node(
        cls, node_config: Mapping[str, object], population: int, simulated: bool = False
    ) -> OneClient:
        """Make the object for the client that a SuperNode's configuration names.

        Args:
            node_config: configuration of the node
                (`--node-config "partition-id=I num-partitions=N"`).
            population: number N of the run's clients.
            simulated: see the attribute of this name.

        Raises:
            ConfigError: the configuration names no client, or a different number of clients.
        """
        try:
            number, stated = (
                int(str(node_config[wire.PARTITION])),
                int(str(node_config[wire.PARTITIONS])),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"this node does not say which client it is: start it with --node-config "
                f'"{wire.PARTITION}=I {wire.PARTITIONS}={population}", I from 0 to {population - 1}'
            ) from error
        if stated != population:
            raise ConfigError(
                f"this node is one of {stated} clients ({wire.PARTITIONS}), but the run has "
                f"{population}: start it with "
                f"{wire.PARTITIONS}={population}{wire.in_a_simulation(population)}"
            )
        return cls(number, population, simulated)

    def check(self, asked: list[int]) -> None:
        """Refuse a message for any other clients, because this client's data would otherwise count
        more than once.

        Raises:
            PrivacyError: `asked` is not exactly this client.
        """
        if asked != [self.number]:
            raise PrivacyError(
                f"this node is client {self.number} of {self.population}: it does not answer for "
                f"{asked}"
            )

    def place(self) -> dict[str, int]:
        """Return the answer to the strategy's query: this client's number and the number of
        clients.
        """
        return {wire.PARTITION: self.number, wire.PARTITIONS: self.population}


Serving = AnyClient | OneClient
