"""Centralised DP-SGD: plan, bound, charge, release and step, as a federation of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm import inputs
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError
from fedlgm.example_level.bounding import bounded_updates
from fedlgm.example_level.engine import ExampleGradients, ExampleLosses
from fedlgm.example_level.scaling import FlatClip, Scaling
from fedlgm.inputs import Inputs
from fedlgm.keys import KeyRing, Purpose
from fedlgm.mechanisms.base import UsesPrivateNorms
from fedlgm.mechanisms.method import Method
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.privacy.ledger import Ledger
from fedlgm.release import fingerprint, noise_keys, release
from fedlgm.transcript import Transcript


class BoundsExamples(Protocol):
    """What a mechanism needs besides `plan` to bound examples."""

    def scaling(self, plan: ReleasePlan) -> Scaling:
        """How the step's gradients are counted."""
        ...


@dataclass(frozen=True)
class Trained:
    """Result of a run.

    Attributes:
        model: the final weights in the order of the layer table, [D].
        epsilon: what the ledger proves at the facts' delta, together with everything charged to it before.
        guarantee: what that epsilon means.
        steps: releases made.
    """

    model: Tensor
    epsilon: float
    guarantee: Guarantee
    steps: int


def train(
    module: nn.Module,
    x: Inputs,
    y: Tensor,
    method: Method,
    *,
    keys: KeyRing,
    ledger: Ledger,
    lr: float,
    task: ExampleLosses | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trained:
    """Train a model with example-level privacy; its weights are changed in place.

    Every step draws a Poisson batch at the rate of the facts, sums the batch's bounded gradients, charges the ledger,
    adds the plan's noise, divides by the public q N and steps against the result. An empty batch is a step like any
    other: its release is noise. (epsilon, delta) holds for adding or removing one example, given the ledger's total.

    Args:
        module: float32 model without state between batches.
        x: inputs [N, ...].
        y: targets [N, ...].
        method: the mechanism on the module's layers, with facts whose population is N and whose rounds are the steps.
        keys: batches and noise come from here; a seeded ring makes the noise reproducible, which is a simulation.
        ledger: charged before every release.
        lr: learning rate.
        task: losses per example; None is classification.
        progress: called with the number of every finished step.

    Raises:
        ConfigError: a mechanism that bounds clients, a population that is not the data's, or a module without gradients
            per example.
    """
    mechanism, facts = method.mechanism, method.facts
    if not hasattr(mechanism, "scaling"):
        raise ConfigError(
            f"{mechanism.name} bounds whole clients: example-level training needs one that bounds examples"
        )
    if facts.sampling.population != len(y):
        raise ConfigError(f"the facts count {facts.sampling.population} examples, the data have {len(y)}")
    weights = method.layers.bind_(module.train())
    gradients = ExampleGradients(module, method.layers, task)
    transcript = Transcript.start(weights.clone())
    plan = method.plan(transcript)
    for step in range(1, facts.rounds + 1):
        plan = method.plan(transcript)
        chosen = keys.numpy_generator(Purpose.COHORT, step).random(len(y)) < facts.sampling.rate
        rows = torch.from_numpy(np.flatnonzero(chosen))
        chosen_x, chosen_y = inputs.take(x, rows), y[rows]
        if isinstance(mechanism, UsesPrivateNorms):  # a published variant; its plan is charged as not private
            norms = gradients.sum(chosen_x, chosen_y, FlatClip(1.0)).norms
            plan = mechanism.plan_from_private_norms(method.layers, facts, norms.cpu().numpy())
        scaling = mechanism.scaling(plan)
        total = BoundedSum.empty(plan)
        total.add(bounded_updates(gradients.sum(chosen_x, chosen_y, scaling), scaling, plan))
        own = noise_keys(keys, total.total)
        ledger.charge(plan.event, round=step, key=fingerprint(own, step))
        mean = release(total.total, plan, own, step) / plan.denominator
        _step_(weights, mean, plan, lr)
        transcript = transcript.extend(weights.clone(), mean, plan)
        if progress is not None:
            progress(step)
    _, delta = facts.budget()
    return Trained(weights, ledger.epsilon(delta, facts.accountant), plan.guarantee, facts.rounds)


def _step_(weights: Tensor, mean: Tensor, plan: ReleasePlan, lr: float) -> None:
    """Step against the released layers; what is not released stays as it is."""
    position, views = 0, plan.layers.split(weights)
    for j in plan.indices:
        size = int(plan.layers.sizes[j])
        views[j].sub_(mean[position : position + size].to(weights), alpha=lr)
        position += size
