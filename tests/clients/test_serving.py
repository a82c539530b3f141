"""The clients that a client object answers for: said when it is built, never read from a
message."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from federations import GivenUpdates
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from clients import AnyClient, ClientData, LayerwiseClient, LocalWork, OneClient
from clients.choice import client_class
from fedlgm import mechanisms, wire
from fedlgm.errors import ConfigError, Notice, PrivacyError, RunError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalTraining, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from simulations.config.assembly import Assembly
from simulations.engines import flower_entry
from simulations.engines.local import LocalGrid
from simulations.runs.server import nodes_of
from strategies import AnyNode, OneNodePerClient

LAYERS = LayerTable.from_sizes({"a": 4})
FACTS = RunFacts(1.0, Sampling("poisson", 4, 1.0))


MEDIAN = mechanisms.get("snr-consistent", variant="published", clip="med")
KINDS = {"train": mechanisms.get("snr-consistent"), "train.norms": MEDIAN}


def client(
    serves, keys: KeyRing | None = None, *, fails: bool = False, kind: str = "train"
) -> LayerwiseClient:
    def source(number: int) -> ClientData:
        if fails:
            raise ValueError("patient 4711 has no date of birth")
        return ClientData(torch.full((1, 1), float(number)), torch.zeros(1, dtype=torch.int64))

    work = LocalWork(GivenUpdates(lambda c: torch.full((4,), 9.0)), LocalTraining(), source)
    mechanism, keys = KINDS[kind], keys or KeyRing.from_seed(None)
    return client_class(mechanism)(work, mechanism, LAYERS, keys, serves)


def ask(made: LayerwiseClient, numbers: list[int], kind: str = "train"):
    grid = LocalGrid.of(made)
    plan = mechanisms.get("snr-consistent").plan(LAYERS, FACTS, None)
    config = ConfigRecord({wire.ROUND: 1, wire.CLIENTS: numbers, wire.PLAN: plan.to_json()})
    arrays = ArrayRecord({wire.MODEL: Array(np.zeros(4, dtype=np.float32))})
    message = grid.create_message(
        RecordDict({wire.ARRAYS: arrays, wire.CONFIG: config}), kind, 2, "1"
    )
    (reply,) = grid.deliver([message])
    return reply


def total(reply) -> np.ndarray:
    return reply.content.array_records[wire.ARRAYS][wire.SUM].numpy()


@pytest.mark.parametrize("kind", ["train", "train.norms"])
@pytest.mark.parametrize(
    "numbers", [[0], [3], [2, 3], [2, 2], [], [2] * 8, [-1], [4], list(range(4))]
)
def test_a_node_answers_for_its_own_client_alone(kind, numbers):
    """One node that was asked for eight numbers contributed eight bounds."""
    with pytest.raises(PrivacyError, match=r"this node is client 2 of 4: it does not answer for"):
        ask(client(OneClient(2, 4), kind=kind), numbers, kind)


@pytest.mark.parametrize("kind", ["train", "train.norms"])
def test_why_its_training_fails_stays_on_the_node(kind):
    """Flower sends the text of an error to the server, and writes its cause to the node's log."""
    with pytest.raises(
        RunError, match=r"^this client's training failed: the log of its node says why$"
    ) as failure:
        ask(client(OneClient(2, 4), fails=True, kind=kind), [2], kind)
    assert "4711" in str(failure.value.__cause__)
    for serves in (
        AnyClient(),
        OneClient(2, 4, simulated=True),
    ):  # of a simulation everything is known
        with pytest.raises(ValueError, match="4711"):
            ask(client(serves, fails=True, kind=kind), [2], kind)


def test_its_own_answer_has_one_clients_norm():
    assert np.linalg.norm(total(ask(client(OneClient(2, 4)), [2]))) <= 1


def test_a_worker_of_a_simulation_answers_for_a_block():
    """Power: only because it was built to."""
    assert np.linalg.norm(total(ask(client(AnyClient()), [0, 1, 3]))) == pytest.approx(3, rel=1e-4)


