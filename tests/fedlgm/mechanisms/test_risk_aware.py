"""LM-DP-SGD as a mechanism: what an example can move, what the weights may depend on, what the
query costs."""

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.extension.testing import check_mechanism
from fedlgm.mechanisms.lm_dp_sgd import bias_minimising_weights
from fedlgm.mechanisms.method import Method
from fedlgm.mechanisms.risk_aware import LMDPSGD
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import UnprotectedPlan
from fedlgm.planning.queries import LayerStrength
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.example_level import Reweighted
from fedlgm.training.example_level.bounding import bound_gradients, scaled_sum
from fedlgm.training.example_level.central import train
from fedlgm_lab.audits import Audit, Subject
from fedlgm_lab.audits.probe import probe

LAYERS = LayerTable.from_sizes({"a": 60, "b": 300, "c": 12})
SOUND = ("public", "stale", "privatised")
RISK = {"error_rates": (0.4, 0.3, 0.2), "emphasis": 3.0}
FACTS = RunFacts(1.0, Sampling("poisson", 1000, 0.1), rounds=20, epsilon=4.0, delta=1e-5)


def moved(plan, mechanism, gradients, canary):
    """Distance of the sums with and without a canary, in units of what the plan accounts for."""
    sums = []
    for batch in (gradients, torch.cat([gradients, canary])):
        total = BoundedSum.empty(plan)
        total.add(bound_gradients(batch, mechanism.scaling(plan), plan))
        sums.append(total.total)
    scales = np.repeat([part.sigma for part in plan.parts], [part.size for part in plan.parts])
    return float(np.linalg.norm((sums[1] - sums[0]).numpy() / scales)) * plan.effective_multiplier


def aligned(batch=100, angle=0.01):
    """Gradients (cos u_1, sin u_2) of norm 1 over two layers."""
    row = torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    return row.repeat(batch, 1)


@pytest.mark.parametrize("weights", SOUND)
def test_the_known_canary_moves_sound_sums_by_at_most_the_bound(weights):
    layers = LayerTable.from_sizes({"u1": 1, "u2": 1})
    mechanism = mechanisms.get("lm-dp-sgd", weights=weights)
    start = Transcript.start(torch.zeros(2))
    first = mechanism.plan(layers, FACTS, start)
    for transcript in (start, start.extend(torch.ones(2), torch.full((first.size,), 0.3), first)):
        plan = mechanism.plan(layers, FACTS, transcript)
        for size in (0.1, 10.0, 1e6):
            canary = torch.tensor([[0.0, size]], dtype=torch.float64)
            assert moved(plan, mechanism, aligned(), canary) <= 1 + 1e-9


def test_the_known_canary_moves_the_published_sum_by_ten_bounds():
    """C = 1, B = 100, M = 10: 10.06152 instead of 1."""
    layers = LayerTable.from_sizes({"u1": 1, "u2": 1})
    mechanism = mechanisms.get("lm-dp-sgd", variant="published")
    sums = []
    for batch in (
        aligned(),
        torch.cat([aligned(), torch.tensor([[0.0, 10.0]], dtype=torch.float64)]),
    ):
        plan = mechanism.plan_from_private_norms(layers, FACTS, batch.abs().numpy())
        total = BoundedSum.empty(plan)
        total.add(bound_gradients(batch, mechanism.scaling(plan), plan))
        sums.append(total.total)
    assert float((sums[1] - sums[0]).norm()) == pytest.approx(10.06152, rel=1e-5)
    assert isinstance(plan, UnprotectedPlan)
    assert "C sqrt(B^2 + (B + 1)^2)" in plan.guarantee.reason
    assert probe(Subject.of("lm-dp-sgd", "published", layers=LAYERS)).ratio == pytest.approx(
        10.06152, rel=1e-5
    )


