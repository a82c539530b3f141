"""Which nodes serve which clients: what a node says is checked against what the strategy was told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federations import Federation, OneNodeEach
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedlgm import wire
from fedlgm.errors import ConfigError, Notice, RunError
from fedlgm.plan import Sampling
from simulations.engines.local import LocalGrid
from strategies import AnyNode, LayerwiseFedAvg, OneNodePerClient

ALL = Sampling("poisson", 10, 1.0)


def one_node_each(**options: Any) -> OneNodePerClient:
    return OneNodePerClient(**{"wait": 5.0, "simulated": True, **options})


def ones(client: int) -> torch.Tensor:
    return torch.ones(4)


class Late(OneNodeEach):
    """The nodes connect one after another."""

    here = 0

    def get_node_ids(self):
        self.here = min(self.here + 1, 10)
        return super().get_node_ids()[: self.here]


class Half(OneNodeEach):
    def get_node_ids(self):
        return super().get_node_ids()[::2]


class Liars(OneNodeEach):
    """Every node answers queries with what it `says`."""

    says: dict[str, Any]

    def answer(self, message: Message) -> Message:
        if message.metadata.message_type != "query":
            return super().answer(message)
        return Message(content=RecordDict({wire.CONFIG: ConfigRecord(self.says)}), reply_to=message)


class Leaving(OneNodeEach):
    """Client 3's node leaves after the first round and is back, under another number, in the third."""

    rounds = 0

    def get_node_ids(self):
        nodes = super().get_node_ids()
        gone = self.node_of(3)
        return [*(node for node in nodes if node != gone), *([gone] if self.rounds < 1 else [])] + (
            [5] if self.rounds >= 2 else []
        )

    def client_of(self, message: Message) -> int:
        return 3 if message.metadata.dst_node_id == 5 else super().client_of(message)

    def deliver(self, messages):
        yield from super().deliver(messages)
        self.rounds += any(message.metadata.message_type == "train" for message in messages)


def run(federate, grid: Any, nodes: Any, rounds: int = 1, **options: Any) -> Federation:
    federation = federate(ones, {"a": 4}, grid=grid, nodes=nodes, sampling=ALL, **{"mechanism": "none", **options})
    federation.run(rounds)
    return federation


def test_clients_may_connect_one_after_another(federate):
    assert run(federate, Late, one_node_each()).means[0].tolist() == pytest.approx([1.0] * 4)


def test_clients_without_a_node_are_reported(federate):
    with pytest.raises(RunError, match="5 of 10 clients have no node after 0 s, the first is client 1"):
        run(federate, Half, one_node_each(wait=0.3))


def test_a_run_may_begin_without_some_of_them(federate):
    with pytest.warns(Notice, match=r"begins without clients \[1, 3, 5, 7, 9\]"):
        federation = run(federate, Half, one_node_each(wait=0.3, quorum=0.5))
    assert federation.means[0].tolist() == pytest.approx([0.5] * 4)
    failures = federation.records[0].failures
    assert {(f.kind, f.node, f.reason) for f in failures} == {("missing", None, "the client has no node")}
    assert [f.client for f in failures] == [1, 3, 5, 7, 9]
    with pytest.raises(RunError, match=r"federation\.quorum"):
        run(federate, Half, one_node_each(wait=0.3, quorum=0.51), owner="more")


def test_a_node_that_leaves_counts_as_zero_until_it_is_back(federate):
    federation = run(federate, Leaving, one_node_each(), rounds=3)
    assert [float(mean[0]) for mean in federation.means] == pytest.approx([1.0, 0.9, 1.0])
    assert [[(f.client, f.kind) for f in record.failures] for record in federation.records] == [
        [],
        [(3, "missing")],
        [],
    ]


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ({wire.PARTITION: 3, wire.PARTITIONS: 10}, "both say that they are client 3, whose data would count twice"),
        ({wire.PARTITION: 3, wire.PARTITIONS: 9}, "client 3 of 9, the run has 10 clients"),
        ({wire.PARTITION: 10, wire.PARTITIONS: 10}, "client 10 of 10"),
        ({wire.PARTITION: -2, wire.PARTITIONS: 10}, "client -2 of 10"),
        ({wire.PARTITION: "3", wire.PARTITIONS: 10}, "client '3' of 10"),
        ({}, "client None of None"),
        (
            {wire.PARTITION: wire.ANY_CLIENT, wire.PARTITIONS: wire.ANY_CLIENT},
            "serves any client, this run has one node",
        ),
    ],
)
def test_nodes_that_do_not_fit_the_run_are_refused(federate, says, said):
    with pytest.raises(RunError, match=said):
        run(federate, type("_", (Liars,), {"says": says}), one_node_each())


def test_a_simulation_does_not_address_a_node_of_one_client(federate):
    class One(LocalGrid):
        def deliver(self, messages):
            says = {wire.PARTITION: 3, wire.PARTITIONS: 10}
            for message in messages:
                yield Message(content=RecordDict({wire.CONFIG: ConfigRecord(says)}), reply_to=message)

    with pytest.raises(RunError, match="serves client 3 alone, this run is a simulation"):
        run(federate, One, AnyNode())


@pytest.mark.parametrize("grid", [LocalGrid, OneNodeEach])
def test_a_node_that_does_not_start_ends_the_run_with_its_reason(federate, grid):
    class Broken(grid):
        def deliver(self, messages):
            for message in messages:
                yield Message(Error(code=1, reason="no such recipe"), reply_to=message)

    nodes = one_node_each() if grid is OneNodeEach else AnyNode()
    with pytest.raises(RunError, match="did not start: no such recipe"):
        run(federate, Broken, nodes)


@pytest.mark.parametrize("nodes", [AnyNode(wait=0.2), OneNodePerClient(wait=0.2, simulated=True)])
def test_nobody_there_is_told(federate, nodes):
    grid = LocalGrid if isinstance(nodes, AnyNode) else OneNodeEach
    with pytest.raises(RunError, match="no node connected within 0 s"):
        run(federate, type("_", (grid,), {"get_node_ids": lambda self: []}), nodes)


def test_a_server_of_real_nodes_refuses_a_public_seed(federate):
    strategy = federate(ones, {"a": 4}).strategy
    parts = (strategy.method, strategy.transcript, strategy.sampler, strategy.optimizer, strategy.releaser)
    with pytest.raises(ConfigError, match=r"run\.seed: a server of real nodes refuses a public seed"):
        LayerwiseFedAvg(*parts, OneNodePerClient())
    LayerwiseFedAvg(*parts, OneNodePerClient(simulated=True))
