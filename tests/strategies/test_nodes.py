"""Which nodes serve which clients: one node per client is checked, named and never guessed."""

from __future__ import annotations

import warnings

import pytest
import torch
from flwr.app import Error, Message
from hostile import CLIENTS, NodeGrid, node_of, watch

from fedlgm import wire
from fedlgm.errors import ConfigError, Notice, RunError
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import Sampling
from strategies import AnyNode, OneNodePerClient

ALL = Sampling("poisson", CLIENTS, 1.0)


def ones(client: int) -> torch.Tensor:
    return torch.full((4,), 0.1 * (client + 1))


@pytest.fixture
def start(federate):
    """Maker of federations with a node per client that are about to start."""

    def make(owner: str = "test", grid=NodeGrid, **options):
        nodes = OneNodePerClient(**({"wait": 0.2, "simulated": True} | options))
        return federate(
            ones, {"a": 4}, mechanism="none", grid=grid, nodes=nodes, owner=owner, rounds=9
        )

    return make


def mean_without(*absent: int) -> list[float]:
    return [sum(0.1 * (c + 1) for c in range(CLIENTS) if c not in absent) / CLIENTS] * 4


def test_every_client_is_asked_once_at_its_own_node(start):
    federation = start()
    asked: list[tuple[int, list[int]]] = []
    for client in range(CLIENTS):

        def note(message, honest, client=client):
            asked.append((client, list(message.content.config_records[wire.CONFIG][wire.CLIENTS])))
            return honest

        federation.grid.tamper[client] = note
    federation.run(1)
    assert asked == [(client, [client]) for client in range(CLIENTS)]
    assert federation.means[0].tolist() == pytest.approx(mean_without())


@pytest.mark.parametrize(
    "place",
    [
        {wire.PARTITION: 3, wire.PARTITIONS: CLIENTS + 1},
        {wire.PARTITION: 3, wire.PARTITIONS: CLIENTS - 1},
        {wire.PARTITION: 3},
        {wire.PARTITION: CLIENTS, wire.PARTITIONS: CLIENTS},
        {wire.PARTITION: -2, wire.PARTITIONS: CLIENTS},
        {wire.PARTITION: 3.0, wire.PARTITIONS: CLIENTS},
        {wire.PARTITION: "3", wire.PARTITIONS: CLIENTS},
        {wire.PARTITIONS: CLIENTS},
        {},
    ],
)
def test_a_node_of_another_population_ends_the_start_and_is_named(start, place):
    """Off by one, or without the number, a node answered for every client that it was asked for."""
    federation = start()
    federation.grid.places[node_of(3)] = place
    says = (
        rf"node {node_of(3)} says that it is client .*the run has {CLIENTS} clients.*"
        "in a simulation: .*num-supernodes"
    )
    with pytest.raises(RunError, match=says):
        federation.run(1)
    assert not list(federation.ledger.charges())


def test_a_node_that_serves_any_client_is_refused(start):
    federation = start()
    federation.grid.places[node_of(3)] = {
        wire.PARTITION: wire.ANY_CLIENT,
        wire.PARTITIONS: wire.ANY_CLIENT,
    }
    with pytest.raises(
        RunError, match=f"node {node_of(3)} serves any client, but this run has one node per client"
    ):
        federation.run(1)


def test_a_node_of_one_client_is_refused_where_any_node_serves_any_client(federate):
    federation = federate(ones, {"a": 4}, grid=NodeGrid, nodes=AnyNode(wait=0.2))
    with pytest.raises(RunError, match=r"serves only client \d, but this run is a simulation"):
        federation.run(1)


def test_two_nodes_for_one_client_are_named(start):
    federation = start()
    federation.grid.places[node_of(7)] = {wire.PARTITION: 2, wire.PARTITIONS: CLIENTS}
    with pytest.raises(
        RunError, match=f"nodes {node_of(2)} and {node_of(7)}|nodes {node_of(7)} and {node_of(2)}"
    ):
        federation.run(1)


def test_no_node_at_all(start):
    federation = start(grid=type("_", (NodeGrid,), {"clients": ()}))
    with pytest.raises(RunError, match="10 of 10 clients have no node after 0 s"):
        federation.run(1)


