"""LaDP-FL: noise by layer, in selected layers only, less of it where a layer has moved more.

Two variants. "sound", the default, keeps the idea (selection by norm, noise in proportion to 1 / score) and takes both
from released models, so that nothing private shapes the release. "published" is the paper's Algorithms 2 to 4, in which
every client decides by its private weights and uploads unselected layers as they are: it is not private.

Source: LaDP-FL paper, Sections V and VI.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from torch import Tensor

from fedlgm import clipping
from fedlgm.errors import ConfigError
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.base import Mechanism, PrivateDataNotUsed, Setting, Variant, check_positive
from fedlgm.mechanisms.ladp_frame import bound_by_training, require, theorem3_constant, theorem3_delta
from fedlgm.mechanisms.ladp_scores import kl_score, layer_changes, layer_divergences
from fedlgm.plan import Budget, ReleasePlan, Side
from fedlgm.privacy.guarantee import Guarantee, Relation
from fedlgm.transcript import Transcript

__all__ = ["LaDP", "kl_score", "layer_changes", "layer_divergences", "theorem3_constant", "theorem3_delta"]

_PUBLISHED = (
    "unselected layers are uploaded as they are, and selection and noise scales follow the client's private weights "
    "(docs/guarantees.md, section LaDP-FL)"
)
_SOUND = "selection and noise scales come from released models; every contribution is bounded and noised or not sent"
_LEAST_SCORE = 1e-12  # where the paper divides by zero: noise beyond any use, but still a number


@dataclass(frozen=True)
class LaDP(Mechanism):
    """Layer j is released if its norm is at least R, with noise proportional to 1 / P_j, P_j a score of its movement.

    Sound variant. With A the selected layers, s_j = S / sqrt(|A|) and the run's multiplier sigma_*,

        sigma_j = sigma_* sqrt(sum_(k in A) (s_k P_k)^2) / P_j,

    so sum_j s_j^2 / sigma_j^2 = 1 / sigma_*^2 whatever the scores are. Only ratios of scores matter; unless `relative`
    is off they are taken over their geometric mean in A before they are cut to [score_floor, score_cap]. Layers outside
    A are not uploaded. If A is empty nothing is released in that round; it is charged all the same once anything
    has been released, since its being skipped may then follow from that.

    Published variant (local trust). sigma_j = c Delta_f / (epsilon P_j) with P_j = min(KL, B), Delta_f = 2 eta E G_c
    and c / B of Theorem 3, all per client and from its own weights; the recipe's epsilon and delta are those of one
    release, of which the paper charges q epsilon. Two things are the house's, not the paper's: clients weigh alike,
    over the public cohort size, and a client makes E epochs (the paper's loop, taken literally, makes E + 1).

    Attributes:
        bound: sound: l2 bound S of one client's update.
        threshold: R >= 0; layers of smaller norm are not selected.
        score: sound: "change" (mean squared change of a weight) or "kl" (divergence of the softmaxes), between the last
            two released models.
        score_floor: sound: p_min > 0.
        score_cap: B > 0.
        relative: sound: whether scores are measured in units of their geometric mean.
        denoise: sound: whether a score keeps only the share of the last released update's energy that is not noise.
            Without it noisier layers seem to move more, get less noise next time, and the scales oscillate.
        estimate: False is the paper's ablation: every selected layer's score is 1 (sound) or B (published).
        local_share: sound: share of the budget in [0, 1) spent on a noisy sum of the clients' own layer movements,
            which then is the score of the next round; 0 uses released models.
        sensitivity: published: "epochs" (Delta_f = 2 eta E G_c, as printed) or "steps" (2 eta steps G_c, which bounds
            what a client's steps can do).
        steps: published: optimizer steps of the busiest client in a round, needed for sensitivity = "steps".
        batch_share: published: q = batch size / local examples of the claim q T epsilon; the paper's 50 / 500.
    """

    variants: ClassVar[tuple[Variant, ...]] = ("sound", "published")

    bound: float = 1.0
    threshold: float = 0.0
    score: Literal["change", "kl"] = "change"
    score_floor: float = 0.5
    score_cap: float = 2.0
    relative: bool = True
    denoise: bool = True
    estimate: bool = True
    local_share: float = 0.0
    sensitivity: Literal["epochs", "steps"] = "epochs"
    steps: int = 0
    batch_share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(
            self.name,
            bound=self.bound,
            score_floor=self.score_floor,
            score_cap=self.score_cap,
            batch_share=self.batch_share,
        )
        for option, value, known in (
            ("score", self.score, ("change", "kl")),
            ("sensitivity", self.sensitivity, ("epochs", "steps")),
        ):
            if value not in known:
                raise ConfigError(f"{self.name}: unknown {option} {value!r}; known: {', '.join(known)}")
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ConfigError(f"{self.name}: threshold must be finite and at least 0, got {self.threshold}")
        if not 0 <= self.local_share < 1:
            raise ConfigError(f"{self.name}: local_share must lie in [0, 1), got {self.local_share}")
        if self.variant == "sound" and self.score_floor > self.score_cap:
            raise ConfigError(f"{self.name}: score_floor = {self.score_floor} exceeds score_cap = {self.score_cap}")
        if self.sensitivity == "steps" and self.steps < 1:
            raise ConfigError(f"{self.name}: sensitivity = 'steps' needs steps, the optimizer steps of a round")

    @property
    def plans_from_private_updates(self) -> bool:  # type: ignore[override]
        """True for the published variant: every client plans by its own weights."""
        return self.variant == "published"

    def under(self, setting: Setting) -> Self:
        """See `Mechanism.under`; what the published variant needs is checked here, before anything runs."""
        told = super().under(setting)
        if self.variant == "published":
            require(setting, self.name)
            told._half_sensitivity()
        return told

    def calibrate(
        self, epsilon: float, delta: float, *, steps: int, sampling_rate: float, relation: Relation, accountant: str
    ) -> float:
        """sigma_* of a round; published: 2 (c/B) / epsilon, the noise over eta E G_c at P = B, whatever the rounds."""
        if self.variant == "published":
            return 2 * theorem3_constant(epsilon, delta) / epsilon
        return super().calibrate(
            epsilon, delta, steps=steps, sampling_rate=sampling_rate, relation=relation, accountant=accountant
        )

    def plan(self, layers: LayerTable, budget: Budget, transcript: Transcript) -> ReleasePlan:
        """The round's plan; for the published variant only its frame, which clients replace by their own plans."""
        if self.variant == "published":
            return self._frame(layers, budget)
        selected = layers.norms(transcript.models[-1]).numpy() >= self.threshold
        guarantee = Guarantee("proven", _SOUND, budget.relation, budget.trust)
        if not selected.any():
            reason = f"no layer's norm reaches threshold = {self.threshold:g}: nothing is released"
            nothing = np.full(len(layers), math.inf)
            guarantee = Guarantee("proven", reason, budget.relation, budget.trust)
            return ReleasePlan(layers, np.zeros(len(layers)), nothing, budget, guarantee)
        scores = self._scores(layers, transcript, selected)
        clip = np.where(selected, self.bound / math.sqrt(selected.sum()), 0.0)
        multiplier, sides = budget.noise_multiplier, tuple[Side, ...]()
        if self.local_share > 0:
            sides = (Side(clipping.MOVEMENT_SIDE, len(layers), 1.0, multiplier / math.sqrt(self.local_share)),)
            multiplier /= math.sqrt(1 - self.local_share)
        total = math.sqrt(float(np.sum((clip * scores)[selected] ** 2)))
        sigma = np.where(selected, multiplier * total / scores, math.inf)
        notes = {"score": scores, "selected": selected.astype(np.float64)}
        return ReleasePlan(layers, clip, sigma, budget, guarantee, sides=sides, notes=notes)

    def plan_from_private_update(
        self, plan: ReleasePlan, update: Tensor, model: Tensor
    ) -> tuple[ReleasePlan, dict[str, np.ndarray]]:
        """Algorithms 2 to 4 for one client: selection, scores and noise from its own weights. NOT PRIVATE.

        Returns:
            The client's plan, and "score" (P_j), "sigma", "selected" (0 or 1) and "noise_norm" (sigma_j sqrt(d_j)),
            each [K].
        """
        if self.variant != "published":
            raise PrivateDataNotUsed(f"{self.name}: the sound variant does not look at private updates")
        layers, local = plan.layers, model + update
        selected = layers.norms(local).numpy() >= self.threshold
        scores = np.full(len(layers), self.score_cap)
        if self.estimate:
            # A contribution with NaN or Inf is discarded later; its layers get the least noise.
            divergences = np.nan_to_num(layer_divergences(layers, local, model), nan=self.score_cap)
            scores = np.clip(divergences, min(_LEAST_SCORE, self.score_cap), self.score_cap)
        least = self._half_sensitivity() * plan.budget.noise_multiplier  # (c/B) Delta_f / epsilon
        sigma = np.where(selected, least * self.score_cap / scores, 0.0)
        own = ReleasePlan(
            layers, plan.clip, sigma, plan.budget, plan.guarantee, released=plan.released, claim=plan.claim
        )
        noise_norm = sigma * np.sqrt(layers.sizes)
        notes = {"score": scores, "sigma": sigma, "selected": selected.astype(np.float64), "noise_norm": noise_norm}
        return own, notes

    def _frame(self, layers: LayerTable, budget: Budget) -> ReleasePlan:
        setting = require(self.setting, self.name)
        reached = theorem3_delta(setting.epsilon, setting.delta)
        reason = _PUBLISHED
        if reached > setting.delta:
            reason += f"; besides, the noise constant reaches delta = {reached:.3g} only, not {setting.delta:g}"
        return ReleasePlan(
            layers,
            np.full(len(layers), math.inf),
            np.full(len(layers), self._half_sensitivity() * budget.noise_multiplier),  # the noise at P = B
            budget,
            Guarantee("none", reason, budget.relation, budget.trust),
            claim=self._claim(setting),
        )

    def _claim(self, setting: Setting) -> dict[str, Any]:
        """A participation costs q epsilon: added up over T participations it is the paper's q T epsilon."""
        return {"epsilon": self.batch_share * setting.epsilon}

    def _half_sensitivity(self) -> float:
        setting = require(self.setting, self.name)
        return bound_by_training(setting.training, self.steps if self.sensitivity == "steps" else None)

    def _scores(self, layers: LayerTable, transcript: Transcript, selected: np.ndarray) -> np.ndarray:
        """P_j of every layer, from released outputs only; 1 where nothing is known yet, [K]."""
        raw = self._movement(layers, transcript) if self.estimate else None
        if raw is None:
            return np.ones(len(layers))
        if self.relative:
            moved = selected & (raw > 0)
            raw = raw / np.exp(np.mean(np.log(raw[moved]))) if moved.any() else np.ones(len(layers))
        return np.clip(raw, self.score_floor, self.score_cap)

    def _movement(self, layers: LayerTable, transcript: Transcript) -> np.ndarray | None:
        if self.local_share > 0:
            side = transcript.side
            return None if side is None else np.maximum(side.double().numpy(), 0.0)
        if len(transcript.models) < 2:
            return None
        measure = layer_changes if self.score == "change" else layer_divergences
        raw = measure(layers, transcript.models[-1], transcript.models[-2])
        if self.denoise and transcript.mean is not None and transcript.plan is not None:
            raw = raw * clipping.signal_share(transcript.mean, transcript.plan)
        return raw
