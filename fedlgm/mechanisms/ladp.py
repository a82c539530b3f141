"""LaDP-FL in a sound form: only selected layers are released, with less noise in layers that have
moved more.

As in the paper, layers are selected by their norms, and noise is proportional to 1 / score. But
here the norms and scores are those of released models, so no value derived from unreleased data
decides how much noise is added. `fedlgm.papers.ladp.published` runs the paper's algorithm
literally.

Source: LaDP-FL paper, Sections V and VI.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedlgm.checks import BelowOne, NonNegative, Positive, check_positive
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.ladp_frame import theorem3_constant, theorem3_delta
from fedlgm.mechanisms.ladp_scores import kl_score, layer_changes, layer_divergences
from fedlgm.mechanisms.mechanism import Bounded
from fedlgm.planning import clipping
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee

__all__ = [
    "LaDP",
    "kl_score",
    "layer_changes",
    "layer_divergences",
    "theorem3_constant",
    "theorem3_delta",
]

_SOUND = "selection and noise scales come from released models; every contribution is bounded and noised or not sent"


@dataclass(frozen=True)
class LaDP(Bounded):
    """Releases layer j if its norm is at least R, with noise proportional to 1 / P_j, where the
    score P_j measures how far the layer has moved.

    With A the selected layers, s_j = S / sqrt(|A|) and the run's multiplier sigma_*,

        sigma_j = sigma_* sqrt(sum_(k in A) (s_k P_k)^2) / P_j,

    so sum_j s_j^2 / sigma_j^2 = 1 / sigma_*^2 whatever the scores are. Only ratios of scores
    matter: scores are divided by their geometric mean in A before they are clipped to [score_floor,
    score_cap]. Layers outside A are not uploaded. If A is empty, the round releases nothing. Such a
    round is still charged if any earlier round released something, because the decision to release
    nothing may depend on earlier releases.

    Scores change slowly: P_j is the product of the last round's score to the power of `memory` and
    this round's score to the power of 1 - memory. A single release says little about how far a
    layer moves, and noise scales that jump from round to round reduce accuracy
    (docs/results/ladp.md).

    Attributes:
        bound: l2 bound S of one client's update.
        threshold: R >= 0; layers with a norm below R are not selected.
        score: "change" (mean squared change of the layer's weights) or "kl" (divergence of the
            softmaxes of its weights), between the last two released models. A layer's score is
            multiplied by the share of its last released update's squared norm that is not noise.
            Otherwise noisier layers would seem to move more and get less noise in the next round,
            so that the scales would oscillate.
        score_floor: least score p_min > 0.
        score_cap: largest score B > 0.
        memory: weight in [0, 1) of the last round's scores; 0, as in the paper, ignores those
            scores.
        estimate: whether scores are estimated. With False, every selected layer's score is 1, as in
            the paper's ablation.

    Example:
        >>> import torch
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 4, "b": 1}), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> models = (torch.zeros(5), torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0]))  # the last two that were released
        >>> mechanism = LaDP("ladp", memory=0.0)
        >>> plan = mechanism.plan(layers, facts, Transcript(1, models))
        >>> plan.notes["score"].tolist(), plan.sigma.round(3).tolist(), round(plan.effective_multiplier, 6)
        ([0.5, 2.0], [5.831, 1.458], 2.0)
    """

    threshold: NonNegative = 0.0
    score: Literal["change", "kl"] = "change"
    score_floor: Positive = 0.5
    score_cap: Positive = 2.0
    memory: BelowOne = 0.95
    estimate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.name, self.score_floor, self.score_cap)

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan from the last two released models and the last plan."""
        selected = layers.norms(transcript.models[-1]).numpy() >= self.threshold
        if not selected.any():
            reason = f"no layer's norm reaches threshold = {self.threshold:g}: nothing is released"
            nothing = np.full(len(layers), math.inf)
            return ReleasePlan(
                layers, np.zeros(len(layers)), nothing, facts, Guarantee("proven", reason)
            )
        scores = self._scores(layers, transcript, selected)
        clip = np.where(selected, self.bound / math.sqrt(selected.sum()), 0.0)
        total = math.sqrt(float(np.sum((clip * scores)[selected] ** 2)))
        sigma = np.where(selected, facts.noise_multiplier * total / scores, math.inf)
        notes = {"score": scores, "selected": selected.astype(np.float64)}
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", _SOUND), notes=notes)

    def _scores(
        self, layers: LayerTable, transcript: Transcript, selected: np.ndarray
    ) -> np.ndarray:
        """Compute P_j of every layer, [K], from released outputs only. All scores are 1 if
        `estimate` is False, or before a second model is released.
        """
        raw = self._movement(layers, transcript) if self.estimate else None
        if raw is None:
            return np.ones(len(layers))
        moved = selected & (raw > 0)
        raw = raw / np.exp(np.mean(np.log(raw[moved]))) if moved.any() else np.ones(len(layers))
        fresh = np.clip(raw, self.score_floor, self.score_cap)
        slow = _last_scores(transcript, len(layers)) ** self.memory * fresh ** (1 - self.memory)
        return np.clip(slow, self.score_floor, self.score_cap)

    def _movement(self, layers: LayerTable, transcript: Transcript) -> np.ndarray | None:
        if len(transcript.models) < 2:
            return None
        measure = layer_changes if self.score == "change" else layer_divergences
        raw = measure(layers, transcript.models[-1], transcript.models[-2])
        if transcript.mean is not None and transcript.plan is not None:
            raw = raw * clipping.signal_share(transcript.mean, transcript.plan)
        return raw


def _last_scores(transcript: Transcript, layers: int) -> np.ndarray:
    """Recover the last round's scores from the last plan, divided by their geometric mean, [K]. The
    score is 1 for layers that the last round did not release.
    """
    scores, plan = np.ones(layers), transcript.plan
    if plan is not None and plan.released.any():
        inverse = 1 / plan.sigma[plan.released]
        scores[plan.released] = inverse / np.exp(np.mean(np.log(inverse)))
    return scores


def check_range(owner: str, score_floor: float, score_cap: float) -> None:
    """Refuse limits of scores that are not positive, or a least score that exceeds the largest
    score.

    Raises:
        ConfigError: the limits are refused; the message names the mechanism `owner`.
    """
    check_positive(owner, score_floor=score_floor, score_cap=score_cap)
    if score_floor > score_cap:
        raise ConfigError(f"{owner}: score_floor = {score_floor} exceeds score_cap = {score_cap}")
