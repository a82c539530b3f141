"""The assignment of nodes to clients. Each node tells the strategy which clients it serves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid

from fedlgm import wire
from fedlgm.checks import Positive, Rate, check_annotated, check_counts
from fedlgm.errors import Notice, RunError
from fedlgm.wire import printable
from strategies.messages import message_to

Addresses = list[tuple[int | None, list[int]]]
"""The node and the clients of each message; the node is None if a client has no connected node."""
_POLL_S = 0.1
_ANSWER_S = 30.0  # seconds that a node has to answer if it connects at the last moment


class ChargedFirst:
    """Nodes whose clients are charged for a round before its messages are sent, because a client
    may make its release as soon as it gets a message.

    Example:
        >>> ChargedFirst().charge(grid=None, charge=lambda: print("charged"))
        charged
    """

    def charge(self, grid: Grid, charge: Callable[[], None]) -> None:
        """Call `charge`, which charges the round's clients."""
        charge()


@dataclass
class AnyNode(ChargedFirst):
    """Workers of a simulation in which every node serves every client.

    Attributes:
        work: expected training effort of each client, by which blocks are formed (see
            `strategies.cohort.blocks`); with None, the clients stay in their order.
        wait: seconds to wait until a node connects.
        keyed: whether the nodes have the same keys again after the run is resumed, so that they
            repeat their contributions.

    Example:
        >>> AnyNode(wait=5.0).single, OneNodePerClient().single  # whether a message carries one client alone
        (False, True)
    """

    single = test_mode = False
    simulated = True
    round_timeout = quorum = max_failures = None

    work: np.ndarray | None = None
    wait: float = 120.0
    keyed: bool = True
    _nodes: list[int] = field(default_factory=list, repr=False)

    @property
    def repeats(self) -> bool:
        """Whether a round that is repeated after an interruption has the same contributions, bit by
        bit.
        """
        return self.keyed

    def find(self, grid: Grid, population: int) -> None:
        """Wait for the workers and check that each of them serves any client. After the first
        success, do nothing.

        Raises:
            RunError: no worker connects, a worker does not start, or a worker answers that it
                serves a single client.
        """
        deadline = time.monotonic() + self.wait
        while not self._nodes:
            answers = ask(grid, grid.get_node_ids(), self.wait)
            for node, answer in answers.items():
                if answer.get(wire.PARTITION) != wire.ANY_CLIENT:
                    raise RunError(
                        f"node {node} serves only client {answer.get(wire.PARTITION)!r}, but this "
                        "run is a simulation whose nodes serve any client: use a strategy with "
                        "OneNodePerClient (nodes = 'clients')"
                    )
            self._nodes = sorted(answers)
            if not self._nodes:
                if time.monotonic() > deadline:
                    raise RunError(f"no node connected within {self.wait:.0f} s")
                time.sleep(_POLL_S)

    def addresses(self, blocks: Iterable[np.ndarray]) -> Addresses:
        """Return the node and the clients of every message, with one message per block."""
        return [
            (self._nodes[i % len(self._nodes)], block.tolist()) for i, block in enumerate(blocks)
        ]


