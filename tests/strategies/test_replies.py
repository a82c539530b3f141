"""What nodes send back: in any order, one client or one block at a time, late, broken, hostile or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from federations import Federation, OneNodeEach
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.app import Metadata as FlowerMetadata
from scipy import stats

from fedlgm import wire
from fedlgm.devices import Numerics
from fedlgm.errors import PrivacyError, RunError
from fedlgm.layers import LayerTable
from fedlgm.plan import Part, ReleasePlan, RunFacts, Sampling
from fedlgm.privacy.guarantee import Guarantee
from simulations.engines.local import LocalGrid
from strategies import OneNodePerClient
from strategies.replies import contribution, largest_norm

ALL = Sampling("poisson", 10, 1.0)
BLOCKS_OF_TWO = Numerics(block_size=2)


def one_node_each(**options: Any) -> OneNodePerClient:
    return OneNodePerClient(**{"wait": 5.0, "simulated": True, **options})


def ones(client: int) -> torch.Tensor:
    return torch.ones(4)


def spread(client: int) -> torch.Tensor:
    return torch.randn(9, generator=torch.Generator().manual_seed(client)) * 10.0 ** (client % 5 - 2)


def cancelling(client: int) -> torch.Tensor:
    return spread(client) + 1e17 * ((client == 0) - (client == 9))


def is_training(message: Message) -> bool:
    return message.metadata.message_type == "train"


def shuffled(replies: list[Message]) -> list[Message]:
    return [replies[i] for i in np.random.default_rng(len(replies)).permutation(len(replies))]


class Shuffled(LocalGrid):
    """Replies in any order."""

    def deliver(self, messages):
        yield from shuffled(list(super().deliver(messages)))


class ShuffledNodes(OneNodeEach):
    def deliver(self, messages):
        yield from shuffled(list(super().deliver(messages)))


class Lossy(LocalGrid):
    """One block's reply is missing."""

    def deliver(self, messages):
        replies = list(super().deliver(messages))
        yield from (replies[1:] if is_training(messages[0]) else replies)


class Failing(LocalGrid):
    """One block reports an error."""

    def deliver(self, messages):
        for number, message in enumerate(messages):
            if is_training(message) and number == 3:
                yield Message(Error(code=1, reason="out of memory"), reply_to=message)
            else:
                yield self._app(message, self._context)


class Garbled(LocalGrid):
    """One block's sum is replaced."""

    by: Array

    def deliver(self, messages):
        for number, (message, reply) in enumerate(zip(messages, super().deliver(messages), strict=True)):
            if is_training(message) and number == 3:
                reply.content[wire.ARRAYS] = ArrayRecord({wire.SUM: self.by})
            yield reply


UNREADABLE = [
    (Array("float64", (4,), "numpy.ndarray", b"nothing of the kind"), "cannot be read"),
    (Array("float64", (4,), "numpy.ndarray", Array(np.ones(4)).data[:-1]), "cannot be read"),
    (Array(np.ones(4) + 1j), "holds 4 values of complex128"),
    (Array(np.ones((2, 2))), "holds 4 values .* as \\(2, 2\\)"),
]


@pytest.mark.parametrize(("trust", "relation"), [("central", "add-remove"), ("local", "replace-one")])
@pytest.mark.parametrize("grid", [Shuffled, OneNodeEach, ShuffledNodes])
def test_neither_order_nor_addressing_changes_a_bit(federate, grid, trust, relation):
    setting = {"sampling": Sampling("poisson", 10, 0.8), "trust": trust, "relation": relation}
    setting["numerics"] = Numerics(block_size=3)
    nodes = one_node_each() if issubclass(grid, OneNodeEach) else None
    expected = federate(spread, {"a": 5, "b": 4}, owner="plain", **setting).run(3)
    found = federate(spread, {"a": 5, "b": 4}, grid=grid, nodes=nodes, owner="other", **setting)
    assert torch.equal(found.run(3), expected)
    assert not any(record.failures for record in found.records)


def test_sums_depend_on_the_blocks(federate):
    """Power of the test above: float64 sums do notice another order, where most of them cancels out."""
    models = [
        federate(
            cancelling, {"a": 9}, mechanism="none", sampling=ALL, numerics=Numerics(block_size=size), owner=str(size)
        ).run(1)
        for size in (1, 2, 3, 4)
    ]
    assert len({tuple(model.tolist()) for model in models}) > 1


