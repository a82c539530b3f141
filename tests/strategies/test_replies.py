"""What nodes send back: in any order, one client or one block at a time; a lost or broken block
ends the run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from hostile import NodeGrid, reply_with

from fedlgm import wire
from fedlgm.errors import DivergedError, Notice, PrivacyError, RunError
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.planning.upload_caps import upload_caps
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.training.devices import Numerics
from simulations.engines.local import LocalGrid
from strategies import OneNodePerClient
from strategies.replies import contribution

ALL = Sampling("poisson", 10, 1.0)
BLOCKS_OF_TWO = Numerics(block_size=2)


def ones(client: int) -> torch.Tensor:
    return torch.ones(4)


def spread(client: int) -> torch.Tensor:
    return torch.randn(9, generator=torch.Generator().manual_seed(client)) * 10.0 ** (
        client % 5 - 2
    )


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


class ShuffledNodes(NodeGrid):
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
        for number, (message, reply) in enumerate(
            zip(messages, super().deliver(messages), strict=True)
        ):
            if is_training(message) and number == 3:
                reply.content[wire.ARRAYS] = ArrayRecord({wire.SUM: self.by})
            yield reply


UNREADABLE = [
    (Array("float64", (4,), "numpy.ndarray", b"nothing of the kind"), "cannot be read"),
    (Array("float64", (4,), "numpy.ndarray", Array(np.ones(4)).data[:-1]), "cannot be read"),
    (Array(np.ones(4) + 1j), "holds 4 values of type complex128"),
    (Array(np.ones((2, 2))), "holds 4 values .* and shape \\(2, 2\\)"),
]


@pytest.mark.parametrize(
    ("trust", "relation"), [("central", "add-remove"), ("local", "replace-one")]
)
@pytest.mark.parametrize("grid", [Shuffled, NodeGrid, ShuffledNodes])
def test_neither_order_nor_addressing_changes_a_bit(federate, grid, trust, relation):
    setting = {"sampling": Sampling("poisson", 10, 0.8), "trust": trust, "relation": relation}
    setting["numerics"] = Numerics(block_size=3)
    nodes = OneNodePerClient(wait=5.0, simulated=True) if issubclass(grid, NodeGrid) else None
    expected = federate(spread, {"a": 5, "b": 4}, owner="plain", **setting).run(3)
    found = federate(spread, {"a": 5, "b": 4}, grid=grid, nodes=nodes, owner="other", **setting)
    assert torch.equal(found.run(3), expected)
    assert not any(record.failures for record in found.records)


def test_sums_depend_on_the_blocks(federate):
    """Power of the test above: float64 sums do notice another order, where most of them cancels
    out."""
    models = [
        federate(
            cancelling,
            {"a": 9},
            mechanism="none",
            sampling=ALL,
            numerics=Numerics(block_size=size),
            owner=str(size),
        ).run(1)
        for size in (1, 2, 3, 4)
    ]
    assert len({tuple(model.tolist()) for model in models}) > 1


class TestBlocksOfASimulation:
    """A block that is not answered is a defect, not a client's doing: it ends the run before
    anything is charged."""

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
            fewer = federate(
                ones, {"a": 4}, mechanism="snr-consistent", options=options, owner="b"
            ).strategy
            plan = fewer.method.plan(fewer.transcript)
            return original(grid, cut, round_, arrays, kind, {wire.PLAN: plan.to_json()})

        federation.strategy._messages = other_plan
        with pytest.raises(
            PrivacyError, match=r"holds 5 values .* but the plan releases 4 numbers"
        ):
            federation.run(1)

    @pytest.mark.parametrize(("by", "said"), UNREADABLE)
    def test_replies_that_cannot_be_read_end_the_run(self, federate, by, said):
        grid = type("_", (Garbled,), {"by": by})
        federation = federate(ones, {"a": 4}, grid=grid, sampling=ALL, numerics=BLOCKS_OF_TWO)
        with pytest.raises((PrivacyError, RunError), match=said):
            federation.run(1)
        assert not list(federation.ledger.charges())


@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize("huge", [1e6, 3e38, 1e300])
def test_what_a_trainer_bounds_by_the_example_has_a_public_cap_per_client(trust, huge):
    """Any finite reply used to count: one of 1e6 took the model with it."""
    relation = "replace-one" if trust == "local" else "add-remove"
    facts, layers = RunFacts(1.0, ALL, relation, trust), LayerTable.from_sizes({"a": 4})
    plan = ReleasePlan(
        layers,
        np.ones(1),
        np.ones(1),
        facts,
        Guarantee("proven", "test", unit="example"),
        bounded_by="trainer",
    )

    def reply(values: np.ndarray) -> Message:
        return reply_with(NodeGrid(None).create_message(RecordDict(), "train", 2, "1"), values)

    cap = float(upload_caps(plan)[0])
    within = np.full(4, cap / 2)
    assert contribution(reply(within), plan).tolist() == within.tolist()
    with pytest.raises(PrivacyError, match=r"its part 'a' has norm .*, but the plan allows"):
        contribution(reply(within * 1.01), plan)
    with pytest.raises(PrivacyError, match="its part 'a' has norm"):
        contribution(reply(np.array([0.0, -huge, 0.0, 0.0])), plan)
    with pytest.raises(PrivacyError, match="NaN"):
        contribution(reply(np.array([0.0, 0.0, 0.0, math.nan])), plan)


class TestDivergence:
    """A model that is no longer finite may be one client's doing: who contributed most, the
    operator alone is told."""

    def test_the_largest_contributions_are_named(self, federate):
        def sizes(client: int) -> torch.Tensor:
            return torch.full((4,), 0.01 * client)

        federation = federate(
            sizes,
            {"a": 4},
            grid=NodeGrid,
            nodes=OneNodePerClient(simulated=True),
            sampling=ALL,
            numerics=BLOCKS_OF_TWO,
        )
        federation.strategy.optimizer.step = lambda model, mean: model * math.inf + math.nan
        with (
            pytest.warns(Notice, match="norms of the largest contributions of round 1: client "),
            pytest.raises(DivergedError) as error,
        ):
            federation.run(1)
        last = ALL.population - 1
        assert [client for client, _ in error.value.largest] == [last, last - 1, last - 2]
        assert error.value.largest[0][1] == pytest.approx(0.02 * last)
        assert "client" not in str(error.value)
