"""Replies of single clients are not trusted: what they hold counts at most as one bounded
contribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hostile import CLIENTS, NodeGrid, forged, node_of, part_norms, reply_with, watch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlgm import wire
from fedlgm.errors import PrivacyError, RunError
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.trust import largest_norm
from strategies.replies import contribution
from tests.support.hostile_sums import BROKEN, HUGE, SIZES, fake, nodes, npy, plan_of, spread

TOLD = 1 + 1e-8


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_sum_counts_as_zero_and_is_named(federate, broken):
    """With the same noise, the round without the client is the round with its broken reply, bit for
    bit."""
    silent = federate(
        lambda c: spread(c) if c != 4 else torch.zeros(5),
        SIZES,
        grid=NodeGrid,
        nodes=nodes(),
        owner="silent",
    )
    honest = watch(silent.strategy)
    silent.run(1)
    federation = federate(spread, SIZES, grid=NodeGrid, nodes=nodes())
    sums = watch(federation.strategy)
    federation.grid.tamper[4] = lambda message, honest: reply_with(message, BROKEN[broken])
    federation.run(1)
    assert torch.equal(sums[0], honest[0])
    (failure,) = federation.records[0].failures
    assert (failure.kind, failure.node, failure.client) == ("rejected", node_of(4), 4)
    assert failure.reason


def test_the_bound_is_the_plans_and_no_less():
    """Power of the tests above: what an honest client may send is taken, and a hundredth more is
    not."""
    plan = plan_of("central")
    exact = np.concatenate([np.full(3, 2.0 / math.sqrt(3)), np.full(2, 0.5 / math.sqrt(2))])
    assert contribution(fake(exact), plan).tolist() == exact.tolist()
    for worse in (exact * [1.01, 1.01, 1.01, 1, 1], exact * [1, 1, 1, 1.01, 1.01]):
        with pytest.raises(PrivacyError, match=r"its part '[ab]' has norm .*, but the plan allows"):
            contribution(fake(worse), plan)


@pytest.mark.parametrize("count", [0, -5, 10**9])
def test_counts_that_a_reply_states_are_not_used(federate, count):
    """One node that said 0 or -5 dropped the sums of a whole block of clients."""
    expected = federate(spread, SIZES, grid=NodeGrid, nodes=nodes(), owner="honest")
    honest = watch(expected.strategy)
    expected.run(1)
    federation = federate(spread, SIZES, grid=NodeGrid, nodes=nodes())
    sums = watch(federation.strategy)
    for client in (0, 3):
        federation.grid.tamper[client] = lambda message, honest: reply_with(
            message,
            honest.content.array_records[wire.ARRAYS][wire.SUM],
            **{wire.CLIENT_COUNT: count, wire.DISCARDED: count},
        )
    federation.run(1)
    assert torch.equal(sums[0], honest[0])
    assert federation.records[0].discarded == 0


class TestWhoseReply:
    """A reply counts for the message that it answers, once, from the node that was asked, in this
    run."""

    @pytest.fixture
    def federation(self, federate):
        return federate(spread, SIZES, grid=NodeGrid, nodes=nodes(), rounds=2)

    def reasons(self, federation) -> list[str]:
        return [failure.reason for failure in federation.records[-1].failures]

    def test_the_reply_of_an_earlier_round_is_refused(self, federation):
        kept: list[Message] = []

        def replay(message: Message, honest: Message) -> Message:
            kept.append(honest)
            return kept[0]

        federation.grid.tamper[2] = replay
        sums = watch(federation.strategy)
        federation.run(1)
        assert not federation.records[0].failures
        federation.run(1)
        assert self.reasons(federation) == [
            "it does not answer a message of this round",
            "no reply in time",
        ]
        assert torch.equal(sums[1], sum_without(2))

    def test_another_run_is_refused(self, federation):
        federation.grid.tamper[2] = lambda message, honest: forged(honest, run_id=7)
        federation.run(1)
        assert "it belongs to another run" in self.reasons(federation)

    def test_another_node_is_refused(self, federation):
        federation.grid.tamper[2] = lambda message, honest: forged(honest, src_node_id=node_of(9))
        sums = watch(federation.strategy)
        federation.run(1)
        assert f"node {node_of(2)} was asked" in self.reasons(federation)
        assert torch.equal(sums[0], sum_without(2))

    def test_an_answer_for_another_client_is_refused(self, federation):
        """Client 2 answers client 3's message as well; client 3's own reply is the one that
        counts."""
        seen: dict[int, str] = {}

        def note(message: Message, honest: Message) -> Message:
            seen[3] = message.metadata.message_id
            return honest

        federation.grid.tamper[3] = note
        federation.grid.tamper[4] = lambda message, honest: [
            honest,
            forged(
                reply_with(message, np.zeros(5)),
                reply_to_message_id=seen[3],
                src_node_id=node_of(4),
            ),
        ]
        sums = watch(federation.strategy)
        federation.run(1)
        assert torch.equal(sums[0], sum_without())
        assert [failure.kind for failure in federation.records[0].failures] == ["rejected"]

    def test_a_second_answer_is_refused(self, federation):
        federation.grid.tamper[2] = lambda message, honest: [
            honest,
            honest,
            reply_with(message, np.zeros(5)),
        ]
        sums = watch(federation.strategy)
        federation.run(1)
        assert torch.equal(sums[0], sum_without())
        assert self.reasons(federation) == ["the message was answered before"] * 2

    def test_only_the_asked_node_or_flower_itself_may_report_an_error(self, federation):
        """An error drops a client from the round: another node must not be able to report it."""
        seen: dict[int, Message] = {}

        def note(message: Message, honest: Message) -> None:
            seen[3] = message

        federation.grid.tamper[3] = note
        federation.grid.tamper[4] = lambda message, honest: [
            error_from(seen[3], node_of(4)),
            reply_with(seen[3], own(3).numpy()),
            honest,
        ]
        federation.grid.tamper[5] = lambda message, honest: error_from(
            message, 1
        )  # the SuperLink lost the node
        sums = watch(federation.strategy)
        federation.run(1)
        assert torch.equal(sums[0], sum_without(5))
        assert sorted(failure.kind for failure in federation.records[0].failures) == [
            "error",
            "rejected",
        ]


def error_from(message: Message, node: int) -> Message:
    reply = Message(Error(code=1, reason="x" * 10_000), reply_to=message)
    metadata = forged(reply_with(message, np.zeros(1)), src_node_id=node).metadata
    return Message(error=reply.error, metadata=metadata)  # type: ignore[call-overload]


def own(client: int) -> torch.Tensor:
    """A client's bounded contribution under the tests' plan: snr-consistent, bound 1 over two
    layers."""
    return bounded_of(client)


_BOUNDED: dict[int, torch.Tensor] = {}


def bounded_of(client: int) -> torch.Tensor:
    return _BOUNDED[client]


def sum_without(*absent: int) -> torch.Tensor:
    total = torch.zeros(5, dtype=torch.float64)
    for start in range(0, CLIENTS, 8):  # in blocks, as the strategy adds
        block = torch.zeros(5, dtype=torch.float64)
        for client in range(start, min(start + 8, CLIENTS)):
            if client not in absent:
                block += _BOUNDED[client]
        total += block
    return total


@pytest.fixture(autouse=True)
def _bounded(federate):
    if not _BOUNDED:
        from fedlgm.aggregation import bound_update

        strategy = federate(spread, SIZES, owner="bounds").strategy
        plan = strategy.method.plan(strategy.transcript)
        _BOUNDED.update({client: bound_update(spread(client), plan) for client in range(CLIENTS)})


# -- fuzz --------------------------------------------------------------------------------------------------------------


_FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=64)
_DESCRIBED = st.sampled_from(
    ["<f8", "<f4", ">f8", "<f2", "|O", "<i8", "<U3", "|V0", "|S0", "<c16", "<M8[s]", "\\0", "f8,f4"]
)


@st.composite
def arrays(draw_) -> Array:
    """Any array a node might send: numbers of any size, types, shapes, headers and bytes."""
    kind = draw_(st.integers(0, 4))
    if kind == 0:
        values = np.array(draw_(st.lists(_FLOATS, min_size=5, max_size=5)), dtype=np.float64)
        return Array(values if draw_(st.booleans()) else values.astype(np.float32))
    if kind == 1:
        scale = 10.0 ** draw_(st.integers(-320, 308))
        return Array(np.array(draw_(st.lists(st.floats(-1, 1), min_size=5, max_size=5))) * scale)
    if kind == 2:
        shape = draw_(
            st.one_of(st.just("(5,)"), st.text(max_size=8), st.tuples(st.integers()).map(str))
        )
        order = draw_(st.sampled_from(["True", "False", "0", "'x'"]))
        header = (
            f"{{'descr': '{draw_(_DESCRIBED)}', 'fortran_order': {order}, 'shape': {shape}, }}\n"
        )
        return npy(header.encode("utf-8", "replace")[:60000], draw_(st.binary(max_size=60)))
    if kind == 3:
        data = bytearray(Array(np.ones(5)).data)
        for place in draw_(st.lists(st.integers(0, len(data) - 1), max_size=6)):
            data[place] = draw_(st.integers(0, 255))
        return Array("float64", (5,), "numpy.ndarray", bytes(data))
    return Array("float64", (5,), "numpy.ndarray", draw_(st.binary(max_size=300)))


@st.composite
def contents(draw_) -> RecordDict:
    """Any content: records missing, of other kinds, with other names."""
    content: dict[str, object] = {}
    array = draw_(arrays())
    shape = draw_(st.integers(0, 9))
    if shape < 7:
        content[wire.ARRAYS] = ArrayRecord({wire.SUM: array})
    elif shape == 7:
        content[wire.ARRAYS] = draw_(
            st.sampled_from(
                [ConfigRecord({wire.SUM: "1"}), MetricRecord({wire.SUM: 1.0}), ArrayRecord()]
            )
        )
    elif shape == 8:
        content[wire.ARRAYS] = ArrayRecord(
            {wire.SUM: array, wire.NOTE + "x": draw_(arrays()), wire.NORMS: array}
        )
    if draw_(st.booleans()):
        content[wire.METRICS] = MetricRecord(
            {wire.CLIENT_COUNT: draw_(st.integers(-(2**62), 2**62))}
        )
    return RecordDict(content)  # type: ignore[arg-type]


def assert_bounded(content: RecordDict, plan: ReleasePlan) -> None:
    message = NodeGrid(None).create_message(RecordDict(), "train", 2, "1")
    try:
        values = torch.from_numpy(contribution(Message(content, reply_to=message), plan))
    except PrivacyError:
        return
    limits = [
        p.clip if plan.facts.trust == "central" else largest_norm(p, plan.family)
        for p in plan.parts
    ]
    assert values.dtype == torch.float64
    assert (part_norms(values, plan) <= np.array(limits) * TOLD).all()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=contents(),
    trust=st.sampled_from(["central", "local"]),
    family=st.sampled_from(["gaussian", "laplace"]),
)
def test_whatever_a_reply_holds_is_bounded_or_refused(content, trust, family):
    assert_bounded(content, plan_of(trust, family))


@pytest.mark.slow
@settings(max_examples=3_000, suppress_health_check=list(HealthCheck))
@given(
    content=contents(),
    trust=st.sampled_from(["central", "local"]),
    family=st.sampled_from(["gaussian", "laplace"]),
)
def test_three_thousand_replies_are_bounded_or_refused(content, trust, family):
    assert_bounded(content, plan_of(trust, family))


@pytest.mark.slow
def test_three_thousand_hostile_replies_end_no_round(federate):
    """Whole rounds of the server in which nine of ten nodes lie, in every way at once."""
    federation = federate(
        spread, SIZES, grid=NodeGrid, nodes=nodes(), mechanism="snr-consistent", rounds=360
    )
    strategy = federation.strategy
    sums, rng, kept = watch(strategy), np.random.default_rng(0), []
    broken = list(BROKEN.values())

    def lie(message: Message, honest: Message) -> Message | list[Message] | None:
        kind, array = rng.integers(12), broken[rng.integers(len(broken))]
        reply = reply_with(
            message, array, **{wire.CLIENT_COUNT: int(rng.integers(-(2**40), 2**40))}
        )
        if rng.random() < 0.02:
            kept.append(honest)
        if kind < 4:
            return reply
        if kind == 4:
            return kept[rng.integers(len(kept))] if kept else None
        if kind == 5:
            return [honest, reply, honest]
        if kind == 6:
            return error_from(message, int(rng.integers(0, 3)))
        if kind == 7:
            return forged(
                reply, run_id=int(rng.integers(5)), src_node_id=int(rng.integers(0, 1100))
            )
        if kind == 8:
            return reply_with(message, rng.standard_normal(5) * 10.0 ** rng.integers(-300, 300))
        if kind == 9:
            flipped = bytearray(honest.content.array_records[wire.ARRAYS][wire.SUM].data)
            flipped[rng.integers(len(flipped))] ^= 1 << int(rng.integers(8))
            return reply_with(message, Array("float64", (5,), "numpy.ndarray", bytes(flipped)))
        if kind == 10:
            return Message(RecordDict(), reply_to=message)
        return None

    for client in range(1, CLIENTS):
        federation.grid.tamper[client] = lie
    federation.run(360)
    assert len(federation.records) == 360
    bounds = np.array([part.clip for part in federation.records[0].plan.parts])
    for total in sums:
        assert (
            part_norms(total - bounded_of(0), federation.records[0].plan)
            <= (CLIENTS - 1) * bounds * TOLD
        ).all()
    assert torch.isfinite(strategy.transcript.models[-1]).all()


def test_a_round_that_nobody_answers_ends_the_run_before_anything_is_charged(federate):
    federation = federate(spread, SIZES, grid=NodeGrid, nodes=nodes())
    for client in range(CLIENTS):
        federation.grid.tamper[client] = lambda message, honest: reply_with(message, HUGE)
    with pytest.raises(
        RunError, match=f"no node answered.*node {node_of(0)}: its part 'a' has norm"
    ):
        federation.run(1)
    assert not list(federation.ledger.charges())