class TestBlocksOfASimulation:
    """A block that is not answered is a defect, not a client's doing: it ends the run before anything is charged."""

    def test_missing_replies_end_the_run(self, federate):
        federation = federate(ones, {"a": 4}, grid=Lossy, sampling=ALL, numerics=BLOCKS_OF_TWO)
        with pytest.raises(RunError, match="only 4 of 5"):
            federation.run(1)
        assert not list(federation.ledger.charges())

    def test_failed_blocks_end_the_run_with_their_reason(self, federate):
        federation = federate(ones, {"a": 4}, grid=Failing, sampling=ALL, numerics=BLOCKS_OF_TWO)
        with pytest.raises(RunError, match="out of memory"):
            federation.run(1)
        assert not list(federation.ledger.charges())

    def test_replies_that_do_not_fit_the_plan_are_refused(self, federate):
        federation = federate(ones, {"a": 4}, sampling=ALL)
        original = federation.strategy._messages

        def other_plan(grid, cut, round_, arrays, kind, extra):
            options = {"clip": "med", "norms": "quantile"}
            fewer = federate(ones, {"a": 4}, mechanism="snr-consistent", options=options, owner="b").strategy
            plan = fewer.method.plan(fewer.transcript)
            return original(grid, cut, round_, arrays, kind, {wire.PLAN: plan.to_json()})

        federation.strategy._messages = other_plan
        with pytest.raises(PrivacyError, match=r"holds 5 values .* where the plan releases 4 numbers"):
            federation.run(1)

    @pytest.mark.parametrize(("by", "said"), UNREADABLE)
    def test_replies_that_cannot_be_read_end_the_run(self, federate, by, said):
        grid = type("_", (Garbled,), {"by": by})
        federation = federate(ones, {"a": 4}, grid=grid, sampling=ALL, numerics=BLOCKS_OF_TWO)
        with pytest.raises((PrivacyError, RunError), match=said):
            federation.run(1)
        assert not list(federation.ledger.charges())


CULPRIT = 6


class Hostile(OneNodeEach):
    """One node's replies to training messages are replaced by what `does` makes of them."""

    def __init__(self, apps, does: Callable[[Message, Message], list[Message]]) -> None:
        super().__init__(apps)
        self._does = does

    def deliver(self, messages):
        for message in messages:
            reply = self.answer(message)
            culprit = is_training(message) and self.client_of(message) == CULPRIT
            yield from self._does(message, reply) if culprit else [reply]


def honest(message: Message, reply: Message) -> list[Message]:
    return [reply]


def sends(values: np.ndarray | Array) -> Callable[[Message, Message], list[Message]]:
    array = values if isinstance(values, Array) else Array(values)

    def does(message: Message, reply: Message) -> list[Message]:
        reply.content[wire.ARRAYS] = ArrayRecord({wire.SUM: array})
        return [reply]

    return does


def says(**changed: Any) -> Callable[[Message, Message], list[Message]]:
    """The honest reply under changed metadata."""

    def does(message: Message, reply: Message) -> list[Message]:
        found = reply.metadata
        names = (
            *("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id"),
            *("created_at", "ttl", "message_type"),
        )
        metadata = FlowerMetadata(*({n: getattr(found, n) for n in names} | changed).values())
        return [Message(content=reply.content, metadata=metadata)]  # type: ignore[call-overload]

    return does


