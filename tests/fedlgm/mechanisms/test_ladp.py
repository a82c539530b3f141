"""LaDP-FL's plans: both variants, and what tells the sound one from the published one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum, bound_update
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.ladp import layer_changes, layer_divergences
from fedlgm.mechanisms.mechanism import Mechanism
from fedlgm.mechanisms.private_plans import UsesPrivateUpdates
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import composed_epsilon, epsilon
from fedlgm.training import LocalTraining

LAYERS = LayerTable.from_sizes({"a": 40, "b": 200, "c": 10})
SAMPLING = Sampling("poisson", 100, 0.1)
FACTS = RunFacts(1.3, SAMPLING)
TRAINING = LocalTraining(lr=0.1, epochs=2, batch_size=50, gradient_clip=20.0)
LOCAL = RunFacts(14.2765876859, SAMPLING, "replace-one", "local", 40, 0.2, 0.02, training=TRAINING)


def flat(seed: int, *norms: float) -> torch.Tensor:
    """A vector whose layers have the given norms."""
    vector = torch.randn(LAYERS.size, generator=torch.Generator().manual_seed(seed))
    for layer, norm in zip(LAYERS.split(vector), norms, strict=True):
        layer.mul_(norm / layer.norm())
    return vector


def history(mechanism: Mechanism, rounds: int = 2, facts: RunFacts = FACTS) -> Transcript:
    """A transcript of released rounds in which the three layers move by different amounts."""
    transcript = Transcript.start(flat(0, 3.0, 5.0, 1.0))
    for round_ in range(rounds):
        plan = mechanism.plan(LAYERS, facts, transcript)
        mean = torch.zeros(plan.size)
        position = 0
        for j in plan.indices:
            size = int(LAYERS.sizes[j])
            mean[position : position + size] = flat(round_ + 1, 8.0, 1.0, 3.0)[
                LAYERS.offsets[j] : LAYERS.offsets[j + 1]
            ]
            position += size
        model = transcript.models[-1].clone()
        for j, part in zip(
            plan.indices, mean.split([part.size for part in plan.parts]), strict=False
        ):
            model[LAYERS.offsets[j] : LAYERS.offsets[j + 1]] += part
        transcript = transcript.extend(model, mean, plan)
    return transcript


def published(**options: object) -> Mechanism:
    return mechanisms.get("ladp", variant="published", score_cap=1e-6, **options)


# -- the sound variant -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"score": "kl"}, {"estimate": False}, {"threshold": 2.0}],
    ids=str,
)
def test_noise_is_inverse_to_the_scores_and_costs_one_gaussian(options: dict) -> None:
    mechanism = mechanisms.get("ladp", bound=0.7, **options)
    transcript = history(mechanism)
    plan = mechanism.plan(LAYERS, FACTS, transcript)
    chosen = plan.released
    np.testing.assert_array_equal(
        chosen, LAYERS.norms(transcript.models[-1]).numpy() >= options.get("threshold", 0)
    )
    assert plan.effective_multiplier == pytest.approx(FACTS.noise_multiplier, rel=1e-8)
    assert math.sqrt(float((plan.clip[chosen] ** 2).sum())) == pytest.approx(0.7)
    product = plan.sigma[chosen] * plan.notes["score"][chosen]
    np.testing.assert_allclose(product, product[0])
    scores = plan.notes["score"]
    assert scores.min() >= (1 if options.get("estimate") is False else 0.5)
    assert scores.max() <= 2
    assert plan.guarantee.status == "proven"


def test_a_layer_that_moved_more_gets_less_noise() -> None:
    for score in ("change", "kl"):
        mechanism = mechanisms.get("ladp", score=score)
        sigma = mechanism.plan(LAYERS, FACTS, history(mechanism)).sigma
        assert sigma[1] > max(
            sigma[0], sigma[2]
        )  # layer b moves by 1 over 200 weights, the others by more over fewer


def test_noise_alone_is_no_movement() -> None:
    """A round that released nothing but noise leaves the scores near equal, although its noise
    differed by layer."""
    start = Transcript.start(flat(0, 3.0, 5.0, 1.0))
    sigma = np.array([1.0, 3.0, 9.0])
    plan = ReleasePlan(
        LAYERS,
        np.ones(3),
        sigma,
        FACTS,
        mechanisms.get("ladp").plan(LAYERS, FACTS, start).guarantee,
    )
    total = release(torch.zeros(plan.size), plan, KeyRing.from_seed(1), 1)
    mean = total / plan.denominator
    after = start.extend(start.models[-1] + mean, mean, plan)
    moved = layer_changes(LAYERS, after.models[-1], after.models[-2])
    assert moved[2] / moved[0] > 20
    assert (mechanisms.get("ladp")._movement(LAYERS, after) < 0.6 * moved).all()


def test_scores_move_slowly() -> None:
    """The log of a round's scores is a weighted mean of the last round's and of its own; 0 scores
    every round anew."""
    noise = {}
    for memory in (0.0, 0.5, 0.95):
        mechanism = mechanisms.get("ladp", memory=memory)
        transcript = history(mechanism, rounds=1)
        noise[memory] = np.log(
            mechanism.plan(LAYERS, FACTS, transcript).sigma / transcript.plan.sigma
        )
        noise[memory] -= noise[memory].mean()
    assert np.abs(noise[0.0]).max() > 0.3
    np.testing.assert_allclose(noise[0.5], 0.5 * noise[0.0], atol=1e-6)
    np.testing.assert_allclose(noise[0.95], 0.05 * noise[0.0], atol=1e-6)


def test_unselected_layers_are_absent() -> None:
    mechanism = mechanisms.get("ladp", threshold=2.0)
    plan = mechanism.plan(LAYERS, FACTS, Transcript.start(flat(0, 3.0, 5.0, 1.0)))
    assert plan.released.tolist() == [True, True, False]
    assert plan.size == 240
    update = flat(1, 1.0, 1.0, 1.0)
    other = update.clone()
    LAYERS.split(other)[2].add_(7.0)
    assert torch.equal(bound_update(update, plan), bound_update(other, plan))
    again = ReleasePlan.from_json(LAYERS, plan.to_json())
    assert again.released.tolist() == plan.released.tolist()
    assert again.effective_multiplier == plan.effective_multiplier


def test_a_threshold_above_every_norm_releases_nothing() -> None:
    plan = mechanisms.get("ladp", threshold=100.0).plan(
        LAYERS, FACTS, Transcript.start(flat(0, 3.0, 5.0, 1.0))
    )
    assert plan.size == 0
    assert "threshold = 100" in plan.guarantee.reason
    assert plan.shares.tolist() == [0.0, 0.0, 0.0]


def test_the_local_model_of_trust() -> None:
    facts = RunFacts(2 * 3.7962, SAMPLING, "replace-one", "local", 400)
    mechanism = mechanisms.get("ladp")
    plan = mechanism.plan(LAYERS, facts, history(mechanism, facts=facts))
    assert composed_epsilon([(plan.event, 40)], 1e-5) == pytest.approx(8.0, abs=1e-3)


@pytest.mark.parametrize(
    ("target", "delta", "steps", "expected"),
    [(8, 1e-5, 40, 3.7962), (8, 1e-5, 60, 4.6494), (8, 1e-3, 40, 3.0359), (20, 1e-5, 40, 1.8344)],
)
def test_calibrated_multipliers_under_local_trust(
    target: float, delta: float, steps: int, expected: float
) -> None:
    facts = RunFacts(
        0.0, SAMPLING, "replace-one", "local", 400, target, delta, max_participations=steps
    )
    multiplier = mechanisms.get("ladp").calibrate(facts)
    assert multiplier / 2 == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"score_cap": 0.0}, "score_cap"),
        ({"score_cap": -1.0}, "score_cap"),
        ({"score_floor": 0.0}, "score_floor"),
        ({"score_floor": 3.0}, "exceeds"),
        ({"threshold": -1.0}, "threshold"),
        ({"score": "entropy"}, "change, kl"),
        ({"steps": 3}, "no option 'steps'"),
        ({"memory": 1.0}, "memory"),
        ({"bound": math.inf}, "bound"),
        ({"variant": "improved"}, "sound, published"),
    ],
)
def test_bad_options_are_refused(options: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        mechanisms.get("ladp", **options)


# -- the published variant ---------------------------------------------------------------------------------------------


def test_published_noise_is_the_papers() -> None:
    mechanism = published(threshold=2.0)
    assert mechanism.calibrate(LOCAL) == pytest.approx(LOCAL.noise_multiplier)
    frame = mechanism.plan(LAYERS, LOCAL, Transcript.start(torch.zeros(250)))
    assert frame.guarantee.status == "none"
    assert frame.claim == {
        "epsilon": pytest.approx(0.1 * 0.2)
    }  # q T epsilon = 8 after T = 400 of them
    model, update = flat(0, 3.0, 5.0, 1.0), flat(1, 0.5, 0.5, 0.5)
    own, notes = mechanism.plan_from_private_update(frame, update, model)
    assert notes["selected"].tolist() == [1.0, 1.0, 0.0]
    divergences = layer_divergences(LAYERS, model + update, model)
    np.testing.assert_allclose(notes["score"], np.minimum(divergences, 1e-6))
    assert own.sigma.tolist() == pytest.approx(
        [57.1064, 57.1064, 0.0], abs=1e-4
    )  # P = B: the noise of Full DP
    np.testing.assert_allclose(notes["noise_norm"], own.sigma * np.sqrt(LAYERS.sizes))
    wide, _ = mechanisms.get("ladp", variant="published", score_cap=10.0).plan_from_private_update(
        frame, update, model
    )
    np.testing.assert_allclose(wide.sigma, 57.1064 * 10.0 / divergences, rtol=1e-5)


def test_published_uploads_unselected_layers_raw() -> None:
    mechanism = published(threshold=2.0)
    model, update = flat(0, 3.0, 5.0, 1.0), flat(1, 0.5, 0.5, 0.5)
    frame = mechanism.plan(LAYERS, LOCAL, Transcript.start(model))
    own, _ = mechanism.plan_from_private_update(frame, update, model)
    single = BoundedSum.empty(own)
    single.add(update)
    sent = release(single.total, own, KeyRing.from_seed(0), 1, party=3)
    assert torch.equal(sent[240:], update[240:])
    assert not torch.equal(sent[:240], update[:240])


def test_published_scores_stay_finite_where_nothing_moved() -> None:
    model = flat(0, 3.0, 5.0, 1.0)
    frame = published().plan(LAYERS, LOCAL, Transcript.start(model))
    for update in (torch.zeros(250), torch.full((250,), math.nan)):
        own, notes = published().plan_from_private_update(frame, update, model)
        assert np.isfinite(own.sigma).all()
        assert (notes["score"] > 0).all()
    ablated, notes = published(estimate=False).plan_from_private_update(
        frame, torch.zeros(250), model
    )
    assert ablated.sigma.tolist() == pytest.approx([57.1064] * 3, abs=1e-4)


def test_published_needs_its_frame() -> None:
    mechanism, start = (
        mechanisms.get("ladp", variant="published"),
        Transcript.start(torch.zeros(250)),
    )
    for use in (mechanism.calibrate, lambda facts: mechanism.plan(LAYERS, facts, start)):
        with pytest.raises(ConfigError, match="local"):
            use(replace(LOCAL, relation="add-remove", trust="central"))
        with pytest.raises(ConfigError, match="gradient_clip"):
            use(replace(LOCAL, training=LocalTraining()))
        with pytest.raises(ConfigError, match="no epsilon and delta"):
            use(replace(LOCAL, epsilon=None))


def test_only_the_published_variant_can_be_shown_private_updates() -> None:
    assert isinstance(mechanisms.get("ladp", variant="published"), UsesPrivateUpdates)
    assert not isinstance(mechanisms.get("ladp"), UsesPrivateUpdates)
    assert not hasattr(mechanisms.get("ladp"), "plan_from_private_update")


# -- what tells them apart ---------------------------------------------------------------------------------------------


def test_a_clients_own_update_shapes_the_published_plan() -> None:
    unsound = mechanisms.get("ladp", variant="published", threshold=3.0, score_cap=1.0)
    model = flat(0, 3.0, 5.0, 1.0)
    frame = unsound.plan(LAYERS, LOCAL, Transcript.start(model))
    plans = [
        unsound.plan_from_private_update(frame, flat(seed, 0.5, 0.5, 0.5), model)[0]
        for seed in (1, 2)
    ]
    assert plans[0].to_json() != plans[1].to_json()


def probe(plan: ReleasePlan, update: torch.Tensor) -> None:
    """Adding one update may move the whitened sum by at most 1 / sigma_* of the plan that was
    accounted for."""
    deviations = torch.cat([torch.full((part.size,), part.sigma) for part in plan.parts])
    moved = bound_update(update, plan)
    whitened = float(torch.where(moved == 0, 0.0, moved / deviations).norm())
    assert whitened <= 1 / max(plan.effective_multiplier, plan.facts.noise_multiplier) * (1 + 1e-6)


def adversaries() -> list[torch.Tensor]:
    """Small, ordinary and huge updates: of all layers and of one layer only."""
    updates = []
    for scale in (1e-3, 1.0, 1e6):
        whole = scale * flat(7, 1.0, 1.0, 1.0)
        updates.append(whole)
        for only in range(3):
            single = torch.zeros_like(whole)
            LAYERS.split(single)[only].copy_(LAYERS.split(whole)[only])
            updates.append(single)
    return updates


def test_the_whitened_probe_fails_for_published() -> None:
    mechanism, model = published(threshold=2.0), flat(0, 3.0, 5.0, 1.0)
    frame = mechanism.plan(LAYERS, LOCAL, Transcript.start(model))
    failures = 0
    for update in adversaries():
        own, _ = mechanism.plan_from_private_update(frame, update, model)
        try:
            probe(own, update)
        except AssertionError:
            failures += 1
    assert failures >= 6  # every huge update, and those of the layer that is sent raw


def test_the_published_cost_is_infinite_and_the_claim_small() -> None:
    frame = published().plan(LAYERS, LOCAL, Transcript.start(flat(0, 3.0, 5.0, 1.0)))
    assert composed_epsilon([(frame.event, 1)], 0.02) == math.inf
    # What their noise would reach if every layer had it and steps were counted: one participation
    # of twenty steps.
    assert epsilon(2 * 57.1064 / 80, 0.02, steps=1, relation="replace-one") == pytest.approx(
        3.2536, abs=1e-3
    )
