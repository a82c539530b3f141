"""Noise correlated over rounds, as a federation draws it: its law, its charges, and what a repeated
round costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hostile import CLIENTS, NodeGrid
from scipy import stats

from fedlgm.errors import ConfigError, PrivacyError, RunError
from fedlgm.mechanisms import get
from fedlgm.mechanisms.method import Method
from fedlgm.noise import correlation
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import Noising, release
from fedlgm.noise.run_noise import NoiseRings, RunNoise
from fedlgm.planning import clipping
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.whole_run import whole_run
from fedlgm.training.devices import Numerics
from strategies import CohortSampler, LayerwiseFedAvg, OneNodePerClient

ROUNDS, GROUPS, SIZES = 8, 4, {"a": 9000, "b": 3000}
CYCLE = Sampling("cyclic", 40, 0.25, GROUPS)
BANDED = correlation.get("banded", ROUNDS, bands=GROUPS)


def zeros(client: int) -> torch.Tensor:
    return torch.zeros(sum(SIZES.values()))


def drawn(federate, noise, **options) -> np.ndarray:
    """Noise of a run whose clients send zeros, in units of sigma: [T, D]."""
    options = {"sampling": CYCLE, "multiplier": 2.0, "rounds": ROUNDS, "seed": 11} | options
    federation = federate(zeros, SIZES, noise=noise, **options)
    federation.run(ROUNDS)
    plan = federation.records[0].plan
    rows = torch.stack(federation.means).double().numpy() * plan.denominator
    return rows / np.repeat(plan.sigma, list(SIZES.values()))


def p_value(noise: np.ndarray, claimed: np.ndarray) -> float:
    """Of the hypothesis that columns of `noise` [T, D] are independent N(0, claimed).

    Whitened by the claimed covariance the entries are independent N(0, 1): T mean squares and T (T
    - 1) / 2 mean products, each tested; the smallest p-value times their number.
    """
    white = np.linalg.solve(np.linalg.cholesky(claimed), noise)
    size = white.shape[1]
    squares = [
        2 * stats.chi2.sf(s, size) if s > size else 2 * stats.chi2.cdf(s, size)
        for s in (white**2).sum(axis=1)
    ]
    products = (white @ white.T)[np.triu_indices(len(white), 1)] / np.sqrt(size)
    values = [*squares, *(2 * stats.norm.sf(np.abs(products)))]
    return min(1.0, min(values) * len(values))


def covariance(noise: correlation.Correlation) -> np.ndarray:
    inverse = noise.inverse()
    return inverse @ inverse.T


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["banded", "square-root", "blt"])
def test_the_noise_of_a_run_has_the_law_that_is_accounted_for(federate, name, backend):
    """Covariance over rounds s^2 (C^T C)^-1 in every layer."""
    noise = correlation.get(
        name, ROUNDS, **({"min_separation": GROUPS} if name == "blt" else {"bands": GROUPS})
    )
    found = drawn(federate, noise, numerics=Numerics(noise_backend=backend))
    assert p_value(found, covariance(noise)) > 1e-4
    for layer in (found[:, :9000], found[:, 9000:]):
        assert p_value(layer, covariance(noise)) > 1e-4


def test_a_wrong_band_is_seen(federate):
    """Power: the same test rejects one coefficient that is 8 % off, one band fewer, and independent
    noise."""
    found = drawn(federate, BANDED)
    off = BANDED.coefficients.copy()
    off[1] *= 1.08
    for wrong in (
        correlation.Correlation("own", ROUNDS, off),
        correlation.get("banded", ROUNDS, bands=GROUPS - 1),
        correlation.get("identity", ROUNDS),
    ):
        assert p_value(found, covariance(wrong)) < 1e-4


def test_layers_are_independent(federate):
    found = drawn(federate, BANDED)
    white = BANDED.matrix() @ found
    first, second = white[:, :3000], white[:, 9000:]
    products = (first * second).sum() / np.sqrt(first.size)
    assert abs(products) < 4
    lagged = [
        (first[t] * second[u]).sum() / np.sqrt(3000) for t in range(ROUNDS) for u in range(ROUNDS)
    ]
    assert max(map(abs, lagged)) < 4.6


def test_independent_noise_under_a_schedule_is_drawn_as_ever(federate):
    """Restricted participation alone changes no noise: the bits are those of a run that everybody
    takes part in."""
    one = drawn(federate, None, owner="a")
    other = drawn(federate, None, sampling=Sampling("poisson", 10, 1.0), owner="b")
    assert np.array_equal(one, other)
    assert p_value(one, np.eye(ROUNDS)) > 1e-4


def test_a_round_s_figures_are_those_of_its_own_noise(federate):
    federation = federate(zeros, SIZES, noise=BANDED, sampling=CYCLE, multiplier=2.0, rounds=ROUNDS)
    federation.run(ROUNDS)
    for position, (record, mean) in enumerate(
        zip(federation.records, federation.means, strict=True)
    ):
        norms = [float(part.double().norm()) for part in mean.split(list(SIZES.values()))]
        assert norms == pytest.approx(record.plan.noise_norms, rel=0.1)
        assert record.plan.round_sigma == pytest.approx(
            record.plan.sigma * BANDED.noise_std()[position]
        )
        assert record.plan.snr == pytest.approx(
            record.plan.clip**2 / (np.array(list(SIZES.values())) * record.plan.round_sigma**2)
        )


@pytest.mark.parametrize(
    "sampling",
    [CYCLE, Sampling("min-separation", 40, 0.25, 4), Sampling("grouped-poisson", 40, 0.1, 4)],
)
def test_what_is_charged_is_the_run(federate, sampling):
    relation = "zero-out" if sampling.scheme == "min-separation" else "add-remove"
    federation = federate(
        zeros,
        SIZES,
        noise=BANDED,
        sampling=sampling,
        relation=relation,
        multiplier=2.0,
        rounds=ROUNDS,
    )
    federation.run(ROUNDS)
    spent = federation.ledger.epsilon(1e-5)
    if sampling.amplifies:
        expected = composed_epsilon([(gaussian_event(2.0, 0.4), 2)], 1e-5)
    else:
        expected = composed_epsilon([(gaussian_event(2.0 / 2**0.5), 1)], 1e-5)
    assert spent == pytest.approx(expected, rel=1e-6)
    assert spent >= expected * (1 - 1e-12)
    assert [charge.round for charge in federation.ledger.charges()] == list(range(1, ROUNDS + 1))
    facts = federation.strategy.method.facts
    run, least = whole_run(facts), facts.least_multiplier
    for through in range(1, ROUNDS + 1):
        assert federation.ledger.epsilon(1e-5, through=through) == composed_epsilon(
            run.events(least, through), 1e-5
        )


@pytest.mark.parametrize(
    "other",
    [
        Sampling("poisson", 40, 0.25),
        Sampling("cyclic", 40, 0.5, 2),
        Sampling("min-separation", 40, 0.25, 4),
    ],
)
def test_cohorts_by_another_schema_are_refused(federate, other):
    made = federate(
        zeros, SIZES, noise=BANDED, sampling=CYCLE, multiplier=2.0, rounds=ROUNDS
    ).strategy
    parts = (
        made.method,
        made.transcript,
        CohortSampler(other, KeyRing(0)),
        made.optimizer,
        made.releaser,
        made.nodes,
    )
    with pytest.raises(
        ConfigError, match=r"cyclic sampling of 40 .* with 4 rounds .* must draw by facts.sampling"
    ):
        LayerwiseFedAvg(*parts)


def test_a_node_per_client_draws_the_same(federate):
    """The server's noise and cohorts do not depend on who serves whom."""
    few = Sampling("cyclic", CLIENTS, 0.25, GROUPS)
    block = drawn(federate, BANDED, owner="blocks", sampling=few)
    nodes = OneNodePerClient(wait=0.2, simulated=True)
    assert np.array_equal(
        drawn(federate, BANDED, owner="nodes", nodes=nodes, grid=NodeGrid, sampling=few), block
    )


