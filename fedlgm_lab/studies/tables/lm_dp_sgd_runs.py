"""Runs that compare LM-DP-SGD with DP-SGD, Auto-S and DP-PSAC in accuracy, membership risk of the
layers and bias (Figures 2 and 4, Tables 3 and 5 of its paper).

The data set is FashionMNIST, and the model is S-CNN (26,010 parameters). The private part has 2,000
training examples. The public part has 4,000 other examples, half of which train the shadow model.
Error rates are those of adversaries on public examples.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm import data, mechanisms, privacy
from fedlgm.mechanisms.mechanism import BoundsExamples
from fedlgm.mechanisms.method import Method
from fedlgm.mechanisms.private_plans import UsesPrivateNorms
from fedlgm.mechanisms.risk_aware import LMDPSGD, PublishedLMDPSGD
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import models, tasks
from fedlgm.training.example_level import ExampleGradients, FlatClip
from fedlgm.training.example_level.central import train
from fedlgm.training.example_level.trainer import private_figures
from fedlgm_lab.risk.exposure import ShadowTraining, layer_errors, layer_risk, public_bias_weights
from fedlgm_lab.studies.tables.store import Values

PRIVATE, PUBLIC, RATE, STEPS, EMPHASIS = 2000, 4000, 0.05, 200, 5.0
EPSILON, DELTA = 5.0, 1e-5
RATES, SEARCH_SEEDS, SEEDS = (0.3, 1.0, 3.0), (100, 101, 102), tuple(range(1, 11))
LOOKS = 5  # number of steps at which the bias is measured
SHADOW = ShadowTraining(epochs=20, lr=2e-3, adversary_epochs=10)
STYLES = (
    "sgd",
    "dp-sgd",
    "auto-s",
    "dp-psac",
    "lm public",
    "lm stale",
    "lm privatised",
    "lm bias",
    "lm published",
    "lm published bias",
)


@dataclass(frozen=True)
class Halves:
    """A private and a public part of FashionMNIST, and its test set."""

    private: tuple[Tensor, Tensor]
    public: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls) -> Halves:
        found = data.load("fashion-mnist")
        order = np.random.default_rng(0).permutation(len(found.train_y))

        def part(rows: np.ndarray) -> tuple[Tensor, Tensor]:
            return torch.from_numpy(found.train_x[rows]), torch.from_numpy(found.train_y[rows])

        test = torch.from_numpy(found.test_x), torch.from_numpy(found.test_y)
        return cls(part(order[:PRIVATE]), part(order[PRIVATE : PRIVATE + PUBLIC]), test)


def scnn(seed: int) -> nn.Module:
    return models.build("s-cnn", in_shape=(1, 28, 28), classes=10, seed=seed)


def mechanism(style: str, store: Values) -> Any:
    """Build the mechanism of a row of the table."""
    if style in ("dp-sgd", "auto-s", "dp-psac"):
        return mechanisms.get(style)
    if style == "lm bias":
        return LMDPSGD("lm-dp-sgd", weights="public", strengths=tuple(store.values["bias weights"]))
    if style == "lm published bias":
        return PublishedLMDPSGD("lm-dp-sgd", weights="bias")
    known: dict[str, Any] = {
        "error_rates": tuple(row["training_error"] for row in store.values["risk fashion-mnist"]),
        "emphasis": EMPHASIS,
    }
    if style == "lm published":
        return PublishedLMDPSGD("lm-dp-sgd", **known)
    strengths = tuple(row["strength"] for row in store.values["risk fashion-mnist"])
    return LMDPSGD("lm-dp-sgd", weights=style.split()[1], strengths=strengths, **known)


def measure_risk(store: Values) -> None:
    """Measure the error rates with two public sets, and the layer weights of the paper's D.2."""
    halves = Halves.load()
    digits = data.load("digits")
    small = torch.from_numpy(np.concatenate([digits.train_x, digits.test_x]))
    resized = nn.functional.interpolate(small, size=(28, 28), mode="bilinear")
    sets = {
        "fashion-mnist": halves.public,
        "digits": (resized, torch.from_numpy(np.concatenate([digits.train_y, digits.test_y]))),
    }
    for name, (x, y) in sets.items():
        keys = KeyRing.from_seed(7)
        store.get(f"risk {name}", lambda x=x, y=y, keys=keys: [
            vars(row) for row in layer_risk(scnn(7), x, y, keys=keys, training=SHADOW)
        ])  # fmt: skip

    def weights() -> list[float]:
        module = scnn(7)
        x, y = halves.public
        return public_bias_weights(
            module, LayerTable.from_module(module), x[:1000], y[:1000], 1.0
        ).tolist()

    store.get("bias weights", weights)


