"""The strategy over in-process clients: sampling, denominators, order, noise, caps, failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedYogi
from scipy import stats

from fedlgm import wire
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms.layerwise_gaussian import FlatGaussian
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.plan import RunFacts, Sampling
from fedlgm.training.devices import Numerics
from strategies import CohortSampler, LayerwiseFedAvg, ServerOptimizer
from strategies.cohort import blocks
from strategies.server_optimizer import server_step

ALL = Sampling("poisson", 10, 1.0)


def ones(client: int) -> torch.Tensor:
    return torch.ones(4)


def zeros(client: int) -> torch.Tensor:
    return torch.zeros(20_000)


def spread(client: int) -> torch.Tensor:
    return torch.randn(9, generator=torch.Generator().manual_seed(client)) * 10.0 ** (
        client % 5 - 2
    )


class TestCohorts:
    def test_poisson_cohorts_are_binomial(self):
        sampler = CohortSampler(Sampling("poisson", 1000, 0.1), KeyRing(0))
        cohorts = [sampler.cohort(round_) for round_ in range(1, 301)]
        counts = np.array([len(cohort) for cohort in cohorts])
        assert abs(counts.mean() - 100) < 4 * math.sqrt(90 / 300)
        assert 60 < counts.var() < 125  # 90; a fixed cohort would have 0
        often = np.bincount(np.concatenate(cohorts), minlength=1000)
        assert (
            stats.kstest(
                often + np.random.default_rng(0).random(1000) - 0.5,
                stats.norm(30, math.sqrt(27)).cdf,
            ).pvalue
            > 1e-3
        )

    def test_fixed_cohorts_have_one_size(self):
        sampler = CohortSampler(Sampling("fixed", 50, 0.2), KeyRing(0))
        cohorts = [sampler.cohort(round_) for round_ in range(1, 101)]
        assert {len(np.unique(cohort)) for cohort in cohorts} == {10}
        assert len({tuple(cohort) for cohort in cohorts}) == 100

    def test_cohorts_depend_on_seed_and_round_only(self):
        sampler = CohortSampler(Sampling("poisson", 100, 0.3), KeyRing(4))
        assert (
            sampler.cohort(5).tolist()
            == CohortSampler(sampler.sampling, KeyRing(4)).cohort(5).tolist()
        )
        assert sampler.cohort(5).tolist() != sampler.cohort(6).tolist()
        assert (
            sampler.cohort(5).tolist()
            != CohortSampler(sampler.sampling, KeyRing(5)).cohort(5).tolist()
        )

    @pytest.mark.parametrize(
        "other",
        [
            ALL,
            Sampling("fixed", 10, 0.2),
            Sampling("poisson", 40, 0.2),
            Sampling("poisson", 10, 0.2, of="user"),
        ],
    )
    def test_cohorts_other_than_those_accounted_for_are_refused(self, federate, other):
        """Rounds of all clients would be charged as if one in five were drawn in secret."""
        made = federate(
            ones, {"a": 4}, sampling=Sampling("poisson", 10, 0.2), multiplier=2.0
        ).strategy
        with pytest.raises(
            ConfigError,
            match=r"poisson sampling of 10 participants at rate 0\.2: its sampler must draw",
        ):
            LayerwiseFedAvg(
                made.method,
                made.transcript,
                CohortSampler(other, KeyRing(0)),
                made.optimizer,
                made.releaser,
                made.nodes,
            )

    @pytest.mark.parametrize("drawn", [[0, 3, 3], [-1, 2], [9, 10]])
    def test_no_client_contributes_twice(self, federate, drawn):
        """Each is charged for one bounded contribution."""

        class Own(CohortSampler):
            def cohort(self, round, exclude=frozenset()):
                return np.array(drawn)

        made = federate(ones, {"a": 4}, sampling=Sampling("poisson", 10, 0.2), multiplier=2.0)
        made.strategy.sampler = Own(Sampling("poisson", 10, 0.2), KeyRing(0))
        with pytest.raises(PrivacyError, match="each of 10 participants only once"):
            made.run(1)

    def test_dropouts_leave_the_draw_alone(self):
        steady, shaky = (
            CohortSampler(Sampling("poisson", 500, 0.5), KeyRing(1), rate) for rate in (0.0, 0.4)
        )
        drawn = shaky.cohort(1)
        assert drawn.tolist() == steady.cohort(1).tolist()
        present = shaky.present(1, drawn)
        assert set(present) < set(drawn)
        assert len(present) / len(drawn) == pytest.approx(0.6, abs=0.12)

    def test_blocks_cover_the_cohort_once(self):
        cohort = np.array([1, 4, 5, 8, 9])
        work = np.arange(10) % 4
        cut = blocks(cohort, 2, work)
        assert sorted(np.concatenate(cut).tolist()) == cohort.tolist()
        assert [len(block) for block in cut] == [2, 2, 1]
        assert blocks(np.array([], dtype=np.int64), 2) == []

    def test_longest_clients_come_first(self):
        """So that a block holds equally long ones, and what is left at the end of a round is
        short."""
        work = np.array([3, 1, 4, 1, 5, 9, 2, 6])
        cut = blocks(np.arange(8), 3, work)
        assert work[np.concatenate(cut)].tolist() == sorted(work, reverse=True)
        assert np.concatenate(blocks(np.arange(8), 3)).tolist() == list(range(8))


def test_the_denominator_is_public(federate):
    federation = federate(ones, {"a": 4}, mechanism="none", sampling=Sampling("poisson", 40, 0.25))
    federation.run(5)
    for record, mean in zip(federation.records, federation.means, strict=True):
        assert mean.tolist() == pytest.approx([record.cohort / 10] * 4)
    assert len({record.cohort for record in federation.records}) > 1


def test_empty_cohorts_release_noise_and_are_charged(federate):
    federation = federate(ones, {"a": 4}, sampling=Sampling("poisson", 10, 1e-9), multiplier=2.0)
    federation.run(2)
    assert [record.cohort for record in federation.records] == [0, 0]
    assert all(mean.abs().min() > 0 for mean in federation.means)
    assert len(list(federation.ledger.charges())) == 2


def test_clients_without_data_are_counted_and_send_nothing(federate):
    everybody = federate(ones, {"a": 4}, mechanism="none", sampling=ALL, owner="a")
    some = federate(
        ones, {"a": 4}, mechanism="none", sampling=ALL, owner="b", empty=frozenset({0, 3, 7})
    )
    assert everybody.run(1).tolist() == pytest.approx([1.0] * 4)
    assert some.run(1).tolist() == pytest.approx([0.7] * 4)


def test_clients_without_data_add_their_noise_under_local_trust(federate):
    """Else the spread of what they send would tell who has data."""
    setting = {"sampling": ALL, "trust": "local", "relation": "replace-one"}
    spreads = {}
    for nobody in (frozenset(), frozenset(range(10))):
        federation = federate(zeros, {"a": 20_000}, empty=nobody, owner=str(len(nobody)), **setting)
        federation.run(1)
        spreads[len(nobody)] = float(federation.means[0].std())
        assert spreads[len(nobody)] * 10 == pytest.approx(
            math.sqrt(10) * federation.records[0].plan.sigma[0], rel=0.03
        )
    assert spreads[10] == pytest.approx(spreads[0], rel=0.04)


def test_clients_with_nan_count_as_zero_and_are_reported(federate):
    federation = federate(
        lambda c: torch.full((4,), math.nan) if c in (2, 5) else torch.ones(4),
        {"a": 4},
        mechanism="none",
        sampling=ALL,
    )
    assert federation.run(1).tolist() == pytest.approx([0.8] * 4)
    assert federation.records[0].discarded == 2


def test_under_local_trust_nobody_learns_who_failed(federate):
    federation = federate(
        lambda c: torch.full((4,), math.nan),
        {"a": 4},
        sampling=ALL,
        relation="replace-one",
        trust="local",
    )
    federation.run(1)
    assert federation.records[0].discarded == 0
    assert torch.isfinite(federation.means[0]).all()


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_server_optimizers(federate, name):
    federation = federate(
        spread, {"a": 9}, mechanism="none", sampling=ALL, optimizer=ServerOptimizer(name, 0.3, 0.8)
    )
    found = federation.run(3)
    weights = torch.nn.Parameter(torch.zeros(9))
    reference = {
        "sgd": lambda: torch.optim.SGD([weights], lr=0.3),
        "momentum": lambda: torch.optim.SGD([weights], lr=0.3, momentum=0.8),
        "adam": lambda: torch.optim.Adam([weights], lr=0.3, eps=1e-3),
    }[name]()
    for mean in federation.means:
        weights.grad = -mean
        reference.step()
    assert found.tolist() == pytest.approx(weights.tolist(), rel=1e-5)


def test_yogi_steps_as_flower_s(federate):
    federation = federate(
        spread,
        {"a": 9},
        mechanism="none",
        sampling=ALL,
        optimizer=server_step("yogi", lr=0.3, momentum=0.0),
    )
    found = federation.run(3)
    theirs = FedYogi(eta=0.3)
    weights = {"w": np.zeros(9)}
    for mean in federation.means:
        theirs.current_arrays = weights
        trained = ArrayRecord({"w": Array(weights["w"] + mean.numpy())})
        content = RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})})
        reply = Message(content, metadata=Metadata(1, "a", 2, 1, "b", "", 0.0, 9e9, "train"))
        weights = {"w": theirs.aggregate_train(1, [reply])[0]["w"].numpy()}
    assert found.tolist() == pytest.approx(weights["w"].tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("trust", "relation"), [("central", "add-remove"), ("local", "replace-one")]
)
@pytest.mark.parametrize("mechanism", ["snr-consistent", "laplace-inid"])
def test_released_noise_has_the_planned_scale(federate, mechanism, trust, relation):
    """Zero updates: what comes out is the noise, of one server or of ten clients."""
    federation = federate(
        lambda client: torch.zeros(60_000),
        {"a": 20_000, "b": 40_000},
        mechanism=mechanism,
        multiplier=1.7,
        sampling=ALL,
        trust=trust,
        relation=relation,
    )
    federation.run(1)
    plan = federation.records[0].plan
    draws = 10 if trust == "local" else 1
    factor = math.sqrt(2) if plan.family == "laplace" else 1.0
    for part, sigma in zip(plan.layers.split(federation.means[0]), plan.sigma, strict=True):
        planned = factor * sigma * math.sqrt(draws) / plan.denominator
        # Standard error of a standard deviation: 0.5 % (Gaussian) or 0.8 % (Laplace) of 20,000
        # values.
        assert float(part.double().std()) == pytest.approx(planned, rel=0.035)
        assert abs(float(part.double().mean())) < 5 * planned / math.sqrt(len(part))


def test_layers_that_are_not_released_stay_where_they_are(federate):
    federation = federate(
        lambda c: torch.ones(7), {"a": 3, "b": 4}, mechanism="max-snr-sum", sampling=ALL
    )
    model = federation.run(1)
    assert not model[3:].any()
    assert model[:3].all()


@pytest.mark.parametrize("threads", [1, 2])
def test_plans_are_made_with_the_recipes_threads(federate, monkeypatch, threads):
    """Sums over a large layer depend on how many threads split it, and under local trust the noise
    on the plan."""
    seen = []
    made = FlatGaussian.plan

    def watched(self, *arguments):
        seen.append(torch.get_num_threads())
        return made(self, *arguments)

    monkeypatch.setattr(FlatGaussian, "plan", watched)
    before = torch.get_num_threads()
    federate(ones, {"a": 4}, mechanism="gaussian", sampling=ALL, numerics=Numerics(threads)).run(1)
    assert seen == [threads]
    assert torch.get_num_threads() == before


@dataclass(frozen=True)
class Pausing(FlatGaussian):
    """Releases in rounds 2 and 4 only."""

    def plan(self, layers, facts, transcript):
        plan = super().plan(layers, facts, transcript)
        if transcript.rounds in (1, 3):
            return plan
        return replace(plan, clip=np.zeros(1), sigma=np.full(1, math.inf), released=None)


@pytest.mark.parametrize(
    ("trust", "relation"), [("central", "add-remove"), ("local", "replace-one")]
)
def test_a_skipped_round_is_charged_once_anything_was_released(federate, trust, relation):
    """That it is skipped may follow from what was released; before that it follows from public
    facts."""
    federation = federate(
        ones, {"a": 4}, mechanism=Pausing("gaussian"), sampling=ALL, trust=trust, relation=relation
    )
    federation.run(5)
    charges = list(federation.ledger.charges())
    assert sorted({charge.round for charge in charges}) == [2, 3, 4, 5]
    assert len({str(charge.event) for charge in charges}) == 1
    models = [record.plan.size for record in federation.records]
    assert models == [0, 4, 0, 4, 0]


class TestParticipationCap:
    OPTIONS: ClassVar = {"trust": "local", "relation": "replace-one", "max_participations": 2}

    def test_no_client_exceeds_it_and_the_records_say_so(self, federate):
        federation = federate(ones, {"a": 4}, sampling=Sampling("poisson", 10, 0.6), **self.OPTIONS)
        federation.run(8)
        counts = federation.ledger.participations()
        assert set(counts.values()) == {2}
        assert sum(record.cohort for record in federation.records) == 20
        assert federation.records[-1].cohort == 0

    def test_a_round_done_again_with_the_same_noise_has_the_same_clients(self, federate):
        """Its charges are on disk already; they are this very round's, not a participation more."""
        whole = federate(ones, {"a": 4}, sampling=ALL, owner="whole", **self.OPTIONS)
        expected = whole.run(2)
        cut = federate(ones, {"a": 4}, sampling=ALL, owner="cut", **self.OPTIONS)
        cut.run(1)
        checkpoint = cut.strategy.transcript
        cut.run(1)
        cut.ledger.close()
        again = federate(
            ones, {"a": 4}, sampling=ALL, owner="cut", transcript=checkpoint, **self.OPTIONS
        )
        assert torch.equal(again.run(1), expected)
        assert set(again.ledger.participations().values()) == {2}

    def test_a_round_done_again_with_fresh_noise_counts_twice(self, federate):
        cut = federate(ones, {"a": 4}, sampling=ALL, owner="cut", **self.OPTIONS)
        checkpoint = cut.strategy.transcript
        cut.run(1)
        cut.ledger.close()
        again = federate(
            ones, {"a": 4}, sampling=ALL, owner="cut", transcript=checkpoint, seed=9, **self.OPTIONS
        )
        again.run(3)
        assert [record.cohort for record in again.records] == [10, 0, 0]
        assert set(again.ledger.participations().values()) == {2}


