"""Local steps: batches and noise of their own for every release, and nothing that shows how many
examples there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalSteps, LocalTraining, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training.example_level.trainer import (
    Examples,
    ExampleTrainer,
    batch_keys,
    digest_of,
    local_steps,
    poisson_rows,
)

STEPS = LocalSteps(count=4, rate=0.5, batch=10.0)
FACTS = RunFacts(
    1.0,
    Sampling("poisson", 5, 1.0),
    trust="local",
    rounds=3,
    training=LocalTraining(lr=0.5),
    steps=STEPS,
)
KEYS = KeyRing.from_seed(None)


def data(count=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(count, 6, generator=generator),
        torch.randint(3, (count,), generator=generator),
    )
    return x, y, digest_of(x, y)


def made(name="dp-sgd", facts=FACTS, **options) -> tuple[ExampleTrainer, ReleasePlan, torch.Tensor]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    mechanism = mechanisms.get(name, **options)
    layers = mechanism.table(LayerTable.from_module(module))
    start = layers.flatten(module)
    return (
        ExampleTrainer(module, layers, mechanism),
        mechanism.plan(layers, facts, Transcript.start(start)),
        start,
    )


def update(examples, keys=KEYS, round_=1, client=0, options=None, settings=FACTS.training):
    trainer, plan, start = made(**(options or {}))
    return local_steps(trainer, settings, start, [Examples(client, *examples)], plan, keys, round_)[
        0
    ]


def test_the_same_request_on_the_same_data_is_the_same_release():
    first, name = update(data())
    again, other = update(data())
    assert torch.equal(first, again)
    assert name == other


@pytest.mark.parametrize(
    "change",
    [
        {"round_": 2}, {"client": 1}, {"keys": KEYS.derive(b"another model or plan")},
        {"examples": data(seed=1)}, {"examples": data(19)},
    ],
)  # fmt: skip
def test_anything_else_has_other_noise_everywhere(change):
    first, name = update(data())
    other, another = update(**({"examples": data()} | change))
    assert name != another
    assert (first == other).sum() <= 2  # two draws from the noise's grid may coincide


def test_batches_of_a_secret_ring_follow_the_data_and_those_of_a_seed_do_not():
    one, other = (digest_of(*data(seed=seed)[:2]) for seed in (0, 1))
    secret, public = KEYS, KeyRing.from_seed(1)
    rows = [
        poisson_rows(batch_keys(secret, digest), 1000, 0.5, 1, 0).tolist()
        for digest in (one, other)
    ]
    assert rows[0] != rows[1]
    assert batch_keys(public, one) == batch_keys(public, other) == public


def test_batches_are_poisson():
    sizes = [len(poisson_rows(KEYS, 1000, 0.1, round_, 0)) for round_ in range(400)]
    assert np.mean(sizes) == pytest.approx(100, abs=5 * 9.5 / 20)
    assert np.var(sizes) == pytest.approx(90, rel=0.4)  # a batch of fixed size has 0


def test_a_client_without_examples_sends_noise_of_the_same_size():
    empty = (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    sizes = [
        float(update((*empty, digest_of(*empty)), round_=round_)[0].std())
        for round_ in range(1, 30)
    ]
    _, plan, _ = made()
    assert np.mean(sizes) == pytest.approx(float(plan.upload_sigma[0]), rel=0.05)
    assert float(plan.upload_sigma[0]) == pytest.approx(0.5 * 2 / 10)


def test_layers_that_are_not_released_stay_where_they_are():
    options = {"style": "per-layer", "allocation": "max-snr-sum"}
    trainer, plan, start = made(**options)
    ((change, _),) = local_steps(
        trainer, FACTS.training, start, [Examples(0, *data())], plan, KEYS, 1
    )
    assert change.numel() == plan.size == int(plan.layers.sizes[plan.indices].sum())
    moved = trainer.weights - start
    for j, part in enumerate(plan.layers.split(moved)):
        assert bool(part.any()) == bool(plan.released[j])


def test_answers_are_means_over_the_steps():
    """Without noise to speak of: the share of a batch's examples within their bounds, minus one
    half, over B."""
    options = {"style": "per-layer", "clip": "med", "norms": "quantile"}
    trainer, plan, start = made(**options)
    quiet = replace(
        plan,
        sigma=plan.sigma * 1e-6,
        queries=tuple(replace(noisy, sigma=1e-6) for noisy in plan.queries),
    )
    ((change, _),) = local_steps(
        trainer, FACTS.training, start, [Examples(0, *data())], quiet, KEYS, 1
    )
    answers = change[-2:].numpy() * STEPS.batch * STEPS.count * 2
    assert np.abs(answers - answers.round()).max() < 1e-3  # sums of halves
    assert np.abs(answers).max() <= 20 * STEPS.count


@pytest.mark.parametrize(
    "settings", [LocalTraining("adam", 0.01), LocalTraining("sgd", 0.1, momentum=0.9)]
)
def test_every_optimizer_steps_on_noisy_sums(settings):
    change, _ = update(data(), settings=settings)
    assert torch.isfinite(change).all()
    assert change.any()


PLAIN, ADAM = LocalTraining(lr=0.5), LocalTraining("adam", 0.01)
MOMENTUM = LocalTraining("sgd", 0.1, momentum=0.9)
CAPPED, ASKING = {"allocation": "max-snr-sum"}, {"clip": "med", "norms": "quantile"}
SEEDED = KeyRing.from_seed(3)


@pytest.mark.parametrize(
    ("options", "settings", "keys"),
    [
        ({}, PLAIN, KEYS),
        ({}, ADAM, SEEDED),
        (CAPPED, ADAM, KEYS),
        (CAPPED, MOMENTUM, SEEDED),
        (ASKING, MOMENTUM, KEYS),
        (ASKING, PLAIN, SEEDED),
    ],
)
def test_clients_that_step_together_release_what_each_releases_alone(options, settings, keys):
    """To the bit, for any number of clients beside them, one of them without examples."""
    empty = (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    sets = [data(), (*empty, digest_of(*empty)), data(7, seed=1), data(90, seed=2)]
    clients = [
        Examples(number, *examples) for number, examples in zip((4, 0, 9, 2), sets, strict=True)
    ]
    options = {"style": "per-layer"} | options if options else {}
    alone = [
        update(examples, keys, 2, one.client, options, settings)
        for one, examples in zip(clients, sets, strict=True)
    ]
    trainer, plan, start = made(**options)
    for group in (clients, clients[::-1], clients[1:3]):
        found = local_steps(trainer, settings, start, group, plan, keys, 2)
        for one, (change, name) in zip(group, found, strict=True):
            change_alone, of_alone = alone[[c.client for c in clients].index(one.client)]
            assert name == of_alone
            assert torch.equal(change, change_alone)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="bounds whole clients"):
        made("snr-consistent")
    trainer, plan, start = made()
    central = replace(plan, facts=RunFacts(1.0, Sampling("poisson", 20, 0.5)))
    with pytest.raises(ConfigError, match="local steps need a plan"):
        local_steps(trainer, FACTS.training, start, [Examples(0, *data())], central, KEYS, 1)
    with pytest.raises(ConfigError, match="draws its examples by Poisson sampling"):
        made(
            facts=RunFacts(
                1.0, Sampling("poisson", 5, 1.0), "replace-one", "local", 3, max_participations=2
            )
        )