@dataclass
class OneNodePerClient(ChargedFirst):
    """Real nodes, each of which holds one client's data.

    Attributes:
        wait: seconds to wait until the clients' nodes have connected.
        round_timeout: seconds within which the nodes must answer in a round; with None, Flower's
            timeout applies.
        quorum: share of the registered clients whose nodes must connect before the run starts, and
            share of a round's nodes that must answer. None means that all nodes must connect and at
            least one must answer in a round.
        max_failures: largest number of missing, failed and rejected replies in a round with which
            the run goes on. With None, the run goes on while at least one node answers.
        simulated: whether the nodes belong to a simulation, where a public seed is allowed.
        test_mode: whether real nodes may run with a public seed, which protects nothing.
        keyed: whether simulated nodes have the same keys again after the run is resumed.

    Raises:
        ConfigError: a value is out of range or of another type.

    Example:
        >>> OneNodePerClient(quorum=0.5).addresses([np.array([3, 4])])  # no node has connected yet
        [(None, [3]), (None, [4])]
    """

    single = True
    work = None

    wait: Positive = 120.0
    round_timeout: Positive | None = None
    quorum: Rate | None = None
    max_failures: Annotated[int, partial(check_counts, least=0)] | None = None
    simulated: bool = False
    test_mode: bool = False
    keyed: bool = True
    _nodes: dict[int, int] = field(default_factory=dict, repr=False)  # client -> node
    _known: set[int] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        check_annotated("OneNodePerClient", OneNodePerClient, vars(self))

    @property
    def repeats(self) -> bool:
        """Whether a round that is repeated after an interruption has the same contributions, bit by
        bit.
        """
        return self.simulated and self.keyed

    def find(self, grid: Grid, population: int) -> None:
        """Find the node of every client. The first call waits for the nodes; later calls update the
        assignment if nodes have left or joined.

        Raises:
            RunError: in the first call, a node names a different number of clients, two nodes name
                the same client, or too many clients have no node.
        """
        if self._known:
            here = set(grid.get_node_ids())
            if here != self._known:
                self._meet(grid, here, population, self.wait, tolerant=True)
                self._name_silent(here)
            return
        deadline = time.monotonic() + self.wait
        while True:
            here = set(grid.get_node_ids())
            self._meet(
                grid, here, population, max(min(self.wait, _ANSWER_S), deadline - time.monotonic())
            )
            missing = sorted(set(range(population)) - self._nodes.keys())
            late = time.monotonic() > deadline
            if not missing or (late and len(self._nodes) >= (self.quorum or 1) * population):
                break
            if late:
                raise RunError(
                    f"{len(missing)} of {population} clients have no node after {self.wait:.0f} s, "
                    f"beginning with client {missing[0]}: start them, or set federation.quorum to "
                    "begin without them"
                )
            time.sleep(_POLL_S)
        if missing:
            warnings.warn(
                Notice(f"the run begins without clients {missing}: they have no node"), stacklevel=2
            )
        self._name_silent(here)

    def addresses(self, blocks: Iterable[np.ndarray]) -> Addresses:
        """Return the node and the client of every message, with one message per client; the node is
        None if the client has no connected node.
        """
        return [(self._nodes.get(int(c)), [int(c)]) for block in blocks for c in block]

    def _meet(
        self, grid: Grid, here: set[int], population: int, wait: float, *, tolerant: bool = False
    ) -> None:
        """Drop the nodes that have disconnected, and ask new nodes for their clients. A restarted
        node is a new node, because Flower gives it another number.
        """
        self._nodes = {client: node for client, node in self._nodes.items() if node in here}
        answers = ask(grid, here - self._known, wait, tolerant=tolerant)
        self._known = here & (self._known | answers.keys())
        for node, answer in answers.items():
            try:
                client = self._client_of(node, answer, population)
                if client in self._nodes:
                    raise RunError(
                        f"nodes {self._nodes[client]} and {node} both say that they are client "
                        f"{client}, so its data would count twice: give every node a different "
                        f"{wire.PARTITION}"
                    )
                self._nodes[client] = node
            except RunError as error:
                if not tolerant:
                    raise
                warnings.warn(Notice(f"a node that joined is not used: {error}"), stacklevel=3)

    def _name_silent(self, here: set[int]) -> None:
        """Warn of the nodes that have not answered, and mark them as known so that they are not
        asked again.
        """
        if silent := here - self._known:
            warnings.warn(
                Notice(f"nodes {sorted(silent)} did not say which client they are: not used"),
                stacklevel=3,
            )
        self._known = here

    @staticmethod
    def _client_of(node: int, answer: ConfigRecord, population: int) -> int:
        client, stated = answer.get(wire.PARTITION), answer.get(wire.PARTITIONS)
        if client == wire.ANY_CLIENT:
            raise RunError(
                f"node {node} serves any client, but this run has one node per client: a "
                "simulation's worker must not answer here; start the node for one client (nodes = "
                "'clients')"
            )
        if stated != population or not isinstance(client, int) or not 0 <= client < population:
            raise RunError(
                f"node {node} says that it is client {client!r} of {stated!r}, but the run has "
                f"{population} clients: set its {wire.PARTITION} and "
                f"{wire.PARTITIONS}={population}{wire.in_a_simulation(population)}"
            )
        return client


Nodes = AnyNode | OneNodePerClient


def _reason(said: str) -> str:
    """Shorten the text of a node's error for a message. The last 500 characters remain, because a
    traceback names the cause at its end. If the node runs an app without fedlgm, the result is the
    remedy instead.
    """
    # messages of Flower's own code
    if "query function registered" in said or "No {category} function registered" in said:
        return "its app is Flower's ClientApp, which bounds nothing: use app = clients.PrivateClientApp(model)"
    return printable(said[-500:], 500)


def ask(
    grid: Grid, nodes: Iterable[int], wait: float, *, tolerant: bool = False
) -> dict[int, ConfigRecord]:
    """Ask each node which client it serves; return the answers by node.

    Raises:
        RunError: a node answers with an error, unless `tolerant`.
    """
    content = RecordDict({wire.CONFIG: ConfigRecord()})
    queries = [message_to(grid, content, MessageType.QUERY, node, "query") for node in nodes]
    answers: dict[int, ConfigRecord] = {}
    for reply in grid.send_and_receive(queries, timeout=wait) if queries else ():
        node = {query.metadata.message_id: query.metadata.dst_node_id for query in queries}.get(
            reply.metadata.reply_to_message_id
        )
        if reply.has_error():
            text = f"node {node} did not start: {_reason(str(reply.error.reason))}"
            if not tolerant:
                raise RunError(text)
            warnings.warn(Notice(text), stacklevel=3)
        elif node is not None and wire.CONFIG in reply.content.config_records:
            answers[node] = reply.content.config_records[wire.CONFIG]
    return answers