class TestAskedTwice:
    """A server that resumes, errs or cheats may ask a client for the same round again."""

    @staticmethod
    def ask(federation, model: float = 0.0, facts: RunFacts | None = None) -> torch.Tensor:
        method, grid = federation.strategy.method, federation.grid
        plan = replace(method, facts=facts or method.facts).plan(federation.strategy.transcript)
        arrays = ArrayRecord(
            {wire.MODEL: Array(np.full(method.layers.size, model, dtype=np.float32))}
        )
        config = ConfigRecord({wire.ROUND: 1, wire.CLIENTS: [4], wire.PLAN: plan.to_json()})
        content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: config})
        message = grid.create_message(content, "train", grid.get_node_ids()[0], "1")
        (reply,) = grid.deliver([message])
        return torch.from_numpy(reply.content.array_records[wire.ARRAYS][wire.SUM].numpy())

    @pytest.fixture
    def federation(self, federate):
        return federate(spread, {"a": 9}, sampling=ALL, trust="local", relation="replace-one")

    def test_other_data_has_other_noise(self, federate):
        """The same noise on two data sets would leave the difference of the two."""
        moved = [torch.zeros(9), torch.full((9,), 0.01)]
        setting = {"sampling": ALL, "trust": "local", "relation": "replace-one"}
        one, other = (
            self.ask(federate(lambda client, u=u: u, {"a": 9}, owner=str(n), **setting))
            for n, u in enumerate(moved)
        )
        assert (one - other - (moved[0] - moved[1])).abs().min() > 1e-3

    def test_the_same_question_has_the_same_answer(self, federation):
        assert torch.equal(self.ask(federation), self.ask(federation))

    def test_another_model_has_other_noise(self, federation):
        """The same noise on two updates would cancel in their difference."""
        assert not torch.equal(self.ask(federation), self.ask(federation, model=1.0))

    def test_another_plan_has_other_noise(self, federation):
        """The same noise at two scales would cancel in a weighted difference."""
        facts = federation.strategy.method.facts
        louder, silent = (facts.with_multiplier(m) for m in (3 * facts.noise_multiplier, 1e-3))
        signal = self.ask(federation, facts=silent)
        ratios = (self.ask(federation, facts=louder) - signal) / (self.ask(federation) - signal)
        assert (ratios - 3).abs().min() > 0.05
