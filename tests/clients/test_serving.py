"""Which clients an object answers for is stated when it is built: no message and no seed changes it."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from clients import AnyClient, OneClient
from clients.serving import Serving
from fedlgm import wire
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.keys import KeyRing
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.engines.local import LocalGrid


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    return Assembly(recipes.load("digits", ["federation.clients=20", "privacy.accountant='rdp'"]))


def test_a_node_of_one_client_answers_for_no_other(assembly: Assembly) -> None:
    plan = assembly.method.plan(assembly.start())

    def ask(members: list[int], serves: Serving) -> int:
        client = assembly.client(KeyRing(1), serves)
        # What Flower says of the node does not count any more.
        context = Context(1, 2, {"partition-id": 0, "num-partitions": 2}, RecordDict(), {})
        values = {wire.ROUND: 1, wire.CLIENTS: members, wire.PLAN: plan.to_json()}
        model = ArrayRecord({wire.MODEL: Array(assembly.initial_model().numpy())})
        content = RecordDict({wire.ARRAYS: model, wire.CONFIG: ConfigRecord(values)})
        reply = client.train(LocalGrid(client.as_app()).create_message(content, "train", 2, "1"), context)
        return int(reply.content.metric_records[wire.METRICS][wire.CLIENT_COUNT])  # type: ignore[arg-type]

    one = OneClient(3, 20, simulated=True)
    assert ask([3], one) == 1
    assert ask([3, 4], AnyClient()) == 2  # a worker that simulates any client
    for members in ([4], [3, 4], [3, 3], []):
        with pytest.raises(PrivacyError, match="this node is client 3 of 20: it does not answer for"):
            ask(members, one)


@pytest.mark.parametrize("serves", [AnyClient(), OneClient(3, 20, simulated=True)])
def test_it_says_who_it_is(assembly: Assembly, serves: Serving) -> None:
    grid = LocalGrid(assembly.client(KeyRing(1), serves).as_app())
    message = grid.create_message(RecordDict({wire.CONFIG: ConfigRecord()}), "query", 2, "query")
    (reply,) = grid.send_and_receive([message])
    number, population = (3, 20) if isinstance(serves, OneClient) else (wire.ANY_CLIENT, wire.ANY_CLIENT)
    assert dict(reply.content.config_records[wire.CONFIG]) == {wire.PARTITION: number, wire.PARTITIONS: population}


def test_a_real_node_refuses_a_public_seed(assembly: Assembly) -> None:
    with pytest.raises(ConfigError, match=r"run\.seed: a real node refuses a public seed"):
        assembly.client(KeyRing(1), OneClient(3, 20))
    assembly.client(KeyRing.from_seed(None), OneClient(3, 20))
    assembly.client(KeyRing(1), OneClient(3, 20, simulated=True))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "does not say which client it is: start it with --node-config"),
        ({"partition-id": 3}, "does not say which client it is"),
        ({"partition-id": "three", "num-partitions": 20}, "does not say which client it is"),
        ({"partition-id": 3, "num-partitions": 10}, "one of 10 clients .* the run has 20"),
        ({"partition-id": 20, "num-partitions": 20}, "from 0 to 19 for 20 clients, got 20"),
        ({"partition-id": -1, "num-partitions": 20}, "got -1"),
    ],
)
def test_a_node_whose_configuration_names_no_client_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OneClient.of_node(config, 20)


def test_a_node_is_the_client_that_its_configuration_names() -> None:
    assert OneClient.of_node({"partition-id": 3, "num-partitions": "20", "more": 1.0}, 20) == OneClient(3, 20)