def least_bias(gradients, layers, clip):
    """A and B of Appendix D.2 by a loop over the examples."""
    directions, means = np.zeros(layers.size), gradients.numpy().mean(axis=0)
    ends = layers.offsets
    for row in gradients.numpy():
        for low, high in pairwise(ends):
            if np.linalg.norm(row[low:high]) > 0:
                length = min(clip, np.linalg.norm(row)) / np.linalg.norm(row[low:high])
                directions[low:high] += length * row[low:high] / len(gradients)
    pairs = [(directions[low:high], means[low:high]) for low, high in pairwise(ends)]
    return [u @ u for u, _ in pairs], [u @ g for u, g in pairs]


@pytest.mark.parametrize(
    ("weights", "root"), [("bias", "least"), ("bias-greatest-root", "greatest")]
)
def test_published_weights_of_least_bias_are_the_batchs_own(weights, root):
    gradients = (
        torch.randn(6, LAYERS.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        / 10
    )
    mechanism = mechanisms.get("lm-dp-sgd", variant="published", weights=weights, bound=0.7)
    sums = [scaled_sum(gradients, scaling, LAYERS)[0] for scaling in mechanism.looks(len(LAYERS))]
    figures = mechanism.figures(LAYERS, sums, len(gradients))
    squares, products = least_bias(gradients, LAYERS, 0.7)
    np.testing.assert_allclose(figures, [squares, products], rtol=1e-5)
    plan = mechanism.plan_from_private_norms(LAYERS, FACTS, figures)
    expected = np.abs(bias_minimising_weights(squares, products, root))
    np.testing.assert_allclose(plan.clip / 0.7, expected, rtol=1e-4)
    assert isinstance(plan, UnprotectedPlan)
    assert plan.guarantee.status == "none"
    assert math.isinf(composed_epsilon([(plan.event, 1)], 1e-5))


def test_the_known_canary_moves_the_sum_of_least_bias_by_many_bounds():
    """The others agree in u_1; the canary is alone in u_2, and moves all weights towards itself."""
    layers = LayerTable.from_sizes({"u1": 1, "u2": 1})
    mechanism = mechanisms.get("lm-dp-sgd", variant="published", weights="bias")

    def summed(batch):
        sums = [scaled_sum(batch, scaling, layers)[0] for scaling in mechanism.looks(2)]
        plan = mechanism.plan_from_private_norms(
            layers, FACTS, mechanism.figures(layers, sums, len(batch))
        )
        return scaled_sum(batch, mechanism.scaling(plan), layers)[0]

    with_it = torch.cat([aligned(), torch.tensor([[0.0, 1e4]], dtype=torch.float64)])
    assert float((summed(with_it) - summed(aligned())).norm()) > 10


def test_weights_of_least_bias_need_all_examples_in_one_place():
    mechanism = mechanisms.get("lm-dp-sgd", variant="published", weights="bias")
    with pytest.raises(ConfigError, match=r"federation.clients = 1"):
        mechanism.plan_from_private_norms(LAYERS, FACTS, np.ones((4, 3)))
    with pytest.raises(ConfigError, match="known: risk, bias, bias-greatest-root"):
        mechanisms.get("lm-dp-sgd", variant="published", weights="stale")


@settings(max_examples=40, deadline=None)
@given(weights=st.sampled_from(SOUND), seed=st.integers(0, 2**31), size=st.floats(1e-6, 1e12))
def test_no_example_moves_a_sound_sum_by_more_than_is_accounted_for(weights, seed, size):
    generator = torch.Generator().manual_seed(seed)
    mechanism = mechanisms.get("lm-dp-sgd", weights=weights, bound=0.5, **RISK)
    start = Transcript.start(torch.zeros(LAYERS.size))
    first = mechanism.plan(LAYERS, FACTS, start)
    later = start.extend(start.models[0], 0.1 * torch.randn(first.size, generator=generator), first)
    plan = mechanism.plan(LAYERS, FACTS, later)
    gradients = torch.randn(5, LAYERS.size, generator=generator)
    canary = size * torch.randn(1, LAYERS.size, generator=generator)
    canary[:, : 60 * (seed % 2)] = 0.0
    assert moved(plan, mechanism, gradients, canary) <= 1 + 1e-9
    assert plan.effective_multiplier == pytest.approx(FACTS.noise_multiplier, rel=1e-8)
    assert plan.effective_multiplier >= FACTS.noise_multiplier * (1 - 1e-9)


@pytest.mark.parametrize("weights", SOUND)
def test_sound_variants_pass_the_kit_and_the_audit(weights):
    check_mechanism(
        mechanisms.get("lm-dp-sgd", weights=weights, error_rates=(0.4, 0.3, 0.2, 0.1), emphasis=2.0)
    )
    subject = Subject.of("lm-dp-sgd", weights=weights, layers=LAYERS, **RISK)
    assert Audit(method="probe").mechanism(subject).passed


@dataclass(frozen=True)
class Careless(LMDPSGD):
    """Scales to twice the planned bound."""

    def scaling(self, plan):
        return Reweighted(2 * self.bound, tuple((plan.clip / self.bound).tolist()))


@dataclass(frozen=True)
class Clientwise(LMDPSGD):
    """Its plan counts on the sum to bound, which does not know examples."""

    def plan(self, layers, facts, transcript):
        return replace(super().plan(layers, facts, transcript), bounded_by="aggregator")


def test_the_kit_catches_mechanisms_that_do_not_keep_their_bounds():
    with pytest.raises(PrivacyError, match="longer than the plan's bounds"):
        check_mechanism(Careless("careless", weights="public"))
    with pytest.raises(PrivacyError, match="its plan relies on the sum to bound"):
        check_mechanism(Clientwise("clientwise", weights="public"))


def test_steps_that_clients_noise_have_no_published_variant():
    facts = replace(FACTS, trust="local", steps=LocalSteps(4, 0.1, 10.0))
    assert mechanisms.get("lm-dp-sgd").calibrate(facts) > 0
    with pytest.raises(ConfigError, match="use trust = 'central'"):
        mechanisms.get("lm-dp-sgd", variant="published").calibrate(facts)


def test_the_query_takes_its_share_of_the_budget():
    """Same-batch side release: 1 / sigma_eff^2 = 1 / sigma_g^2 + 1 / sigma_w^2."""
    for share, gradients, query in (
        (0.01, 1.005038, 10.0),
        (0.05, 1.025978, 4.472136),
        (0.1, 1.054093, 3.162278),
    ):
        plan = mechanisms.get("lm-dp-sgd", share=share).plan(LAYERS, FACTS, Transcript(0, ()))
        assert plan.sigma.tolist() == pytest.approx([gradients] * 3, rel=1e-6)
        assert plan.queries[0].sigma == pytest.approx(query, rel=1e-6)
        assert plan.effective_multiplier == pytest.approx(1.0, rel=1e-8)
        assert plan.bounded_by == "trainer"
        assert plan.shares.sum() == pytest.approx(1 - share, rel=1e-6)


def test_weights_follow_risk_and_strength():
    public = mechanisms.get("lm-dp-sgd", weights="public", strengths=(1.0, 2.0, 2.0), **RISK)
    clip = public.plan(LAYERS, FACTS, Transcript(0, ())).clip
    expected = np.array([0.4**3, 2 * 0.3**3, 2 * 0.2**3])
    np.testing.assert_allclose(clip, expected / np.linalg.norm(expected), rtol=1e-9)
    assert float(clip @ clip) <= 1
    mechanism = mechanisms.get("lm-dp-sgd")
    first = mechanism.plan(LAYERS, FACTS, Transcript(0, ()))
    np.testing.assert_allclose(first.clip, 3**-0.5, rtol=1e-9)
    mean = torch.cat([torch.zeros(LAYERS.size), torch.tensor([0.9, 0.3, -0.2])])
    told = mechanism.plan(LAYERS, FACTS, Transcript(1, (), mean, first)).clip
    assert told[0] / told[1] == pytest.approx(3.0)
    assert told[2] == pytest.approx(0.05 / math.sqrt(3), rel=1e-2)  # the floor


def test_stale_weights_are_those_of_the_last_directions():
    mechanism = mechanisms.get("lm-dp-sgd", weights="stale", strengths=(1.0, 1.0, 4.0))
    quiet = FACTS.with_multiplier(1e-6)
    first = mechanism.plan(LAYERS, quiet, Transcript(0, ()))
    parts = [
        torch.ones(size) / math.sqrt(size) * length
        for size, length in zip(LAYERS.sizes, first.clip, strict=True)
    ]
    scale = torch.tensor([0.2, 0.4, 0.4]).repeat_interleave(torch.from_numpy(LAYERS.sizes))
    later = mechanism.plan(
        LAYERS, quiet, Transcript(1, (), torch.cat(parts).float() * scale, first)
    )
    np.testing.assert_allclose(later.clip, [1 / 3, 2 / 3, 2 / 3], rtol=1e-4)


def test_the_plan_travels_with_its_query():
    plan = mechanisms.get("lm-dp-sgd").plan(LAYERS, FACTS, Transcript(0, ()))
    assert json.loads(plan.to_json())["queries"] == [[LayerStrength.name, pytest.approx(10.0)]]
    assert type(plan).from_json(LAYERS, plan.to_json()).event == plan.event


@pytest.mark.parametrize(
    ("variant", "weights"),
    [*(("sound", weights) for weights in SOUND), ("published", None), ("published", "bias")],
)
def test_training(tmp_path, variant, weights):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 8, generator=generator)
    y = (x[:, :3].sum(1) > 0).long()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    options = {"weights": weights} if weights else {}
    mechanism = mechanisms.get(
        "lm-dp-sgd", variant=variant, error_rates=(0.4, 0.3), emphasis=2.0, **options
    )
    budget = {"epsilon": 8.0, "delta": 1e-4, "accountant": "rdp"}
    facts = RunFacts(0.0, Sampling("poisson", 600, 0.1), rounds=60, **budget)
    method = Method.of(model, mechanism, facts)
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        result = train(model, x, y, method, keys=KeyRing.from_seed(1), ledger=ledger, lr=1.0)
    assert float((model(x).argmax(1) == y).float().mean()) > 0.85
    if variant == "published":
        assert math.isinf(result.epsilon)
        assert result.guarantee.status == "none"
    else:
        assert 7.0 < result.epsilon <= 8.0
        assert (result.guarantee.status, result.guarantee.unit) == ("proven", "example")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "private"}, "known: public, stale, privatised"),
        ({"error_rates": [0.6, 0.1, 0.1]}, r"error rates must lie in \[0, 0.5\]"),
        ({"error_rates": [-0.1, 0.1, 0.1]}, r"error rates must lie in \[0, 0.5\]"),
        ({"emphasis": 0.5}, "emphasis must be finite and at least 1"),
        ({"share": 1.0}, "share must lie in"),
        ({"floor": 0.0}, "needs floor > 0"),
        ({"floor": 2.0}, r"floor must lie in \[0, 1\]"),
        ({"strengths": [-1.0, 1.0, 1.0]}, "strengths must be finite"),
        ({"bound": 0.0}, "bound must be finite and positive"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        mechanisms.get("lm-dp-sgd", **options)


def test_what_does_not_fit_the_layers_is_refused():
    for options, what in (
        ({"error_rates": [0.1]}, "error_rates"),
        ({"strengths": [1.0]}, "strengths"),
    ):
        with pytest.raises(ConfigError, match=rf"{what} has 1 entries for 3 layers \(a, b, c\)"):
            mechanisms.get("lm-dp-sgd", **options).plan(LAYERS, FACTS, Transcript(0, ()))