def test_clients_without_a_node_are_refused_or_begun_without(start):
    some = type("_", (NodeGrid,), {"clients": (0, 1, 2, 3, 4, 6, 7, 8)})
    with pytest.raises(
        RunError, match=r"2 of 10 clients have no node after 0 s, beginning with client 5.*quorum"
    ):
        start(grid=some).run(1)
    with pytest.raises(RunError, match="2 of 10 clients have no node"):
        start("strict", grid=some, quorum=0.9).run(1)
    federation = start("without", grid=some, quorum=0.8)
    with pytest.warns(Notice, match=r"the run begins without clients \[5, 9\]: they have no node"):
        federation.run(1)
    assert federation.means[0].tolist() == pytest.approx(mean_without(5, 9))
    assert [(f.kind, f.node, f.client) for f in federation.records[0].failures] == [
        ("missing", None, 5),
        ("missing", None, 9),
    ]


def test_a_node_that_does_not_say_who_it_is_is_named(start):
    federation = start()
    federation.grid.extra = [4]
    federation.grid.places[4] = None
    with pytest.warns(Notice, match=r"nodes \[4\] did not say which client they are: not used"):
        federation.run(1)
    assert federation.means[0].tolist() == pytest.approx(mean_without())


class TestNodesThatComeAndGo:
    def test_a_node_that_left_counts_as_zero_and_may_come_back(self, start):
        federation = start()
        federation.run(1)
        federation.grid.clients = tuple(c for c in range(CLIENTS) if c != 6)
        federation.run(1)
        federation.grid.clients = tuple(range(CLIENTS))
        federation.run(1)
        assert [m[0] for m in federation.means] == pytest.approx(
            [mean_without(*gone)[0] for gone in ((), (6,), ())]
        )
        assert [len(record.failures) for record in federation.records] == [0, 1, 0]
        assert federation.grid.asked.count(node_of(6)) == 2
        assert federation.grid.asked.count(node_of(5)) == 1

    def test_a_node_that_was_restarted_before_the_start_is_no_second_node(self, start):
        """It comes back under another number while others are still waited for."""
        seen = []

        class Restarting(NodeGrid):
            def get_node_ids(self):
                seen.append(1)
                first = [node_of(c) for c in range(CLIENTS) if c not in (0, 9)]
                return [*first, 2] if len(seen) == 1 else [*first, node_of(9), 3]

        federation = start(grid=Restarting, wait=5.0)
        for number in (2, 3):
            federation.grid.places[number] = {wire.PARTITION: 0, wire.PARTITIONS: CLIENTS}
        federation.strategy.nodes.find(federation.grid, CLIENTS)
        assert federation.strategy.nodes.addresses([[0]])[0][0] == 3

    @pytest.mark.parametrize(
        ("place", "told"),
        [
            (
                {wire.PARTITION: 2, wire.PARTITIONS: CLIENTS},
                f"not used: nodes {node_of(2)} and 4 both say that they are client 2",
            ),
            ({wire.PARTITION: 2, wire.PARTITIONS: 99}, "node 4 says that it is client 2 of 99"),
            (
                {wire.PARTITION: wire.ANY_CLIENT, wire.PARTITIONS: wire.ANY_CLIENT},
                "node 4 serves any client",
            ),
            (None, r"nodes \[4\] did not say which client they are"),
        ],
    )
    def test_a_node_that_joins_later_and_does_not_fit_is_named_and_left_out(
        self, start, place, told
    ):
        federation = start()
        federation.run(1)
        federation.grid.extra, federation.grid.places[4] = [4], place
        with pytest.warns(Notice, match=told):
            federation.run(1)
        assert federation.means[1].tolist() == federation.means[0].tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error", Notice)  # said once
            federation.run(1)

    def test_a_node_that_takes_over_a_client_whose_node_left_is_used(self, start):
        federation = start()
        federation.run(1)
        federation.grid.clients = tuple(c for c in range(CLIENTS) if c != 6)
        federation.grid.extra, federation.grid.places[4] = (
            [4],
            {wire.PARTITION: 6, wire.PARTITIONS: CLIENTS},
        )
        federation.strategy.nodes.find(federation.grid, CLIENTS)
        assert federation.strategy.nodes.addresses([[6]]) == [(4, [6])]