def test_what_is_noise_in_a_released_mean_is_known(federate):
    """Adaptive bounds take the noise off: by the round's own noise, of which a mean of zeros is
    made alone."""
    federation = federate(zeros, SIZES, noise=BANDED, sampling=CYCLE, multiplier=2.0, rounds=ROUNDS)
    federation.run(ROUNDS)
    for record, mean in zip(federation.records, federation.means, strict=True):
        assert clipping.signal_share(mean, record.plan) == pytest.approx(np.zeros(2), abs=0.06)
        assert (clipping.released_norms(mean, record.plan) < 0.25 * record.plan.noise_norms).all()
        plain = replace(record.plan, facts=replace(record.plan.facts, noise=None))
        assert (
            clipping.signal_share(mean, plain) > 0.2
        ).all()  # power: the noise scale of z is far off


class TestRepeated:
    """A round released again with other noise is one more row of C."""

    def charged(self, federate, values, sampling=CYCLE):
        federation = federate(
            zeros, SIZES, noise=BANDED, sampling=sampling, multiplier=2.0, rounds=ROUNDS
        )
        releaser = federation.strategy.releaser
        object.__setattr__(releaser, "keys", KeyRing(5, secret=True))
        start = Transcript.start(torch.zeros(12000))
        for round_, value in values:
            transcript = Transcript(round_ - 1, start.models)
            total = type(
                "Sum", (), {"total": torch.full((12000,), float(value), dtype=torch.float64)}
            )()
            releaser.mean(total, federation.strategy.method.plan(transcript), round_)
        return federation

    def test_the_same_release_again_is_one(self, federate):
        federation = self.charged(federate, [(1, 0), (2, 0), (2, 0), (1, 0), (2, 0)])
        assert len(list(federation.ledger.charges())) == 2

    @pytest.mark.parametrize("sampling", [CYCLE, Sampling("grouped-poisson", 40, 0.1, 4)])
    def test_another_one_costs_a_row(self, federate, sampling):
        federation = self.charged(federate, [(1, 0), (2, 0), (2, 1), (2, 0), (2, 1)], sampling)
        charges = list(federation.ledger.charges())
        facts = federation.strategy.method.facts
        run, least = whole_run(facts), facts.least_multiplier
        assert sorted(str(charge.event) for charge in charges) == sorted(
            map(str, [run.event(0, least), run.event(1, least), run.repeated_event(1, least)])
        )
        moved = BANDED.row_bound(1, GROUPS)
        assert run.repeated_event(1, 2.0).noise_multiplier == pytest.approx(2.0 / moved, rel=1e-6)

    def test_the_same_sum_after_another_past_is_another_release(self, federate):
        """Were z the same, the two releases of round 2 would differ by what round 1 held, without
        noise."""
        federation = self.charged(federate, [(1, 0), (2, 7), (1, 1), (2, 7), (2, 7)])
        keys = federation.ledger.noise_keys()
        assert sorted(round_ for round_, _, _ in keys) == [1, 1, 2, 2]

    def test_a_past_that_comes_back_is_the_same_release(self, federate):
        federation = self.charged(federate, [(1, 0), (2, 7), (1, 1), (2, 7), (1, 0), (2, 7)])
        assert sorted(round_ for round_, _, _ in federation.ledger.noise_keys()) == [1, 1, 2, 2]


