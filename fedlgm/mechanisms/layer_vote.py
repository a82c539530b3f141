"""A differentially private choice of layers: the clients vote once, and the layers with the most
votes get the budget of all later rounds.

Source: DP-SAPF (arXiv 2605.30312), in which clients vote over the layers that a LoRA adapter may
adapt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedlgm.checks import Count, Share
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.mechanism import Bounded, released_scales
from fedlgm.planning.allocation import shares
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable, factor_of
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.queries import LayerVote, beside_layers
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee

_PROVEN = "layers are chosen by a noisy vote, a part of the first release; every contribution is bounded, then noised"


@dataclass(frozen=True)
class VotedLayers(Bounded):
    """The first round releases all layers and a noisy vote; later rounds train and release only the
    layers that win the vote.

    A client votes for the quarter of the layers in which its update is longest
    (`fedlgm.planning.queries.LayerVote`). The vote takes `share` of the first round's budget, so
    every round costs one release with the run's multiplier. If the model has adapters, only the
    layers of adapters compete. All other layers, such as a new head, are released in every round.
    If the first round is void, the vote takes place in the next round.

    Attributes:
        bound: l2 bound S of one client's update; each of n released layers has S / sqrt(n).
        winners: number of layers that win the vote, at least 1.
        share: share of the first round's budget that the vote takes, in (0, 1).
        rule: allocation rule of the noise, one of `fedlgm.planning.allocation.names()`.

    Raises:
        ConfigError: an option is outside its range or the rule is unknown; in `plan`, there are
            fewer candidates than winners.

    Example:
        >>> import torch
        >>> from fedlgm import Sampling
        >>> layers = LayerTable.from_sizes({"a": 2, "b": 2, "c": 2})
        >>> facts, start = RunFacts(1.0, Sampling("poisson", 100, 0.1)), Transcript.start(torch.zeros(6))
        >>> first = VotedLayers("layer-vote").plan(layers, facts, start)
        >>> first.released.tolist(), [noisy.query.name for noisy in first.queries]
        ([True, True, True], ['layer-vote'])
        >>> released = torch.tensor([0.0] * 6 + [0.1, 0.9, 0.2])  # the mean of the layers, then the share of votes
        >>> VotedLayers("layer-vote").plan(layers, facts, start.extend(released[:6], released, first)).released.tolist()
        [False, True, False]
    """

    winners: Count = 1
    share: Share = 0.5
    rule: str = "snr-consistent"

    def __post_init__(self) -> None:
        super().__post_init__()
        shares(self.rule, [1.0], [1])

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan. The plan after the vote depends on the released vote; later plans
        release the same layers as the plan before.
        """
        guarantee = Guarantee("proven", _PROVEN)
        if transcript.plan is None or transcript.is_unanswered(LayerVote.name):
            self._candidates(layers)
            queries, multiplier = beside_layers(
                LayerVote, layers, facts.noise_multiplier, self.share
            )
            every = np.ones(len(layers), dtype=bool)
            clip, sigma = released_scales(self.rule, self.bound, layers, every, multiplier)
            return ReleasePlan(layers, clip, sigma, facts, guarantee, queries=queries)
        votes = transcript.answer(LayerVote.name)
        released = transcript.plan.released if votes is None else self._winners(layers, votes)
        clip, sigma = released_scales(
            self.rule, self.bound, layers, released, facts.noise_multiplier
        )
        return ReleasePlan(layers, clip, sigma, facts, guarantee, freezes=True)

    def _candidates(self, layers: LayerTable) -> np.ndarray:
        """Return which layers compete, bool [K]."""
        adapters = np.array(
            [any(factor_of(slot.name) for slot in layer.slots) for layer in layers.layers]
        )
        candidates = adapters if adapters.any() else np.ones(len(layers), dtype=bool)
        if self.winners > candidates.sum():
            raise ConfigError(
                f"{self.name}: winners = {self.winners} of only {candidates.sum()} layers that "
                "compete"
            )
        return candidates

    def _winners(self, layers: LayerTable, votes: np.ndarray) -> np.ndarray:
        """Return which layers to release, bool [K]: the candidates with the most votes, and the
        layers that do not compete.
        """
        candidates = self._candidates(layers)
        released = ~candidates
        released[
            np.argsort(np.where(candidates, -votes, math.inf), kind="stable")[: self.winners]
        ] = True
        return released