class TestHowManyMustAnswer:
    @pytest.fixture
    def lossy(self, start):
        def make(lost: int, owner: str = "lossy", **options):
            federation = start(owner, **options)
            for client in range(lost):
                federation.grid.tamper[client] = lambda message, honest: None
            return federation

        return make

    def test_without_limits_one_answer_is_enough(self, lossy):
        federation = lossy(9)
        federation.run(1)
        assert federation.means[0].tolist() == pytest.approx(mean_without(*range(9)))
        assert [failure.kind for failure in federation.records[0].failures] == ["missing"] * 9

    def test_max_failures(self, lossy):
        lossy(2, "allowed", max_failures=2).run(1)
        federation = lossy(3, "too many", max_failures=2)
        with pytest.raises(
            RunError, match=r"more than federation.max_failures = 2 nodes failed: 7 of 10 nodes"
        ):
            federation.run(1)
        assert not list(federation.ledger.charges())

    def test_no_failure_allowed(self, lossy):
        with pytest.raises(RunError, match=r"max_failures = 0"):
            lossy(1, max_failures=0).run(1)

    def test_quorum(self, lossy):
        lossy(4, "enough", quorum=0.6).run(1)
        with pytest.raises(
            RunError, match=r"fewer than federation.quorum = 0.6 of the nodes answered: 5 of 10"
        ):
            lossy(5, "too few", quorum=0.6).run(1)

    @pytest.mark.parametrize(("lost", "void"), [(2, False), (3, True)])
    def test_nodes_that_failed_bring_no_share_of_the_noise(self, federate, lost, void):
        """A sum of seven answers was opened as one of ten, where eight must answer for the noise to
        suffice."""
        federation = federate(
            ones,
            {"a": 4},
            mechanism="gaussian",
            multiplier=4.0,
            relation="replace-one",
            trust="distributed",
            sampling=ALL,
            shares=Shares(8),
            accountant="rdp",
            epsilon=8.0,
            delta=1e-5,
            grid=NodeGrid,
            nodes=OneNodePerClient(wait=0.2, simulated=True),
        )
        for client in range(lost):
            federation.grid.tamper[client] = lambda message, honest: None
        federation.run(1)
        assert bool(federation.means[0].any()) is not void

    def test_a_node_that_failed_is_asked_again_in_the_next_round(self, lossy):
        federation = lossy(1)
        federation.run(1)
        federation.grid.tamper.clear()
        federation.run(1)
        assert federation.means[1].tolist() == pytest.approx(mean_without())

    def test_an_empty_cohort_is_no_failure(self, federate):
        nodes = OneNodePerClient(wait=0.2, simulated=True, max_failures=0)
        federation = federate(
            ones, {"a": 4}, grid=NodeGrid, nodes=nodes, sampling=Sampling("poisson", CLIENTS, 1e-9)
        )
        federation.run(1)
        assert len(list(federation.ledger.charges())) == 1


def test_failures_leave_the_denominator_and_the_noise_alone(federate):
    """How many answered must not show in the scale of the noise or of the mean."""
    means = {}
    for lost in (0, 5):
        nodes = OneNodePerClient(wait=0.2, simulated=True)
        federation = federate(ones, {"a": 4}, grid=NodeGrid, nodes=nodes, owner=str(lost))
        sums = watch(federation.strategy)
        for client in range(lost):
            federation.grid.tamper[client] = lambda message, honest: None
        federation.run(1)
        means[lost] = federation.means[0].double() * CLIENTS - sums[0]
    assert torch.allclose(
        means[0], means[5], atol=1e-2
    )  # the same noise, up to the grid that sums are rounded to


def test_a_server_of_real_nodes_refuses_public_seeds(federate):
    with pytest.raises(
        ConfigError, match=r"run.seed: a server of real nodes refuses a public seed.*run.seed=none"
    ):
        federate(ones, {"a": 4}, grid=NodeGrid, nodes=OneNodePerClient(wait=0.2))


RAYS = (
    "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'"
    + "ray::ClientAppActor.run() " * 30
)
OF_FLOWERS_APP = (
    RAYS + "raise ValueError(f\"No {category} function registered with name '{action}'\")"
)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            OF_FLOWERS_APP,
            r"its app is Flower's ClientApp, .*: use app = clients.PrivateClientApp\(model\)$",
        ),
        (
            "ValueError: No query function registered with name 'default'",
            "clients.PrivateClientApp",
        ),
        (
            RAYS + "ModuleNotFoundError: No module named 'mine'",
            "ModuleNotFoundError: No module named 'mine'$",
        ),
    ],
)
def test_a_node_that_does_not_start_is_named_with_the_end_of_its_error_or_the_remedy(
    start, said, shown
):
    class Failing(NodeGrid):
        def send_and_receive(self, messages, timeout=None):
            return [Message(Error(code=1, reason=said), reply_to=message) for message in messages]

    with pytest.raises(RunError, match=rf"node \d+ did not start: .*{shown}"):
        start(grid=Failing).run(1)