def test_what_a_node_says_of_itself():
    assert OneClient(2, 4).place() == {wire.PARTITION: 2, wire.PARTITIONS: 4}
    assert AnyClient().place() == {
        wire.PARTITION: wire.ANY_CLIENT,
        wire.PARTITIONS: wire.ANY_CLIENT,
    }


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "does not say which client it is"),
        ({wire.PARTITION: 2}, "does not say which client it is"),
        ({wire.PARTITIONS: 4}, "does not say which client it is"),
        ({wire.PARTITION: "two", wire.PARTITIONS: 4}, "does not say which client it is"),
        ({wire.PARTITION: 2, wire.PARTITIONS: 5}, "one of 5 clients .*the run has 4"),
        ({wire.PARTITION: 2, wire.PARTITIONS: 3}, "one of 3 clients .*the run has 4"),
        ({wire.PARTITION: 4, wire.PARTITIONS: 4}, "client numbers run from 0 to 3 .*got 4"),
        ({wire.PARTITION: -1, wire.PARTITIONS: 4}, "client numbers run from 0 to 3 .*got -1"),
    ],
)
def test_a_node_config_that_does_not_fit_is_refused(config, told):
    """A missing or wrong number made one node serve every client, and the run went on as proven."""
    with pytest.raises(ConfigError, match=told):
        OneClient.of_node(config, 4)


def test_a_node_config_that_fits():
    assert OneClient.of_node({wire.PARTITION: 2, wire.PARTITIONS: 4, "more": "x"}, 4) == OneClient(
        2, 4
    )


class TestSeeds:
    """A seed is public: real nodes and their server refuse it."""

    def test_a_real_node_refuses_a_seed(self):
        with pytest.raises(
            ConfigError, match=r"run.seed: a real node refuses a public seed.*run.seed=none"
        ):
            client(OneClient(2, 4), KeyRing.from_seed(0))
        with pytest.raises(ConfigError, match=r"run.seed"):
            client(OneClient(2, 4), KeyRing.from_seed(0).derive(b"still public"))

    def test_simulated_nodes_take_one(self):
        client(OneClient(2, 4, simulated=True), KeyRing.from_seed(0))
        client(AnyClient(), KeyRing.from_seed(0))

    def test_a_real_node_without_a_seed(self):
        client(OneClient(2, 4), KeyRing.from_seed(None))


class TestFlowerApp:
    """The app's two files: what the run config and the node's own config say."""

    @staticmethod
    def context(config: dict, node: dict | None = None) -> Context:
        return Context(
            run_id=1, node_id=2, node_config=node or {}, state=RecordDict(), run_config=config
        )

    @pytest.fixture
    def recipe(self, tiny):
        return tiny

    def test_workers_are_said_in_words(self, recipe):
        serves = flower_entry._serves(self.context({"nodes": "workers"}), recipe())
        assert serves == AnyClient()

    def test_a_node_is_one_client_by_default(self, recipe):
        node = {wire.PARTITION: 3, wire.PARTITIONS: 20}
        assert flower_entry._serves(self.context({}, node), recipe()) == OneClient(3, 20)
        with pytest.raises(ConfigError, match="does not say which client"):
            flower_entry._serves(self.context({}), recipe())

    def test_anything_else_is_refused(self, recipe):
        with pytest.raises(ConfigError, match="nodes must be 'clients'"):
            flower_entry._serves(self.context({"nodes": "any"}), recipe())

    def test_test_mode_says_what_it_costs(self, recipe):
        node = {wire.PARTITION: 3, wire.PARTITIONS: 20}
        with pytest.warns(Notice, match="anyone who knows it can subtract all noise"):
            serves = flower_entry._serves(self.context({}, node), recipe(run={"test_mode": True}))
        client(serves, KeyRing.from_seed(3))
        with pytest.warns(Notice, match="anyone who knows it can subtract all noise"):
            nodes = nodes_of(Assembly(recipe(run={"test_mode": True})), "clients")
        assert isinstance(nodes, OneNodePerClient)
        assert (nodes.simulated, nodes.test_mode) == (False, True)

    def test_without_test_mode_nothing_is_said_and_seeds_are_refused(self, recipe):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nodes = nodes_of(Assembly(recipe()), "clients")
            assert isinstance(nodes_of(Assembly(recipe()), "workers"), AnyNode)
        assert (nodes.simulated, nodes.test_mode) == (False, False)

    def test_an_unseeded_node_keeps_its_own_secret(self):
        """Each message has a process of its own: with fresh keys a repeated request would be
        another release."""
        here, there = self.context({}), self.context({})
        assert flower_entry._secret(here) == flower_entry._secret(here)
        assert flower_entry._secret(here) != flower_entry._secret(there)