class TestReplay:
    layers = LayerTable.from_sizes(SIZES)
    facts = RunFacts(2.0, CYCLE, rounds=ROUNDS, noise=BANDED)

    def noisy(self, rounds, run_noise, keys=None, backend="cpu"):
        method = Method(get("snr-consistent"), self.layers, self.facts)
        found = []
        for round_ in rounds:
            plan = method.plan(Transcript(round_ - 1, (torch.zeros(self.layers.size),)))
            total = torch.full((plan.size,), float(round_), dtype=torch.float64)
            found.append(
                release(
                    total, plan, keys or KeyRing(3), round_, backend=backend, run_noise=run_noise
                )
            )
        return found

    @pytest.mark.parametrize("backend", ["cpu", "torch"])
    @pytest.mark.parametrize("secret", [False, True])
    def test_any_round_on(self, secret, backend):
        keys, rings = KeyRing(3, secret), NoiseRings()
        whole = self.noisy(range(1, 9), RunNoise(rings), keys, backend)
        for start in (1, 2, 5, 8):
            rest = self.noisy(range(start, 9), RunNoise(rings), keys, backend)
            assert all(map(torch.equal, rest, whole[start - 1 :]))
        noise = RunNoise(rings)  # in any order in one process
        again = self.noisy([3, 4, 2, 8], noise, keys, backend)
        assert all(map(torch.equal, again, [whole[2], whole[3], whole[1], whole[7]]))

    def test_a_past_that_is_not_known_is_refused(self):
        with pytest.raises(RunError, match="noise of round 1 cannot be drawn again"):
            self.noisy([3], RunNoise(), KeyRing(3, secret=True))

    def test_noise_without_its_past_is_refused(self):
        with pytest.raises(PrivacyError, match="pass the run's noise"):
            self.noisy([1], None)

    def test_another_round_s_plan_is_refused(self):
        plan = Method(get("snr-consistent"), self.layers, self.facts).plan(
            Transcript(1, (torch.zeros(self.layers.size),))
        )
        with pytest.raises(PrivacyError, match="not for round 1"):
            release(
                torch.zeros(plan.size, dtype=torch.float64),
                plan,
                KeyRing(3),
                1,
                run_noise=RunNoise(),
            )

    def test_a_layer_that_pauses_keeps_its_noise_going(self):
        """Noise is drawn for all layers in every round, so what a plan leaves out shifts nobody
        else's."""
        method = Method(get("snr-consistent"), self.layers, self.facts)
        run_noise, seen = RunNoise(), []
        for round_ in (1, 2, 3):
            plan = method.plan(Transcript(round_ - 1, (torch.zeros(self.layers.size),)))
            if round_ == 2:
                sigma = plan.sigma.copy()
                sigma[0] = np.inf
                plan = replace(plan, sigma=sigma, released=np.array([False, True]))
            total = torch.zeros(plan.size, dtype=torch.float64)
            seen.append(release(total, plan, KeyRing(3), round_, run_noise=run_noise))
        whole = []
        run_noise = RunNoise()
        for round_ in (1, 2, 3):
            plan = method.plan(Transcript(round_ - 1, (torch.zeros(self.layers.size),)))
            total = torch.zeros(plan.size, dtype=torch.float64)
            whole.append(release(total, plan, KeyRing(3), round_, run_noise=run_noise))
        assert torch.equal(seen[1], whole[1][9000:])
        assert torch.equal(seen[2], whole[2])

    @pytest.mark.parametrize("secret", [False, True])
    def test_rounds_that_release_nothing_keep_the_noise_going(self, secret):
        method = Method(get("ladp", threshold=0.5, estimate=False), self.layers, self.facts)
        models = {
            empty: torch.full((self.layers.size,), float(not empty)) for empty in (False, True)
        }
        keys, found = KeyRing(3, secret), {}
        for skipped in ((), (3, 4), (1, 6)):
            run_noise, seen = RunNoise(), {}
            for round_ in (1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7):
                plan = method.plan(Transcript(round_ - 1, (models[round_ in skipped],)))
                assert (plan.size == 0) == (round_ in skipped)
                ring = keys.derive(bytes([round_])) if secret else keys
                total = torch.zeros(plan.size, dtype=torch.float64)
                noisy = Noising(
                    total, plan, ring, round_, source=run_noise
                ).add_()  # the same rings for every past
                assert round_ not in seen or torch.equal(seen[round_], noisy)
                seen[round_] = noisy
            found[skipped] = seen
        for skipped, seen in found.items():
            for round_ in set(seen) - set(skipped):
                assert torch.equal(seen[round_], found[()][round_])

    def test_a_round_that_is_left_out_instead_changes_what_follows(self):
        """Released, then made again without a release and by another ring: what follows has the
        last ring's noise."""
        rings, one, other = NoiseRings(), KeyRing(3, secret=True), KeyRing(4, secret=True)
        run_noise = RunNoise(rings)
        self.noisy([1, 2, 3], run_noise, one)
        run_noise.skip(2, other)
        assert torch.equal(
            self.noisy([3], run_noise, one)[0], self.noisy([3], RunNoise(rings), one)[0]
        )
        with pytest.raises(RunError, match="noise of round 1 cannot be drawn again"):
            RunNoise().skip(2, one)
