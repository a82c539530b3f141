"""Per-layer DP-SGD under MedClip: bounds from the batch itself, as printed, and bounds that follow
noisy bits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.extension.testing import check_mechanism
from fedlgm.mechanisms import BoundsExamples, Mechanism
from fedlgm.mechanisms.dp_sgd import example_plan
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import UnprotectedPlan
from fedlgm.planning.queries import BelowShare
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.example_level.central import train
from fedlgm.training.example_level.scaling import FlatClip

LAYERS = LayerTable.from_sizes({"a": 30, "b": 10, "c": 300})
FACTS = RunFacts(1.0, Sampling("poisson", 1000, 0.1), rounds=20, epsilon=4.0, delta=1e-5)


def test_published_bounds_are_the_medians_of_the_batch_over_their_sum():
    mechanism = mechanisms.get(
        "dp-sgd", variant="published", allocation="snr-consistent", bound=0.5
    )
    norms = np.array([[1.0, 4.0, 0.5], [2.0, 6.0, 0.5], [9.0, 5.0, 7.0], [math.nan, 1.0, 1.0]])
    plan = mechanism.plan_from_private_norms(LAYERS, FACTS, norms)
    np.testing.assert_allclose(plan.clip, 0.5 * np.array([2.0, 5.0, 0.5]) / 7.5)
    roots = np.sqrt(LAYERS.sizes)
    np.testing.assert_allclose(
        (plan.clip / plan.sigma) ** 2, roots / roots.sum()
    )  # equation 11, sigma_* = 1
    assert isinstance(plan, UnprotectedPlan)
    assert (plan.guarantee.status, plan.guarantee.unit, plan.bounded_by) == (
        "none",
        "example",
        "trainer",
    )
    assert mechanism.scaling(plan).clip == tuple(plan.clip)
    empty = mechanism.plan_from_private_norms(LAYERS, FACTS, norms[3:])
    np.testing.assert_allclose(empty.clip, 0.5 / 3)


def test_one_example_changes_the_published_noise_by_half():
    """Layer norms (1, 1) or (3, 1): the odd example decides where the median lies."""
    layers, mechanism = (
        LayerTable.from_sizes({"a": 1000, "b": 1000}),
        mechanisms.get("dp-sgd", variant="published"),
    )
    scales = [
        mechanism.plan_from_private_norms(
            layers, FACTS, np.array([[1.0, 1.0]] * k + [[3.0, 1.0]] * (7 - k))
        ).clip[0]
        for k in (3, 4)
    ]
    assert scales[0] / scales[1] == pytest.approx(1.5)


def test_what_has_no_published_form_is_refused():
    with pytest.raises(ConfigError, match="only clip = 'med' has a published variant"):
        mechanisms.get("dp-sgd", variant="published", clip="eq")
    with pytest.raises(ConfigError, match="belong to style 'per-layer'"):
        mechanisms.get("dp-sgd", variant="published", style="flat")
    local = RunFacts(
        0.0,
        Sampling("poisson", 10, 0.5),
        trust="local",
        epsilon=8.0,
        delta=1e-3,
        steps=LocalSteps(3, 0.1, 8.0),
    )
    with pytest.raises(ConfigError, match="use trust = 'central'"):
        mechanisms.get("dp-sgd", variant="published").calibrate(local)


def test_bounds_from_shares_settle_at_the_median_shares():
    """Without noise, far below all norms: the layers' bounds become proportional to their median
    shares."""
    mechanism = mechanisms.get("dp-sgd", style="per-layer", clip="med", norms="shares", bound=1e-3)
    rng = np.random.default_rng(0)
    norms = torch.from_numpy(np.array([3.0, 0.5, 1.0]) * rng.lognormal(0.0, 0.3, (501, 3)))
    start = Transcript(0, ())
    transcript, plan = start, mechanism.plan(LAYERS, FACTS, start)
    np.testing.assert_allclose(plan.clip, 1e-3 / math.sqrt(3))
    for _ in range(100):
        bits = (
            BelowShare(tuple(LAYERS.sizes.tolist()))
            .contribution(norms, torch.from_numpy(plan.clip.copy()))
            .mean(0)
        )
        transcript = transcript.extend(
            torch.zeros(0), torch.cat([torch.zeros(LAYERS.size), bits]), plan
        )
        plan = mechanism.plan(LAYERS, FACTS, transcript)
    medians = (norms / norms.norm(dim=1, keepdim=True)).median(dim=0).values.numpy()
    np.testing.assert_allclose(plan.clip, 1e-3 * medians / np.linalg.norm(medians), rtol=0.05)
    assert float(np.linalg.norm(plan.clip)) == pytest.approx(1e-3)
    assert plan.effective_multiplier == pytest.approx(
        FACTS.noise_multiplier
    )  # bits and gradients together


@pytest.mark.parametrize(
    "options", [{"norms": "shares"}, {"norms": "quantile"}, {"variant": "published"}]
)
def test_training(tmp_path, options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 8, generator=generator)
    y = (x[:, :3].sum(1) > 0).long()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    mechanism = mechanisms.get(
        "dp-sgd", style="per-layer", clip="med", allocation="snr-consistent", **options
    )
    facts = RunFacts(
        0.0, Sampling("poisson", 600, 0.1), rounds=60, epsilon=8.0, delta=1e-4, accountant="rdp"
    )
    method = Method.of(model, mechanism, facts)
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        result = train(model, x, y, method, keys=KeyRing.from_seed(1), ledger=ledger, lr=1.0)
    assert float((model(x).argmax(1) == y).float().mean()) > 0.85
    assert result.guarantee.unit == "example"
    if "variant" in options:
        assert (math.isinf(result.epsilon), result.guarantee.status) == (True, "none")
    else:
        assert result.epsilon <= 8.0
        assert result.guarantee.status == "proven"


def test_a_mechanism_that_bounds_examples_is_of_that_unit():
    """Without a statement of the unit its plans were refused with the advice to state a client's
    guarantee."""

    @dataclasses.dataclass(frozen=True)
    class Halved(Mechanism, BoundsExamples):
        def plan(self, layers, facts, transcript):
            return example_plan(layers, facts, clip=[0.5], sigma=[0.5 * facts.noise_multiplier])

        def scaling(self, plan):
            return FlatClip(0.5)

    assert (Mechanism.unit, Halved.unit) == ("client", "example")
    check_mechanism(Halved("halved"), LayerTable.from_sizes({"all": 8}))
