"""What nodes send back: in any order, one client or one block at a time, late, broken or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict

from fedlgm import wire
from fedlgm.errors import PrivacyError, RunError
from fedlgm.plan import Sampling
from simulations.engines.local import LocalGrid

ALL = Sampling("poisson", 10, 1.0)


def ones(client: int) -> torch.Tensor:
    return torch.ones(4)


def spread(client: int) -> torch.Tensor:
    return torch.randn(9, generator=torch.Generator().manual_seed(client)) * 10.0 ** (client % 5 - 2)


def cancelling(client: int) -> torch.Tensor:
    return spread(client) + 1e17 * ((client == 0) - (client == 9))


class Shuffled(LocalGrid):
    """Replies in any order."""

    def deliver(self, messages):
        replies = list(super().deliver(messages))
        yield from (replies[i] for i in np.random.default_rng(len(replies)).permutation(len(replies)))


class Lossy(LocalGrid):
    """One reply is missing."""

    def deliver(self, messages):
        replies = list(super().deliver(messages))
        yield from (replies[1:] if len(replies) > 1 else replies)


class Failing(LocalGrid):
    """One block reports an error."""

    def deliver(self, messages):
        for message in messages:
            if message.metadata.message_type == "train" and message.metadata.message_id.endswith("3"):
                yield Message(Error(code=1, reason="out of memory"), reply_to=message)
            else:
                yield self._app(message, self._context)


class OneNodeEach(LocalGrid):
    """Every client has a node of its own, with a random-looking id, as in a deployment."""

    CLIENTS = 10

    def get_node_ids(self):
        return [1000 - 7 * client for client in range(self.CLIENTS)]

    def deliver(self, messages):
        for message in messages:
            client = (1000 - message.metadata.dst_node_id) // 7
            config = {wire.PARTITION: client, wire.PARTITIONS: self.CLIENTS}
            context = Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config={})
            if wire.CLIENTS in message.content.config_records[wire.CONFIG]:
                assert list(message.content.config_records[wire.CONFIG][wire.CLIENTS]) == [client]
            yield self._app(message, context)


class Late(OneNodeEach):
    """The nodes connect one after another."""

    here = 0

    def get_node_ids(self):
        self.here = min(self.here + 1, self.CLIENTS)
        return super().get_node_ids()[: self.here]


class Half(OneNodeEach):
    def get_node_ids(self):
        return super().get_node_ids()[::2]


@pytest.mark.parametrize(("trust", "relation"), [("central", "add-remove"), ("local", "replace-one")])
@pytest.mark.parametrize("grid", [Shuffled, OneNodeEach])
def test_neither_order_nor_addressing_changes_a_bit(federate, grid, trust, relation):
    setting = {"sampling": Sampling("poisson", 10, 0.8), "trust": trust, "relation": relation, "block_size": 3}
    expected = federate(spread, {"a": 5, "b": 4}, owner="plain", **setting).run(3)
    found = federate(spread, {"a": 5, "b": 4}, grid=grid, owner="other", **setting).run(3)
    assert torch.equal(found, expected)


def test_clients_may_connect_one_after_another(federate):
    expected = federate(spread, {"a": 9}, sampling=ALL, owner="all at once").run(1)
    assert torch.equal(federate(spread, {"a": 9}, sampling=ALL, grid=Late, owner="late").run(1), expected)


def test_sums_depend_on_the_blocks(federate):
    """Power of the test above: float64 sums do notice another order, where most of them cancels out."""
    models = [
        federate(cancelling, {"a": 9}, mechanism="none", sampling=ALL, block_size=size, owner=str(size)).run(1)
        for size in (1, 2, 3, 4)
    ]
    assert len({tuple(model.tolist()) for model in models}) > 1


def test_missing_replies_end_the_run(federate):
    federation = federate(ones, {"a": 4}, grid=Lossy, sampling=ALL, block_size=2)
    with pytest.raises(RunError, match="only 4 of 5"):
        federation.run(1)
    assert not list(federation.ledger.charges())


def test_failed_blocks_end_the_run_with_their_reason(federate):
    federation = federate(ones, {"a": 4}, grid=Failing, sampling=ALL, block_size=2)
    with pytest.raises(RunError, match="out of memory"):
        federation.run(1)


def test_clients_without_a_node_are_reported(federate):
    federation = federate(ones, {"a": 4}, grid=Half, sampling=ALL, wait_for_nodes=0.3)
    with pytest.raises(RunError, match="5 of 10 clients have no node after 0 s, the first is 1"):
        federation.run(1)


def test_replies_that_do_not_fit_the_plan_are_refused(federate):
    federation = federate(ones, {"a": 4}, sampling=ALL)
    original = federation.strategy._messages

    def other_plan(grid, nodes, cut, round_, arrays, kind, extra):
        options = {"clip": "med", "norms": "quantile"}
        fewer = federate(ones, {"a": 4}, mechanism="snr-consistent", options=options, owner="b").strategy
        plan = fewer.mechanism.plan(fewer.layers, fewer.budget, fewer.transcript)
        return original(grid, nodes, cut, round_, arrays, kind, {wire.PLAN: plan.to_json()})

    federation.strategy._messages = other_plan
    with pytest.raises(PrivacyError, match=r"holds 5 values .* where the plan releases 4 numbers"):
        federation.run(1)


class Garbled(LocalGrid):
    """One reply's sum is replaced."""

    by: Array

    def deliver(self, messages):
        for reply in super().deliver(messages):
            if wire.ARRAYS in reply.content and reply.content.metric_records[wire.METRICS][wire.BLOCK] == 3:
                reply.content[wire.ARRAYS] = ArrayRecord({wire.SUM: self.by})
            yield reply


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (Array("float64", (4,), "numpy.ndarray", b"nothing of the kind"), "cannot be read"),
        (Array("float64", (4,), "numpy.ndarray", Array(np.ones(4)).data[:-1]), "cannot be read"),
        (Array(np.ones(4) + 1j), "holds 4 values of complex128"),
        (Array(np.ones((2, 2))), "holds 4 values .* as \\(2, 2\\)"),
    ],
)
def test_replies_that_cannot_be_read_end_the_run(federate, by, said):
    federation = federate(ones, {"a": 4}, grid=type("_", (Garbled,), {"by": by}), sampling=ALL, block_size=2)
    with pytest.raises((PrivacyError, RunError), match=said):
        federation.run(1)
    assert not list(federation.ledger.charges())