def run(style: str, lr: float, seed: int, store: Values, whole: bool = True) -> dict[str, Any]:
    """Train once, and measure the accuracy on the test set.

    If `whole` is true, the accuracy of membership attacks on each layer and the bias are also
    measured.
    """
    halves, module, keys = Halves.load(), scnn(seed), KeyRing.from_seed(seed)
    x, y = halves.private
    started = time.process_time()
    if style == "sgd":
        found: dict[str, Any] = {"epsilon": None, "guarantee": "none", "bias": []}
        sgd(module, x, y, lr, keys)
    else:
        facts = RunFacts(
            0.0, Sampling("poisson", PRIVATE, RATE), rounds=STEPS, epsilon=EPSILON, delta=DELTA
        )
        method = Method.of(module, mechanism(style, store), facts)
        found = private_run(method, module, x, y, lr, keys, looks=LOOKS if whole else 0)
    seconds = round(time.process_time() - started, 1)
    found |= {"lr": lr, "seed": seed, "seconds": seconds, "accuracy": accuracy(module, halves.test)}
    if whole:
        both, count = torch.cat([x, halves.test[0]]), min(len(x), len(halves.test[1]))
        inside, outside = torch.arange(count), len(x) + torch.arange(count)
        errors = layer_errors(
            module, both, inside, outside, keys=KeyRing.from_seed(1000 + seed), training=SHADOW
        )
        found["membership"] = {
            layer: round(1 - held_out, 5) for layer, (_, held_out) in errors.items()
        }
        found["train_accuracy"] = accuracy(module, (x, y))
    return found


def private_run(
    method: Method,
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    lr: float,
    keys: KeyRing,
    looks: int = 0,
) -> dict[str, Any]:
    """Train once, and measure the bias of the scaling at some steps.

    The bias is ||mean scaled gradient - mean gradient|| over fixed private examples.
    """
    examples, steps = (x[:500], y[:500]), method.facts.rounds
    plans: list[Any] = []
    bias: list[float] = []

    class Spy(Method):
        def plan(self, transcript: Transcript) -> Any:
            plans.append(super().plan(transcript))
            return plans[-1]

    def after(step: int) -> None:
        if looks and step % (steps // looks) == 0:
            plan, own = plans[-1], method.mechanism
            gradients = ExampleGradients(module, method.layers)
            if isinstance(own, UsesPrivateNorms):
                figures = private_figures(gradients, method.mechanism, method.layers, *examples)
                plan = own.plan_from_private_norms(method.layers, method.facts, figures)
            assert isinstance(own, BoundsExamples)
            mean, true = (
                gradients.sum(*examples, scaling).total.double() / len(examples[1])
                for scaling in (own.scaling(plan), FlatClip(float("inf")))
            )
            bias.append(round(float((mean - true).norm()), 4))
        del plans[:-1]

    with (
        tempfile.TemporaryDirectory() as folder,
        Ledger(Path(folder) / "ledger.sqlite", "run") as ledger,
    ):
        spy = Spy(method.mechanism, method.layers, method.facts)
        result = train(module, x, y, spy, keys=keys, ledger=ledger, lr=lr, progress=after)
    multiplier, rate = method.facts.noise_multiplier, method.facts.sampling.rate
    return {
        "epsilon": result.epsilon if np.isfinite(result.epsilon) else "inf",
        "claimed": privacy.epsilon(multiplier, DELTA, steps=steps, sampling_rate=rate),
        "guarantee": result.guarantee.status,
        "multiplier": multiplier,
        "bias": bias,
    }


def sgd(module: nn.Module, x: Tensor, y: Tensor, lr: float, keys: KeyRing) -> None:
    """Train by SGD on the same batches, without bounds or noise."""
    for step in range(1, STEPS + 1):
        rows = torch.from_numpy(
            np.flatnonzero(keys.numpy_generator(Purpose.COHORT, step).random(len(y)) < RATE)
        )
        loss = nn.functional.cross_entropy(module(x[rows]), y[rows], reduction="sum") / (
            RATE * len(y)
        )
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None


def accuracy(module: nn.Module, pair: tuple[Tensor, Tensor]) -> float:
    """Measure the share of the examples that a model classifies correctly."""
    return round(tasks.evaluate(tasks.get(), module, *pair)["accuracy"], 5)


def accuracies_by_rate(values: dict[str, Any], style: str) -> dict[float, list[float]]:
    """Return the test accuracies of the search by learning rate, in the order of its seeds."""
    return {
        rate: [values[f"search {style} {rate:g} {seed}"]["accuracy"] for seed in SEARCH_SEEDS]
        for rate in RATES
    }


def curve(values: dict[str, Any], style: str) -> dict[float, float]:
    """Return the mean accuracies of the search by learning rate."""
    return {
        rate: statistics.fmean(found) for rate, found in accuracies_by_rate(values, style).items()
    }


def best_rate(values: dict[str, Any], style: str) -> float:
    """Return the learning rate with the highest mean accuracy over the seeds of the search."""
    found = curve(values, style)
    return max(found, key=lambda rate: found[rate])


def measure(store: Values) -> None:
    """Measure the error rates of adversaries, then make the searches and the runs."""
    measure_risk(store)
    for seed, style, lr in itertools.product(SEARCH_SEEDS, STYLES, RATES):
        name = f"search {style} {lr:g} {seed}"
        store.get(name, lambda s=style, r=lr, n=seed: run(s, r, n, store, whole=False))
    for seed, style in itertools.product(SEEDS, STYLES):
        best = best_rate(store.values, style)
        store.get(f"run {style} {seed}", lambda s=style, r=best, n=seed: run(s, r, n, store))
