"""LaDP-FL as published (Algorithms 2 to 4), in which the unprotected weights of a client determine
its releases. NOT PRIVATE.

Source: LaDP-FL paper, Sections V and VI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedlgm.checks import NonNegative, Positive
from fedlgm.mechanisms.ladp_frame import (
    bound_by_training,
    require,
    theorem3_constant,
    theorem3_delta,
)
from fedlgm.mechanisms.ladp_scores import layer_divergences
from fedlgm.mechanisms.mechanism import Mechanism, Variant
from fedlgm.mechanisms.private_plans import UsesPrivateUpdates
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, UnprotectedPlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee

_PUBLISHED = (
    "unselected layers are uploaded as they are, and selection and noise scales follow the "
    "client's private weights (docs/guarantees.md, section LaDP-FL)"
)
_LEAST_SCORE = 1e-12  # in place of the paper's division by zero: a finite but useless noise scale


@dataclass(frozen=True)
class PublishedLaDP(Mechanism, UsesPrivateUpdates):
    """Noise sigma_j = c Delta_f / (epsilon P_j) with P_j = min(KL, B), Delta_f = 2 eta E G_c and c
    / B of Theorem 3.

    Every client computes P_j from its weights and adds the noise itself (local trust). The recipe's
    epsilon and delta are the budget of one release; the paper charges q epsilon for a release. This
    class deviates from the paper in two points: clients have equal weights, and their sum is
    divided by the public cohort size; and a client makes E epochs (the paper's loop, taken
    literally, makes E + 1 epochs).

    Attributes:
        threshold: R >= 0; layers with a norm below R are not selected, and are uploaded without
            noise.
        score_cap: largest score B > 0.
        estimate: whether scores are computed. With False, every selected layer's score is B, as in
            the paper's ablation.
        batch_share: q in the paper's claim q T epsilon: batch size divided by the number of local
            examples, 50 / 500 in the paper.

    Example:
        >>> from fedlgm import LocalTraining, Sampling
        >>> budget = {"epsilon": 1.0, "delta": 1e-5, "training": LocalTraining(lr=0.1, epochs=5, gradient_clip=2.0)}
        >>> facts = RunFacts(0.0, Sampling("poisson", 10, 1.0), "replace-one", "local", **budget)
        >>> multiplier = PublishedLaDP("ladp").calibrate(facts)  # noise over eta E G_c = 1
        >>> round(multiplier / theorem3_constant(1.0, 1e-5), 6)
        2.0
    """

    variant: ClassVar[Variant] = "published"

    threshold: NonNegative = 0.0
    score_cap: Positive = 2.0
    estimate: bool = True
    batch_share: Positive = 0.1

    def calibrate(self, facts: RunFacts) -> float:
        """Return the multiplier 2 (c/B) / epsilon, the noise at P = B divided by eta E G_c. This
        multiplier does not depend on the number of rounds.
        """
        epsilon, delta = require(facts, self.name).budget()
        self._half_sensitivity(facts)
        return 2 * theorem3_constant(epsilon, delta) / epsilon

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the common plan of the round, which each client replaces by its own plan."""
        epsilon, delta = require(facts, self.name).budget()
        reached = theorem3_delta(epsilon, delta)
        reason = _PUBLISHED
        if reached > delta:
            reason += (
                f"; besides, the noise constant reaches delta = {reached:.3g} only, not {delta:g}"
            )
        return UnprotectedPlan(
            layers,
            np.full(len(layers), np.inf),
            # the noise at P = B
            np.full(len(layers), self._half_sensitivity(facts) * facts.noise_multiplier),
            facts,
            Guarantee("none", reason),
            # A participation costs q epsilon. Over T participations, this adds up to the paper's q
            # T epsilon.
            claim={"epsilon": self.batch_share * epsilon},
        )

    def plan_from_private_update(
        self, plan: ReleasePlan, update: Tensor, model: Tensor
    ) -> tuple[ReleasePlan, dict[str, np.ndarray]]:
        """Run Algorithms 2 to 4 for one client, whose weights determine selection, scores and
        noise.

        Returns:
            The client's plan, and "score" (P_j), "sigma", "selected" (0 or 1) and "noise_norm"
            (sigma_j sqrt(d_j)), each [K].
        """
        layers, local = plan.layers, model + update
        selected = layers.norms(local).numpy() >= self.threshold
        scores = np.full(len(layers), self.score_cap)
        if self.estimate:
            # A contribution with NaN or Inf is discarded later; its layers get the least noise.
            divergences = np.nan_to_num(layer_divergences(layers, local, model), nan=self.score_cap)
            scores = np.clip(divergences, min(_LEAST_SCORE, self.score_cap), self.score_cap)
        # (c/B) Delta_f / epsilon
        least = self._half_sensitivity(plan.facts) * plan.facts.noise_multiplier
        sigma = np.where(selected, least * self.score_cap / scores, 0.0)
        client_plan = UnprotectedPlan(
            layers,
            plan.clip,
            sigma,
            plan.facts,
            plan.guarantee,
            released=plan.released,
            claim=plan.claim,
        )
        noise_norm = sigma * np.sqrt(layers.sizes)
        notes = {
            "score": scores,
            "sigma": sigma,
            "selected": selected.astype(np.float64),
            "noise_norm": noise_norm,
        }
        return client_plan, notes

    def _half_sensitivity(self, facts: RunFacts) -> float:
        return bound_by_training(require(facts, self.name).training)
