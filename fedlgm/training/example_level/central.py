"""Centralised DP-SGD, which treats one machine as a federation with a single member.

>>> import tempfile, torch
>>> from fedlgm import RunFacts, Sampling, mechanisms
>>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.arange(20) // 10
>>> model, mechanism = nn.Linear(1, 2), mechanisms.get("dp-sgd")
>>> facts = RunFacts(0.0, Sampling("poisson", 20, 1.0), rounds=3, epsilon=8.0, delta=1e-2)
>>> method = Method.of(model, mechanism, facts)
>>> with Ledger(tempfile.mkdtemp() + "/ledger.sqlite", owner="an example") as ledger:
...     trained: Trained = train(model, x, y, method, ledger=ledger, lr=0.5)
>>> round(trained.epsilon, 3), trained.guarantee.unit, trained.steps
(8.0, 'example', 3)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor, nn

from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.method import Method
from fedlgm.mechanisms.private_plans import UsesPrivateNorms
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import Noising, fingerprint, release
from fedlgm.planning.facts import LocalTraining
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee, caveat_of
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.example_level.trainer import (
    ExampleTrainer,
    batch_keys,
    digest_of,
    poisson_rows,
)
from fedlgm.training.inputs import Inputs
from fedlgm.training.optimizers import FlatOptimizer
from fedlgm.training.rates import factors
from fedlgm.training.tasks.task import ExampleLosses


@dataclass(frozen=True)
class Trained:
    """Result of `train`.

    Attributes:
        model: the final weights [D], in the order of the layer table.
        epsilon: the epsilon that the ledger proves at the facts' delta, including earlier charges.
        guarantee: guarantee to which this epsilon belongs.
        steps: number of steps; each step is one release.
        noise_reproducible: whether the noise came from a public seed, with which anyone can draw
            the noise again.
    """

    model: Tensor
    epsilon: float
    guarantee: Guarantee
    steps: int
    noise_reproducible: bool = False

    def __repr__(self) -> str:
        standing = f"{self.guarantee.status}{caveat_of(self.noise_reproducible)}"
        spent = f"epsilon {self.epsilon:.3f} of an {self.guarantee.unit}, {standing}"
        return f"Trained({self.model.numel()} weights, {self.steps} steps: {spent})"


def train(
    module: nn.Module,
    x: Inputs,
    y: Tensor,
    method: Method,
    *,
    keys: KeyRing | None = None,
    ledger: Ledger,
    lr: float,
    optimizer: Literal["sgd", "adam"] = "sgd",
    momentum: float = 0.0,
    weight_decay: float | None = None,
    schedule: str | None = None,
    task: ExampleLosses | None = None,
    exact_sums: bool = False,
    progress: Callable[[int], None] | None = None,
    continue_ledger: bool = False,
) -> Trained:
    """Train a model by DP-SGD, with example-level privacy, on one machine. The weights of `module`
    are changed in place.

    Each step draws a Poisson batch at the sampling rate q of the facts and sums the bounded
    gradients of the batch's examples. The step then charges the ledger, adds the plan's noise to
    the sum, divides by the public number q N, and takes an optimizer step against the result. A
    step with an empty batch releases only noise. The facts determine the neighbouring relation,
    which usually is adding or removing one example. The returned epsilon covers all charges to the
    ledger.

    For an example of three steps, see the docstring of `fedlgm.training.example_level.central`.

    Args:
        module: float32 model without state between batches.
        x: inputs [N, ...].
        y: targets [N, ...].
        method: the mechanism for the module's layers, with facts whose population is N and whose
            number of rounds is the number of steps.
        keys: key ring from which batches and noise are drawn; with None, a secret ring is created
            from the operating system's randomness. With a seeded ring, the noise is reproducible,
            so the run is only a simulation.
        ledger: ledger that is charged before every release.
        lr: learning rate.
        optimizer: optimizer that uses the released gradients; "adam" with `weight_decay` is AdamW.
            The choice does not change epsilon, because the optimizer uses only released values.
        momentum: momentum of "sgd".
        weight_decay: factor of decoupled weight decay.
        schedule: "linear", "cosine", or "package.module:name" of a function (step, steps) ->
            factor of the learning rate; see `fedlgm.training.rates.factors`.
        task: task that computes the loss of each example; None means classification.
        exact_sums: see `ExampleGradients`.
        progress: function that is called with the step's number after every step.
        continue_ledger: whether the ledger may contain steps of earlier trainings; the costs of all
            trainings then add up.

    Raises:
        LedgerError: another training is charging the ledger; or the ledger contains steps of an
            earlier training, and `continue_ledger` is not set.
        ConfigError: the mechanism bounds clients; the facts lack Poisson sampling, central trust or
            delta, or include local steps; the population is not the number of examples; or the
            module has no per-example gradients.
    """
    mechanism = method.mechanism
    trainer = ExampleTrainer(module, method.layers, mechanism, task=task, exact_sums=exact_sums)
    facts = method.facts.assuming(trainer.condition(x) if len(y) else "")
    method = replace(method, facts=facts)
    noised_by, drawn_by = facts.noised_by, facts.sampling.scheme
    if facts.steps or noised_by.uploads_released or not noised_by.alone or drawn_by != "poisson":
        raise ConfigError(
            "train draws each step's examples by Poisson sampling and adds the noise itself: it "
            "needs facts with sampling 'poisson' and trust = 'central', and without local steps"
        )
    if facts.sampling.population != len(y):
        raise ConfigError(
            f"the facts count {facts.sampling.population} examples, but the data have {len(y)}"
        )
    keys = KeyRing.from_seed(None) if keys is None else keys
    # The draws also depend on the ledger, because sampling amplifies the privacy of trainings on
    # two ledgers only if their draws are independent.
    batches = batch_keys(keys, digest_of(x, y) + ledger.identity().encode())
    if facts.delta is None:
        raise ConfigError(
            "the facts have no delta, at which the epsilon of the result is stated: give delta=1e-5"
        )
    settings = LocalTraining(
        optimizer=optimizer, lr=lr, momentum=momentum, weight_decay=weight_decay
    )
    descent = FlatOptimizer.of(settings, trainer.weights)
    rates = lr * (factors(schedule, facts.rounds, "step") if schedule else np.ones(facts.rounds))
    transcript = Transcript.start(trainer.weights.clone())
    with ledger.hold():
        if not continue_ledger:
            method.require_rounds(ledger, transcript)
        for step in range(1, facts.rounds + 1):
            plan = method.plan(transcript)
            drawn = batches
            if keys.secret:
                # A step at different weights or by a different plan is a different release, whose
                # privacy is amplified only if its batch is drawn independently.
                weights = trainer.weights.detach().cpu().numpy().view(np.uint8).data
                drawn = batches.derive(weights, plan.to_json().encode())
            rows = poisson_rows(drawn, len(y), facts.sampling.rate, step, 0)
            # a published variant; its plan is charged as not private
            if isinstance(mechanism, UsesPrivateNorms):
                plan = method.plan_from_private_norms(trainer.figures(x, y, rows))
            total = BoundedSum.empty(plan)
            total.add(trainer.sum(x, y, rows, plan))
            # The name of the noise depends on what the step releases, even if a public seed makes
            # the noise of every training the same. A different training on the same ledger is
            # therefore charged, but a repetition of the same training is not.
            key = Noising.of(total.total, plan, KeyRing(keys.root, secret=True), step).name
            event = plan.event
            if keys.secret:
                # A training with a different loss draws the same first batch, but the sampling of a
                # batch amplifies the privacy of only one release.
                key += (batch := f" of batch {fingerprint(drawn, step)}")
                if key != next(
                    (entry for entry in ledger.keys_of(step) if entry.endswith(batch)), key
                ):
                    event = plan.repeated_event
            ledger.charge(event, round=step, key=key, protects=plan.protects)
            mean = release(total.total, plan, keys, step).div_(plan.denominator).float()
            descent.lr = float(rates[step - 1])
            descent.step(-plan.expand(mean))
            transcript = transcript.extend(trainer.weights.clone(), mean, plan)
            if progress is not None:
                progress(step)
    return Trained(
        trainer.weights,
        ledger.epsilon(facts.delta, facts.accountant),
        plan.guarantee,
        facts.rounds,
        not keys.secret,
    )
