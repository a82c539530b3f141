"""Noise of releases: keyed by what is released, the same for the same release, another for
another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from clients import AnyClient, ClientData, Consent, LayerwiseClient, LocalWork
from fedlgm import mechanisms, wire
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import PrivacyError
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import Noising, local_release, release
from fedlgm.planning.facts import LocalTraining, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.devices import Numerics
from simulations.engines.local import LocalGrid
from strategies import Releaser

LAYERS = LayerTable.from_sizes({"a": 2000, "b": 1000})
LOCAL = RunFacts(
    1.0, Sampling("poisson", 10, 1.0), "replace-one", "local", rounds=4, max_participations=4
)
CENTRAL = RunFacts(1.0, Sampling("poisson", 10, 1.0))
MECHANISM = mechanisms.get("snr-consistent")


def plan_for(facts: RunFacts) -> ReleasePlan:
    return MECHANISM.plan(LAYERS, facts, None)


def update(seed: int) -> torch.Tensor:
    return torch.randn(1, LAYERS.size, generator=torch.Generator().manual_seed(seed))


def bounded(values: torch.Tensor, plan: ReleasePlan) -> torch.Tensor:
    total = BoundedSum.empty(plan)
    total.add(values)
    return total.total


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(np.corrcoef(one.numpy(), other.numpy())[0, 1])


@pytest.mark.parametrize(
    "keys", [KeyRing.from_seed(3), KeyRing.from_seed(None)], ids=["seeded", "secret"]
)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
class TestOneClientsRelease:
    def test_the_same_request_on_unchanged_data_has_the_same_answer_and_name(self, keys, backend):
        plan = plan_for(LOCAL)
        (one, first), (other, second) = (
            local_release(update(1), plan, keys, 1, 4, backend) for _ in range(2)
        )
        assert torch.equal(one, other)
        assert first == second

    def test_changed_data_has_other_noise_and_another_name(self, keys, backend):
        """With the same noise the difference of two answers was the exact change."""
        plan = plan_for(LOCAL)
        changed = update(1).clone()
        changed[0, 7] += 1e-3
        (one, first), (other, second) = (
            local_release(u, plan, keys, 1, 4, backend) for u in (update(1), changed)
        )
        noises = [one - bounded(update(1), plan), other - bounded(changed, plan)]
        assert first != second
        assert abs(correlation(*noises)) < 5 / LAYERS.size**0.5

    @pytest.mark.parametrize("round_and_client", [(2, 4), (1, 5)])
    def test_another_round_or_client_has_other_noise(self, keys, backend, round_and_client):
        plan = plan_for(LOCAL)
        (one, first), (other, second) = (
            local_release(update(1), plan, keys, *where, backend)
            for where in ((1, 4), round_and_client)
        )
        clean = bounded(update(1), plan)
        assert first != second
        assert abs(correlation(one - clean, other - clean)) < 5 / LAYERS.size**0.5

    def test_changes_that_the_bound_hides_are_no_change(self, keys, backend):
        """What is released depends on the bounded contribution alone: a longer update of the same
        direction is it."""
        plan = plan_for(LOCAL)
        names = {
            local_release(scale * update(1), plan, keys, 1, 4, backend)[1]
            for scale in (1024.0, 2048.0)
        }
        assert len(names) == 1


class TestServersNoise:
    def noise(self, keys: KeyRing, total: torch.Tensor, round_: int = 1) -> torch.Tensor:
        plan = plan_for(CENTRAL)
        return release(total.clone(), plan, keys, round_) - total

    def test_unseeded_noise_depends_on_the_sum(self):
        keys, total = KeyRing.from_seed(None), bounded(update(1), plan_for(CENTRAL))
        other = total.clone()
        other[0] += 2.0**-40
        assert torch.equal(self.noise(keys, total), self.noise(keys, total))
        assert (
            abs(correlation(self.noise(keys, total), self.noise(keys, other)))
            < 5 / LAYERS.size**0.5
        )

    def test_a_public_seed_fixes_the_noise(self):
        """Power: the same figures do find noise that is shared."""
        keys, total = KeyRing.from_seed(3), bounded(update(1), plan_for(CENTRAL))
        assert correlation(self.noise(keys, total), self.noise(keys, total + 1)) > 0.999

    def test_sums_of_one_round_released_in_a_loop_share_no_noise(self):
        keys = KeyRing.from_seed(None)
        noises = [
            self.noise(keys, torch.full((LAYERS.size,), float(i), dtype=torch.float64))
            for i in range(4)
        ]
        apart = np.corrcoef(torch.stack(noises).numpy()) - np.eye(4)
        assert np.abs(apart).max() < 5 / LAYERS.size**0.5

    def test_one_clients_sums_share_no_noise(self):
        """Also where a client's noise is added by `release` itself."""
        keys, plan = KeyRing.from_seed(None), plan_for(LOCAL)
        sums = [torch.full((LAYERS.size,), value, dtype=torch.float64) for value in (0.0, 1.0)]
        one, other = (release(total.clone(), plan, keys, 1, party=3) - total for total in sums)
        assert abs(correlation(one, other)) < 5 / LAYERS.size**0.5

    def test_one_sum_at_two_scales_shares_no_noise(self):
        keys, total = KeyRing.from_seed(None), torch.zeros(LAYERS.size, dtype=torch.float64)
        plans = [
            plan_for(CENTRAL),
            plan_for(replace(CENTRAL, noise_multiplier=2 * CENTRAL.noise_multiplier)),
        ]
        one, other = (release(total.clone(), plan, keys, 1) for plan in plans)
        assert abs(correlation(one, other)) < 5 / LAYERS.size**0.5

    def test_a_secret_ring_is_never_used_as_it_is(self):
        keys, plan = KeyRing.from_seed(None), plan_for(CENTRAL)
        rings = [Noising.of(torch.zeros(size), plan, keys, 1).ring for size in (3, 4)]
        assert len({ring.root for ring in (keys, *rings)}) == 3
        assert all(ring.secret for ring in rings)

    @pytest.mark.parametrize(("seed", "rows"), [(None, 2), (3, 1)])
    def test_a_round_made_again_with_other_contributions_is_another_release(
        self, tmp_path, seed, rows
    ):
        """Unseeded: other noise and another charge. Seeded: the same noise, which any reader of the
        seed can remove."""
        keys, plan = KeyRing.from_seed(seed), plan_for(CENTRAL)
        with Ledger(tmp_path / "ledger.sqlite", "test") as ledger:
            releaser = Releaser(keys, ledger, Numerics())
            for values in (update(1), update(1), update(2)):
                total = BoundedSum.empty(plan)
                total.add(values)
                releaser.mean(total, plan, 1)
            assert ledger.position() == rows


