"""A sound form of LaDP-FL in which every client selects and scores the layers that it releases.

As in the paper, every client selects and scores layers of its update. But selection and scores
depend only on strengths of the layers that the client first releases with noise, for a share of the
round's budget.

Source: LaDP-FL paper, Sections V and VI.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from fedlgm.checks import Positive, Rate, Share
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.ladp import check_range
from fedlgm.mechanisms.mechanism import Bounded, PlansFromAnswers, released_scales
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.queries import LayerStrength, beside_layers
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee

_PROVEN = (
    "each client selects and scores its layers by an answer that is bounded and noised first; "
    "the answer and the layers are charged together"
)


@dataclass(frozen=True)
class ClientLaDP(Bounded, PlansFromAnswers):
    """Each client releases the layers that are strongest according to its noisy answer, with noise
    proportional to 1 / P_j.

    The answer holds each layer's share of the update's norm. It is a vector of norm 1
    (`fedlgm.planning.queries.LayerStrength`), and its noise takes the share `share` of the round's
    budget. A client releases ceil(keep K) layers. P_j is the layer's noisy strength divided by the
    mean strength of the selected layers, clipped to [score_floor, score_cap]. The noise of the
    layers is scaled so that their release takes exactly the rest of the budget, whatever the scores
    are. The mechanism needs local trust.

    The paper scores layers by a divergence. For small changes, this divergence is approximately
    proportional to a second moment of the layer's change. The strength used here corresponds to the
    root of this moment, and is bounded without clipping.

    Attributes:
        bound: l2 bound S of one client's update; each of k selected layers has S / sqrt(k).
        share: share of the round's budget that the answer takes, in (0, 1).
        keep: share of the layers that a client releases, in (0, 1].
        score_floor: least score P_j, above 0.
        score_cap: largest score P_j.

    Raises:
        ConfigError: an option is outside its range; in `plan`, the trust is not local.

    Example:
        >>> from fedlgm import Sampling
        >>> mechanism, layers = ClientLaDP("client-ladp", share=0.19), LayerTable.from_sizes({"a": 4, "b": 1})
        >>> facts = RunFacts(2.0, Sampling("poisson", 100, 0.1), "replace-one", "local")
        >>> common = mechanism.plan(layers, facts, Transcript(0, ()))
        >>> own = mechanism.plan_from_answer(common, np.array([0.2, 0.9]))
        >>> own.released.tolist(), own.clip.tolist(), round(own.effective_multiplier, 6)  # 2 / sqrt(0.81)
        ([False, True], [0.0, 1.0], 2.222222)
    """

    share: Share = 0.2
    keep: Rate = 0.5
    score_floor: Positive = 0.5
    score_cap: Positive = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.name, self.score_floor, self.score_cap)

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the common plan of the round, with the query and equal noise in all layers. Each
        client replaces this plan by its own plan, at the same cost.

        Raises:
            ConfigError: trust is not local.
        """
        if facts.trust != "local":
            raise ConfigError(
                f"{self.name}: each client chooses its own layers, so it adds its own noise: set "
                "privacy.trust = 'local'"
            )
        queries, multiplier = beside_layers(
            LayerStrength, layers, facts.noise_multiplier, self.share
        )
        every = np.ones(len(layers), dtype=bool)
        clip, sigma = released_scales("uniform", self.bound, layers, every, multiplier)
        return ReleasePlan(
            layers, clip, sigma, facts, Guarantee("proven", _PROVEN), queries=queries
        )

    @override
    def plan_from_answer(self, plan: ReleasePlan, answer: np.ndarray) -> ReleasePlan:
        layers, count = plan.layers, math.ceil(self.keep * len(plan.layers))
        selected = np.zeros(len(layers), dtype=bool)
        selected[np.argsort(-answer, kind="stable")[:count]] = True
        strengths = np.maximum(answer, 0.0)
        mean = strengths[selected].mean()
        scores = strengths / mean if mean > 0 else np.ones(len(layers))
        scores = np.clip(scores, self.score_floor, self.score_cap)
        clip = np.where(selected, self.bound / math.sqrt(count), 0.0)
        multiplier = plan.facts.noise_multiplier / math.sqrt(1 - self.share)
        total = math.sqrt(float(np.sum((clip * scores) ** 2)))
        sigma = np.where(selected, multiplier * total / scores, math.inf)
        return ReleasePlan(layers, clip, sigma, plan.facts, plan.guarantee)
