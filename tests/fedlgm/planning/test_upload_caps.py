"""The public cap on an upload whose examples a trainer bounds: honest clients are within it,
whatever their data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlgm import mechanisms
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalSteps, LocalTraining, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.planning.upload_caps import upload_caps, within_caps
from fedlgm.training.example_level.trainer import Examples, ExampleTrainer, digest_of, local_steps

STEPS = LocalSteps(count=5, rate=0.5, batch=20.0)
RULES = {
    "sgd": LocalTraining(lr=0.5), "momentum": LocalTraining(lr=0.5, momentum=0.9),
    "adam": LocalTraining(optimizer="adam", lr=0.1),
}  # fmt: skip


def uploaded(count: int, training: LocalTraining, noise: float = 1.0, batch: float = 20.0):
    """(norms, caps) of the upload of a client whose `count` examples all pull the same way, which
    is the worst."""
    facts = RunFacts(
        noise, Sampling("poisson", 5, 1.0), trust="local", rounds=3, training=training,
        steps=replace(STEPS, batch=batch),
    )  # fmt: skip
    module = torch.nn.Linear(6, 3)
    torch.nn.init.zeros_(module.weight)
    mechanism = mechanisms.get("dp-sgd", bound=1e-3, style="per-layer")
    layers = mechanism.table(LayerTable.from_module(module, "tensor"))
    plan = mechanism.plan(layers, facts, Transcript.start(layers.flatten(module)))
    x, y = torch.ones(count, 6), torch.zeros(count, dtype=torch.int64)
    trainer = ExampleTrainer(module, layers, mechanism)
    clients = [Examples(0, x, y, digest_of(x, y))]
    ((change, _),) = local_steps(
        trainer, training, layers.flatten(module), clients, plan, KeyRing.from_seed(None), 1
    )
    norms = [float(piece.norm()) for piece in change.split([part.size for part in plan.parts])]
    return np.array(norms), upload_caps(plan), plan


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("noise", [0.01, 1.0, 30.0])
def test_a_client_of_the_expected_size_is_never_cut(rule, noise):
    for count in (0, 1, 40, 60):
        norms, caps, _ = uploaded(count, RULES[rule], noise)
        assert (norms < 0.999 * caps).all()


@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_the_cap_is_no_more_than_a_few_times_what_an_honest_client_may_reach(rule):
    norms, caps, _ = uploaded(40, RULES[rule], 0.01)
    assert (caps < 8 * norms).all()


def test_a_client_of_many_examples_is_cut_to_the_cap_after_its_noise():
    norms, caps, _ = uploaded(2000, RULES["sgd"])
    assert (norms <= caps * (1 + 1e-9)).all()
    assert norms.max() > 0.99 * caps[norms.argmax()]


def test_the_cap_knows_nothing_of_the_data():
    assert (uploaded(0, RULES["sgd"])[1] == uploaded(2000, RULES["sgd"])[1]).all()


def test_what_is_within_stays_as_it_is_bit_by_bit():
    *_, plan = uploaded(1, RULES["sgd"])
    small = torch.full((plan.size,), 1e-3, dtype=torch.float64)
    assert within_caps(small, plan) is small
    cut = within_caps(small * 1e9, plan)
    norms = [float(piece.norm()) for piece in cut.split([part.size for part in plan.parts])]
    np.testing.assert_allclose(norms, upload_caps(plan), rtol=1e-12)
    assert bool(torch.isfinite(within_caps(small * 1e300, plan)).all())


def test_the_answers_to_queries_have_caps_of_their_own():
    facts = RunFacts(
        1.0,
        Sampling("poisson", 5, 1.0),
        trust="local",
        rounds=3,
        training=LocalTraining(lr=0.5),
        steps=STEPS,
    )
    layers = LayerTable.from_sizes({"a": 5, "b": 3})
    mechanism = mechanisms.get("dp-sgd")
    plan = mechanism.plan(layers, facts, Transcript.start(torch.zeros(8)))
    assert len(upload_caps(plan)) == len(plan.parts)
    assert (upload_caps(plan) > 0).all()