class TestOneClientsReply:
    """Whatever one node does counts at most as one bounded contribution: it is left out and named."""

    UPDATES = staticmethod(lambda client: torch.full((4,), 0.1 * (client + 1)))

    def run(self, federate, does, rounds: int = 1, owner: str = "test", **options: Any) -> Federation:
        federation = federate(
            self.UPDATES, {"a": 3, "b": 1}, grid=lambda apps: Hostile(apps, does), owner=owner,
            nodes=one_node_each(), **{"sampling": ALL, "mechanism": "uniform", "multiplier": 0.1, **options},
        )  # fmt: skip
        federation.run(rounds)
        return federation

    def expect(self, federate, does, kind: str, said: str, **options: Any) -> None:
        """The round goes on as if the client had sent zeros, and says who failed and why."""
        found = self.run(federate, does, **options)
        absent = federate(
            lambda client: torch.zeros(4) if client == CULPRIT else self.UPDATES(client),
            {"a": 3, "b": 1}, owner="without", sampling=ALL, mechanism="uniform", multiplier=0.1, **options,
        )  # fmt: skip
        absent.run(1)
        assert torch.equal(found.means[0], absent.means[0])
        (failure,) = found.records[0].failures
        assert (failure.kind, failure.node, failure.client) == (kind, Hostile.node_of(CULPRIT), CULPRIT)
        assert said in failure.reason
        assert (found.records[0].cohort, found.records[0].present) == (10, 10)
        assert len(list(found.ledger.charges())) == 1

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            (np.full(4, math.nan), "NaN or infinite"),
            (np.array([0.0, 0.0, 0.0, math.inf]), "NaN or infinite"),
            (np.array([0.71, 0.0, 0.0, 0.0]), "its part 'a' has norm 0.71, the plan allows 0.7071"),
            (np.array([0.0, 0.0, 0.0, 1e300]), "its part 'b' has norm 1e+300"),
            (np.full(4, 1e200), "its part 'a' has norm 1.732e+200"),  # its square overflows
            (np.zeros(5), "holds 5 values"),
            (np.zeros(0), "holds 0 values"),
            (np.zeros(4, dtype=">f8"), "of >f8"),
            (np.zeros(4, dtype=np.int64), "of int64"),
        ],
    )
    def test_values_beyond_the_plan_count_as_zero(self, federate, values, said):
        self.expect(federate, sends(values), "rejected", said)

    @pytest.mark.parametrize("by", [array for array, _ in UNREADABLE])
    def test_what_cannot_be_read_counts_as_zero(self, federate, by):
        self.expect(federate, sends(by), "rejected", "")

    def test_the_largest_contribution_that_the_plan_allows_counts(self, federate):
        """Power: the limit is the plan's own."""
        found = self.run(federate, sends(np.array([0.7071, 0.0, 0.0, -0.7071])))
        assert not found.records[0].failures
        assert not torch.equal(found.means[0], self.run(federate, honest, owner="honest").means[0])

    def test_a_reply_without_a_sum_counts_as_zero(self, federate):
        def does(message: Message, reply: Message) -> list[Message]:
            del reply.content[wire.ARRAYS]
            return [reply]

        self.expect(federate, does, "rejected", "cannot be read")

    @pytest.mark.parametrize("figures", [{"num-clients": 10**6}, {"num-clients": -5, "discarded": -3}, {}])
    def test_what_a_reply_says_about_itself_does_not_count(self, federate, figures):
        def does(message: Message, reply: Message) -> list[Message]:
            reply.content[wire.METRICS] = MetricRecord(figures)
            return [reply]

        found, usual = self.run(federate, does), self.run(federate, honest, owner="honest")
        assert torch.equal(found.means[0], usual.means[0])
        assert found.records[0].failures == ()
        assert found.records[0].discarded == 0

    def test_figures_that_nobody_asked_for_are_left_out(self, federate):
        def does(message: Message, reply: Message) -> list[Message]:
            arrays = reply.content.array_records[wire.ARRAYS]
            arrays[wire.NOTE + "huge"] = Array(np.zeros((1, 10**6)))
            arrays[wire.NOTE + "words"] = Array(np.array([["x"] * 2]))
            arrays[wire.NOTE + "broken"] = Array("float64", (1, 2), "numpy.ndarray", b"nothing")
            return [reply]

        assert self.run(federate, does).records[0].notes == {}

    def test_no_reply_counts_as_zero(self, federate):
        self.expect(federate, lambda message, reply: [], "missing", "no reply in time")

    def test_an_error_counts_as_zero_and_is_told(self, federate):
        self.expect(
            federate, lambda m, r: [Message(Error(code=1, reason="the disk is full" * 100), reply_to=m)], "error",
            "the disk is full",
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"src_node_id": Hostile.node_of(3)}, "node 958 was asked"),
            ({"run_id": 77}, "another run"),
            ({"reply_to_message_id": "1000000"}, "answers no message of this round"),
            ({"reply_to_message_id": ""}, "answers no message of this round"),
        ],
    )
    def test_replies_to_something_else_are_rejected(self, federate, changed, said):
        found = self.run(federate, says(**changed))
        rejected, missing = found.records[0].failures
        assert (rejected.kind, missing.kind, missing.client) == ("rejected", "missing", CULPRIT)
        assert said in rejected.reason

    def test_a_second_answer_is_rejected(self, federate):
        found = self.run(federate, lambda message, reply: [reply, reply])
        assert torch.equal(found.means[0], self.run(federate, honest, owner="honest").means[0])
        (failure,) = found.records[0].failures
        assert (failure.kind, failure.reason) == ("rejected", "the message was answered before")

    def test_nobody_answers_in_anothers_place(self, federate):
        """The culprit answers client 9's message first, with a contribution of its own choosing."""

        class Impostor(Hostile):
            def deliver(self, messages):
                for message in messages:
                    if is_training(message) and self.client_of(message) == CULPRIT:
                        other = next(m for m in messages if self.client_of(m) == 9)
                        stolen = says(reply_to_message_id=other.metadata.message_id)
                        yield from stolen(message, self.answer(message))
                    yield self.answer(message)

        found = federate(
            self.UPDATES, {"a": 3, "b": 1}, grid=lambda apps: Impostor(apps, honest), nodes=one_node_each(),
            sampling=ALL, mechanism="uniform", multiplier=0.1,
        )  # fmt: skip
        found.run(1)
        assert torch.equal(found.means[0], self.run(federate, honest, owner="honest").means[0])
        (failure,) = found.records[0].failures
        assert (failure.kind, failure.node, failure.client) == ("rejected", Hostile.node_of(CULPRIT), 9)

    def test_under_local_trust_a_reply_may_be_as_long_as_bound_and_noise_can_be(self, federate):
        local = {"trust": "local", "relation": "replace-one"}
        usual = self.run(federate, honest, rounds=3, owner="honest", **local)
        assert not any(record.failures for record in usual.records)
        long = np.array([0.7071 + 0.1 * 20, 0.0, 0.0, 0.0])
        found = self.run(federate, sends(long), **local)
        (failure,) = found.records[0].failures
        assert (failure.kind, failure.client) == ("rejected", CULPRIT)
        assert "its part 'a' has norm 2.707" in failure.reason
        ordinary = self.run(federate, sends(np.array([0.7071 + 0.1 * 3, 0.0, 0.0, 0.0])), owner="ordinary", **local)
        assert not ordinary.records[0].failures