class TestRequestsToAClient:
    """Whole messages: what a server that asks again gets, and what the client's own record says."""

    @pytest.fixture
    def node(self):
        return _Node()

    def test_the_same_request_costs_nothing_more(self, node):
        assert np.array_equal(node.ask(), node.ask())
        assert node.records() == 1

    def test_the_same_request_after_the_data_changed_is_paid_for(self, node):
        first = node.ask()
        node.seed = 2
        second = node.ask()
        plan = plan_for(LOCAL)
        change = (bounded(update(2), plan) - bounded(update(1), plan)).numpy()
        assert np.abs(second - first - change).std() > 0.1 * float(plan.sigma.min())
        assert node.records() == 2

    def test_data_that_changes_without_end_runs_into_the_cap(self, node):
        for seed in range(1, 5):
            node.seed = seed
            node.ask()
        node.seed = 5
        with pytest.raises(PrivacyError, match="has made the 4 releases it agreed to"):
            node.ask()
        node.seed = 3
        node.ask()  # an earlier release once more
        assert node.records() == 4

    @pytest.mark.parametrize("change", ["model", "plan", "round"])
    def test_another_request_is_another_release(self, node, change):
        first = node.ask()
        facts = LOCAL.with_multiplier(2.0) if change == "plan" else LOCAL
        second = node.ask(
            model=float(change == "model"), facts=facts, round_=2 if change == "round" else 1
        )
        assert not np.array_equal(first, second)
        assert node.records() == 2


class _Node:
    """A client under local trust whose data can change."""

    def __init__(self) -> None:
        self.seed = 1
        work = LocalWork(
            self, LocalTraining(), lambda client: ClientData(torch.zeros(1, 1), torch.zeros(1))
        )
        consent = Consent(LOCAL)
        made = LayerwiseClient(
            work, MECHANISM, LAYERS, KeyRing.from_seed(None), AnyClient(), consent=consent
        )
        self.grid = LocalGrid.of(made)

    def updates(self, model, tasks):
        for _ in tasks:
            yield update(self.seed)

    def ask(self, model: float = 0.0, facts: RunFacts = LOCAL, round_: int = 1) -> np.ndarray:
        config = ConfigRecord(
            {wire.ROUND: round_, wire.CLIENTS: [4], wire.PLAN: plan_for(facts).to_json()}
        )
        arrays = ArrayRecord({wire.MODEL: Array(np.full(LAYERS.size, model, dtype=np.float32))})
        message = self.grid.create_message(
            RecordDict({wire.ARRAYS: arrays, wire.CONFIG: config}), "train", 2, "1"
        )
        (reply,) = self.grid.deliver([message])
        return reply.content.array_records[wire.ARRAYS][wire.SUM].numpy()

    def records(self) -> int:
        return len(self.grid._context.state.config_records[wire.RELEASES]["4.keys"])


def test_one_sum_under_two_divisions_into_layers_has_two_noises():
    """Their plans have one text. With one noise, two answers revealed the difference of two
    coordinates exactly."""
    facts, keys, total = CENTRAL, KeyRing.from_seed(None), torch.arange(5.0).double()
    guarantee, tables = plan_for(CENTRAL).guarantee, [{"a": 2, "b": 3}, {"a": 3, "b": 2}]
    plans = [
        ReleasePlan(LayerTable.from_sizes(one), [1.0, 1.0], [1.0, 5.0], facts, guarantee)
        for one in tables
    ]
    assert plans[0].to_json() == plans[1].to_json()
    apart = []
    for number in (1, 2, 3):  # draws of one round are within 0.02 with probability 0.007
        one, other = (release(total.clone(), plan, keys, round=number) - total for plan in plans)
        apart.append(abs(float(one[2] - other[3])))  # the first draw of the second layer, in both
    assert max(apart) > 0.02
    names = {Noising.of(total, plan, keys, round=1).name for plan in plans}
    assert len(names) == 2
