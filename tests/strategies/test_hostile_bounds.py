"""Under local trust, too, a reply counts at most as one bounded and noised contribution; beside it
nothing counts."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from hostile import CLIENTS, NodeGrid, part_norms, reply_with, watch

from fedlgm import wire
from fedlgm.noise.draws import draw
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import local_release
from fedlgm.planning.facts import LocalTraining
from fedlgm.planning.plan import Part
from fedlgm.planning.trust import largest_norm
from strategies.replies import contribution
from tests.support.hostile_sums import BROKEN, SIZES, fake, nodes, plan_of, spread


class TestLocalTrust:
    """The bound is what a client's contribution and its noise together reach but with negligible
    probability."""

    OPTIONS: ClassVar = {"trust": "local", "relation": "replace-one"}

    @pytest.mark.parametrize(
        "broken", ["norm 1e7", "NaN", "infinite", "squares overflow", "too long", "no header"]
    )
    def test_hostile_replies_count_as_zero(self, federate, broken):
        federation = federate(spread, SIZES, grid=NodeGrid, nodes=nodes(), **self.OPTIONS)
        sums = watch(federation.strategy)
        federation.grid.tamper[4] = lambda message, honest: reply_with(message, BROKEN[broken])
        federation.run(1)
        (failure,) = federation.records[0].failures
        assert (failure.kind, failure.client) == ("rejected", 4)
        plan = federation.records[0].plan
        assert torch.isfinite(sums[0]).all()
        limits = np.array([CLIENTS * largest_norm(part, plan.family) for part in plan.parts])
        assert (part_norms(sums[0], plan) < limits).all()

    @pytest.mark.parametrize("family", ["gaussian", "laplace"])
    def test_honest_clients_are_never_rejected(self, family):
        plan = plan_of("local", family)
        for client in range(300):
            updates = torch.full((1, 5), 1e6)  # cut to the bound
            released, _ = local_release(updates, plan, KeyRing(client), 1, client)
            contribution(fake(released.numpy()), plan)

    @pytest.mark.parametrize("family", ["gaussian", "laplace"])
    @pytest.mark.parametrize("size", [1, 7, 1000, 200_000])
    def test_the_limit_is_near_what_honest_noise_reaches(self, family, size):
        """Power: no honest draw exceeds it, and it is not far above them, so little can hide below
        it."""
        part = Part("a", size, 2.0, 3.0)
        limit = largest_norm(part, family)
        rng = np.random.default_rng(size)
        order = 2 if family == "gaussian" else 1
        drawn = [
            2.0 + np.linalg.norm(draw(family, 3.0, rng, (size,)), ord=order) for _ in range(200)
        ]
        assert max(drawn) < limit
        assert limit < 2.0 + 3.0 * (
            1.1 * (size**0.5 if order == 2 else size) + 9 * (1 if order == 2 else 5 + size**0.5)
        )

    def test_a_bound_without_noise_is_the_bound(self):
        assert largest_norm(Part("a", 5, 2.0, 0.0), "gaussian") == 2.0
        assert largest_norm(Part("a", 5, math.inf, 1.0), "gaussian") == math.inf


class TestFiguresBesideTheSum:
    """Only published, NOT PRIVATE variants report figures of their own; a sound run publishes
    none."""

    @staticmethod
    def chatty(message: Message, honest: Message) -> Message:
        record = ArrayRecord(
            {
                wire.SUM: honest.content.array_records[wire.ARRAYS][wire.SUM],
                wire.NOTE + "noise_norm": Array(np.full((1, 2), 1e30)),
                wire.NOTE + "<b>my raw weights</b>": Array(np.full((1, 2), 42.0)),
            }
        )
        return Message(
            RecordDict({wire.ARRAYS: record, wire.METRICS: MetricRecord({})}), reply_to=message
        )

    def test_figures_that_nobody_asked_for_are_left_out(self, federate):
        federation = federate(spread, SIZES, grid=NodeGrid, nodes=nodes())
        for client in range(CLIENTS):
            federation.grid.tamper[client] = self.chatty
        federation.run(1)
        assert federation.records[0].notes == {}

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
    def test_hostile_norms_do_not_end_a_run_that_asks_for_norms(self, federate, bad):
        """NOT PRIVATE, and still no node may stop it."""
        federation = federate(
            spread,
            SIZES,
            mechanism="snr-consistent",
            options={"clip": "med", "variant": "published"},
            grid=NodeGrid,
            nodes=nodes(),
        )

        def garble(message: Message, honest: Message) -> Message:
            if wire.NORMS in honest.content.array_records[wire.ARRAYS]:
                record = ArrayRecord({wire.NORMS: Array(np.full((1, 2), bad))})
                return Message(RecordDict({wire.ARRAYS: record}), reply_to=message)
            return honest

        federation.grid.tamper[1] = garble
        federation.run(2)
        assert np.isfinite(federation.records[-1].plan.clip).all()


def test_published_variants_still_run_with_a_node_per_client(federate):
    """Every client bounds and noises by a plan of its own there: its reply must not be held to the
    common one."""
    federation = federate(
        lambda client: 100 * spread(client),
        SIZES,
        mechanism="ladp",
        options={"variant": "published"},
        grid=NodeGrid,
        nodes=nodes(),
        trust="local",
        relation="replace-one",
        rounds=2,
        max_participations=2,
        epsilon=8.0,
        delta=1e-5,
        training=LocalTraining(gradient_clip=1.0),
    )
    federation.run(2)
    assert [record.failures for record in federation.records] == [(), ()]


class TestClientsWithPlansOfTheirOwn:
    """A reply is held to the plan that follows from the client's answer in it."""

    WIDE: ClassVar = dict.fromkeys("abcdef", 3000)
    OPTIONS: ClassVar = {
        "mechanism": "client-ladp",
        "options": {"score_floor": 0.25, "score_cap": 4.0, "share": 0.9},
        "grid": NodeGrid,
        "nodes": nodes(),
        "trust": "local",
        "relation": "replace-one",
        "multiplier": 0.1,  # answers with little noise: scores differ widely
    }

    @staticmethod
    def uneven(client: int) -> torch.Tensor:
        update = torch.zeros(6 * 3000)
        update[:3000], update[3000:6000], update[6000:9000] = 0.1, 0.02, 0.01
        return update

    def test_honest_clients_are_not_rejected(self, federate):
        federation = federate(self.uneven, self.WIDE, **self.OPTIONS)
        federation.run(1)
        assert federation.records[0].failures == ()

    def test_a_layer_that_the_answer_does_not_select_must_be_zero(self, federate):
        federation = federate(self.uneven, self.WIDE, **self.OPTIONS)

        def smuggle(message: Message, honest: Message) -> Message:
            values = wire.view(honest.content.array_records[wire.ARRAYS][wire.SUM].data).copy()
            values[5 * 3000] += 0.5
            return reply_with(message, values)

        federation.grid.tamper[4] = smuggle
        federation.run(1)
        (failure,) = federation.records[0].failures
        assert (failure.kind, failure.client) == ("rejected", 4)
        assert "does not select" in failure.reason
