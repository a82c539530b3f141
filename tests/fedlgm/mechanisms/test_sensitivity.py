"""For every sound mechanism: one client moves the whitened sum by at most 1 / sigma_eff, and moves
no plan at all.

The probe looks at the exact sum with the noise off (deterministic, no statistics); the purity test
runs a whole round through strategy and clients on two neighbouring populations. Both must catch
MedClip as it was published."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum, DeviceSum
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.training import LocalTraining

SIZES = {"a": 12, "b": 1, "c": 300, "d": 40}
EPSILON, DELTA, ROUNDS = 1.0, 1e-5, 3
SETTINGS = {
    "central": ("add-remove", Sampling("poisson", 12, 0.5), "central"),
    "fixed": ("replace-one", Sampling("fixed", 12, 0.5), "central"),
    "local": ("replace-one", Sampling("poisson", 12, 0.5), "local"),
}
LOCAL_ONLY = "client-ladp"  # tests/clients/test_own_plans.py has what its clients release
CASES: list[tuple[str, dict]] = [
    (name, {}) for name in mechanisms.names() if name not in ("none", LOCAL_ONLY)
]
CASES += [
    ("snr-consistent", {"clip": "med", "norms": norms})
    for norms in ("public", "stale", "quantile", "shares")
]
CASES += [
    ("ladp", {"score": "kl"}),
    ("ladp", {"threshold": 0.5}),
]
IDS = [" ".join([name, *(f"{k}={v}" for k, v in options.items())]) for name, options in CASES]


class Probe:
    """A mechanism in a setting, with a transcript of one past round."""

    def __init__(
        self, name: str, options: dict, setting: str = "central", calibrated: bool = False
    ) -> None:
        relation, sampling, trust = SETTINGS[setting]
        training = LocalTraining(gradient_clip=1.0)
        self.method = mechanisms.get(name, **options)
        self.layers = self.method.table(LayerTable.from_sizes(SIZES))
        facts = RunFacts(1.3, sampling, relation, trust, ROUNDS, EPSILON, DELTA, training=training)
        self.facts = facts.with_multiplier(self.method.calibrate(facts)) if calibrated else facts
        generator = torch.Generator().manual_seed(1)
        model = torch.randn(self.layers.size, generator=generator)
        start = Transcript.start(model)
        first = self.method.plan(self.layers, self.facts, start)
        mean = torch.randn(first.size, generator=generator) * 0.05
        later = start.extend(
            model + 0.1 * torch.randn(self.layers.size, generator=generator), mean, first
        )
        self.transcripts = [start, later]

    def batch(self, seed: int, scale: float) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [scale * torch.randn(self.layers.size, generator=generator) for _ in range(6)]

    def canaries(self) -> list[torch.Tensor]:
        """Random and adversarial contributions: huge, one layer only, one coordinate, zero, not
        finite."""
        size, found = self.layers.size, []
        for scale in (1e-6, 1.0, 1e6, 1e15):
            found.append(scale * torch.randn(size, generator=torch.Generator().manual_seed(7)))
        for scale in (1.0, 1e15):
            for low, high in zip(self.layers.offsets[:-1], self.layers.offsets[1:], strict=True):
                only = torch.zeros(size)
                only[low:high] = scale
                found.append(only)
        corner = torch.zeros(size)
        corner[0] = -1e9
        return [
            *found,
            corner,
            torch.zeros(size),
            torch.full((size,), math.nan),
            torch.full((size,), math.inf),
        ]


def bounded_sum(plan, updates) -> torch.Tensor:
    block = BoundedSum.empty(plan)
    for update in updates:
        block.add(update)
    return block.total.double()


def whitened(plan, difference: torch.Tensor) -> float:
    scales = torch.cat(
        [torch.full((part.size,), part.sigma, dtype=torch.float64) for part in plan.parts]
    )
    return float(
        torch.linalg.vector_norm(difference / scales, 2 if plan.family == "gaussian" else 1)
    )


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_one_client_moves_the_whitened_sum_by_no_more_than_is_accounted_for(name, options):
    probe = Probe(name, options)
    for transcript in probe.transcripts:
        plan = probe.method.plan(probe.layers, probe.facts, transcript)
        assert plan.guarantee.status == "proven"
        assert (plan.guarantee.relation, plan.guarantee.trust) == (
            probe.facts.relation,
            probe.facts.trust,
        )
        limit, canaries = (1 + 1e-6) / plan.effective_multiplier, probe.canaries()
        for scale in (1e-3, 1e3):
            others = probe.batch(3, scale)
            before = bounded_sum(plan, others)
            # Added first, so that the others' sums are rounded differently too.
            moved = [whitened(plan, bounded_sum(plan, [x, *others]) - before) for x in canaries]
            assert max(moved) <= limit
            # Power: the limit is reached, or the noise would be too much.
            # With queries their bounds cannot all be reached at once.
            assert max(moved) >= (0.6 if plan.queries else 0.9) / plan.effective_multiplier
        replaced = [
            whitened(plan, bounded_sum(plan, [x]) - bounded_sum(plan, [-x])) for x in canaries
        ]
        assert max(replaced) <= 2 * limit


def _calibrated() -> list[Any]:
    """Every case in every setting; `dpa` calibrates as `time-varying` does, whose schedules take
    seconds."""
    return [
        pytest.param(LOCAL_ONLY, {}, "local", id=f"{LOCAL_ONLY}-local"),
        *_in_every_setting(),
    ]


def _in_every_setting() -> list[Any]:
    return [
        pytest.param(
            name, options, setting, id=f"{id_}-{setting}", marks=pytest.mark.slow if again else ()
        )
        for (name, options), id_ in zip(CASES, IDS, strict=True)
        for setting in SETTINGS
        for again in [name == "dpa" and setting != "local"]
    ]


@pytest.mark.parametrize(("name", "options", "setting"), _calibrated())
def test_all_rounds_together_stay_within_the_budget(name, options, setting):
    probe = Probe(name, options, setting, calibrated=True)
    events = []
    for round_ in range(ROUNDS):
        past = probe.transcripts[min(round_, 1)]
        transcript = Transcript(round_, past.models, past.mean, past.plan)
        events.append((probe.method.plan(probe.layers, probe.facts, transcript).event, 1))
    spent = composed_epsilon(events, DELTA)
    assert spent <= EPSILON
    adaptive = name == "ladp" and "threshold" in options  # may release less
    assert spent >= 0.97 * EPSILON or adaptive


def one_round(federate, probe: Probe, transcript: Transcript, updates, owner: str):
    """The plan of one round in which every client takes part."""
    federation = federate(
        lambda client: updates[client],
        SIZES,
        mechanism=probe.method,
        transcript=transcript,
        owner=owner,
        multiplier=probe.facts.noise_multiplier,
        sampling=Sampling("poisson", 6, 1.0),
        rounds=ROUNDS,
    )
    federation.run(1)
    return federation.records[0].plan


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_no_client_moves_a_plan(federate, name, options):
    probe = Probe(name, options)
    ours = probe.batch(3, 1.0)
    theirs = [*ours[:-1], 1e3 * ours[-1]]
    for number, transcript in enumerate(probe.transcripts):
        one = one_round(federate, probe, transcript, ours, f"one{number}")
        other = one_round(federate, probe, transcript, theirs, f"other{number}")
        assert one.to_json() == other.to_json()
        assert one.denominator == other.denominator == 6.0


class TestPublishedMedClip:
    """Bounds and noise from medians of private norms: both tests must fail for it."""

    # Layer norms (a, 1) or (b, 1) with a = 1, b = 3; the odd client decides where the median lies.
    ONE, THREE = torch.tensor([1.0, 1.0]), torch.tensor([3.0, 1.0])

    @pytest.fixture
    def plans(self, federate):
        method = mechanisms.get("uniform", clip="med", variant="published", bound=0.5)
        populations = ([self.ONE] * 3 + [self.THREE] * 4, [self.ONE] * 4 + [self.THREE] * 3)
        found = []
        for number, updates in enumerate(populations):
            federation = federate(
                lambda client, updates=updates: updates[client],
                {"target": 1, "other": 1},
                mechanism=method,
                sampling=Sampling("poisson", 7, 1.0),
                owner=str(number),
            )
            federation.run(1)
            found.append(federation.records[0].plan)
        return found

    def test_one_client_changes_bounds_and_noise_by_half(self, plans):
        three, one = plans
        assert three.clip[0] == pytest.approx(0.375)
        assert one.clip[0] == pytest.approx(0.25)
        assert three.clip[0] / one.clip[0] == pytest.approx(1.5)
        assert three.to_json() != one.to_json()

    def test_the_noise_scale_gives_the_client_away(self):
        """The scale test: |log ratio| of the empirical noise energy against 4 / sqrt(d)."""
        method = mechanisms.get(
            "sensitivity-proportional", clip="med", variant="published", bound=0.5
        )
        layers = LayerTable.from_sizes({"target": 1000, "other": 1000})
        facts = RunFacts(1.0, Sampling("poisson", 7, 1.0))
        scales = [
            method.plan_from_private_norms(
                layers, facts, np.array([[1.0, 1.0]] * k + [[3.0, 1.0]] * (7 - k))
            ).sigma[0]
            for k in (3, 4)
        ]
        rng = np.random.default_rng(0)
        energy = [np.log(np.mean(rng.normal(scale=scale, size=1000) ** 2)) / 2 for scale in scales]
        assert energy[0] - energy[1] == pytest.approx(math.log(1.5), abs=4 / math.sqrt(1000))
        assert abs(energy[0] - energy[1]) > 4 / math.sqrt(1000)

    def test_the_whitened_probe_exceeds_its_limit(self, plans):
        three, one = plans
        sums = [
            bounded_sum(three, [self.ONE] * 3 + [self.THREE] * 4),
            bounded_sum(one, [self.ONE] * 4 + [self.THREE] * 3),
        ]
        assert whitened(three, sums[0] - sums[1]) > 1.0 / 1.0

    def test_it_is_said_to_be_not_private(self, plans):
        assert plans[0].guarantee.status == "none"
        assert composed_epsilon([(plans[0].event, 1)], DELTA) == math.inf
        assert "NOT PRIVATE" in plans[0].guarantee.sentence(noise_reproducible=True)


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "kernels"])
def test_rounding_of_the_sum_stays_below_what_the_bound_was_cut_short_by(on_device):
    """One client is cut to its bound; float32 would round the sum up with it, and not at all
    without it."""
    side, ulp = 64, 2.0**-18  # of float32 numbers from 32 to 64; half of it from 16 to 32
    layers = LayerTable.from_sizes({"a": side**2})
    facts = RunFacts(1.0, Sampling("poisson", 300, 0.5))
    plan = mechanisms.get("gaussian").plan(layers, facts, Transcript.start(torch.zeros(side**2)))
    bound = float(plan.clip[0])
    others = [0.98] * 32 + [(2**16 + 1.5) * ulp, -(2**16 + 0.5) * ulp] * 100
    others = [round(c / ulp * 2) * ulp / 2 for c in others]

    def moved(dtype: torch.dtype) -> float:
        sums = []
        for present in (True, False):
            block = (
                DeviceSum(plan, torch.device("cpu"), "torch")
                if on_device
                else BoundedSum.empty(plan)
            )
            block.total = block.total.to(dtype)
            for c in [1.01] * present + others:
                block.add(torch.full((side**2,), c * bound / side))
            sums.append(block.total.double())
        return float(torch.linalg.vector_norm(sums[0] - sums[1]))

    assert moved(torch.float32) > (1 + 1e-4) * bound  # power
    assert (1 - 2**-15) * bound < moved(torch.float64) <= bound