class TestQuorum:
    """A run ends before anything is charged where too few nodes answer; an absent one counts as zero."""

    class Absent(OneNodeEach):
        """Clients 0 to 6 do not answer."""

        def deliver(self, messages):
            for message in messages:
                if not is_training(message) or self.client_of(message) > 6:
                    yield self.answer(message)

    class Nobody(OneNodeEach):
        def deliver(self, messages):
            for message in messages:
                if is_training(message):
                    yield Message(Error(code=1, reason="the disk is full"), reply_to=message)
                else:
                    yield self.answer(message)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"quorum": 0.31}, "fewer than federation.quorum = 0.31 of the nodes answered: 3 of 10 nodes"),
            ({"max_failures": 6}, "more than federation.max_failures = 6 nodes failed: 3 of 10 nodes"),
        ],
    )
    def test_too_few_answers_end_the_run(self, federate, options, said):
        federation = federate(ones, {"a": 4}, grid=self.Absent, sampling=ALL, nodes=one_node_each(**options))
        with pytest.raises(RunError, match=said):
            federation.run(1)
        assert not list(federation.ledger.charges())

    @pytest.mark.parametrize("options", [{}, {"quorum": 0.3}, {"max_failures": 7}])
    def test_enough_answers_do_not(self, federate, options):
        federation = federate(
            ones, {"a": 4}, grid=self.Absent, sampling=ALL, nodes=one_node_each(**options), mechanism="none"
        )
        assert federation.run(1).tolist() == pytest.approx([0.3] * 4)  # the public denominator stays
        assert [failure.client for failure in federation.records[0].failures] == list(range(7))

    def test_no_answer_at_all_ends_the_run_and_says_why(self, federate):
        federation = federate(ones, {"a": 4}, grid=self.Nobody, sampling=ALL, nodes=one_node_each())
        with pytest.raises(RunError, match=r"no node answered: 0 of 10 .* the disk is full"):
            federation.run(1)
        assert not list(federation.ledger.charges())


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_honest_noise_is_never_longer_than_is_allowed(family, size):
    """By the exact law of its norm, and not by more than that needs."""
    part = Part("a", size, 1.0, 0.3)
    limit = largest_norm(part, family) - 1.0
    law = stats.chi(size, scale=0.3) if family == "gaussian" else stats.gamma(size, scale=0.3)
    assert law.sf(limit) <= 1e-15
    assert law.sf(limit * 0.8) > 1e-15


@pytest.mark.parametrize("trust", ["central", "local"])
def test_what_a_trainer_bounds_by_the_example_has_no_bound_per_client(trust):
    """A client of many examples may move far; its reply must be numbers."""
    relation = "replace-one" if trust == "local" else "add-remove"
    facts, layers = RunFacts(1.0, ALL, relation, trust), LayerTable.from_sizes({"a": 4})
    plan = ReleasePlan(
        layers, np.ones(1), np.ones(1), facts, Guarantee("proven", "test", unit="example"), bounded_by="trainer"
    )

    def reply(values: np.ndarray) -> Message:
        metadata = FlowerMetadata(1, "2", 3, 4, "5", "6", 0.0, 1.0, "train")
        content = RecordDict({wire.ARRAYS: ArrayRecord({wire.SUM: Array(values)})})
        return Message(content=content, metadata=metadata)  # type: ignore[call-overload]

    assert contribution(reply(np.full(4, 1e3)), plan).tolist() == [1e3] * 4
    with pytest.raises(PrivacyError, match="NaN"):
        contribution(reply(np.array([0.0, 0.0, 0.0, math.nan])), plan)
