"""Flat clipping or water-filling, as the clients choose by a vote in the first round."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedlgm.checks import Share
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.layerwise_gaussian import FlatGaussian
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.queries import CutVote, beside_layers
from fedlgm.planning.transcript import Transcript


@dataclass(frozen=True)
class VotedFilling(FlatGaussian):
    """One bound S and equal noise for the whole update. A noisy vote in the first round decides how
    clients cut updates whose norm exceeds S.

    Each client of the first round cuts its update in both ways and votes for the cut that lowers
    the loss on its own data more (`fedlgm.planning.queries.CutVote`). If the released share of
    votes for `fedlgm.planning.filling` exceeds one half, all later rounds are the same as with
    `water-filling`; otherwise they are the same as with `gaussian`. These two mechanisms have the
    same noise and charge, and the choice depends only on a released value. The first round is the
    same as with `gaussian`, but has 1 / sqrt(1 - share) times the noise (1.41 times by default),
    because the vote takes `share` of the round's budget. If the first round is void, the vote takes
    place in the next round.

    Attributes:
        bound: l2 bound S of one client's update.
        share: share of the first round's budget that the vote takes, in (0, 1).

    Raises:
        ConfigError: an option is outside its range; in `plan`, the unit is a user with several
            clients.

    Example:
        >>> import torch
        >>> from fedlgm import Sampling
        >>> mechanism, facts = VotedFilling("voted-filling"), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> layers, start = mechanism.table(LayerTable.from_sizes({"a": 3, "b": 2})), Transcript.start(torch.zeros(5))
        >>> first = mechanism.plan(layers, facts, start)
        >>> released = torch.tensor([0.0] * 5 + [0.3])  # the mean of the layers, then the vote: 80 % for water-filling
        >>> later = mechanism.plan(layers, facts, start.extend(torch.zeros(5), released, first))
        >>> first.fills, later.fills, round(first.effective_multiplier, 6), later.effective_multiplier
        ((), (3, 2), 2.0, 2.0)
    """

    share: Share = 0.5

    def check_run(self, layers: LayerTable, facts: RunFacts) -> None:
        """Refuse noise that is correlated over rounds, because correlated noise needs the same
        number of values in every round.

        Raises:
            ConfigError: the noise is correlated over rounds.
        """
        super().check_run(layers, facts)
        if facts.noise is not None:
            raise ConfigError(
                f"{self.name}: only the first round has a vote, but correlated noise needs equal "
                "rounds"
            )

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan. The plan after the vote depends on the released vote; later plans
        make the same choice as the plan before.

        Raises:
            ConfigError: a user has several clients.
        """
        if facts.sampling.of is not None:
            raise ConfigError(
                f"{self.name}: a user's clients may disagree, so they have no vote: use "
                "water-filling"
            )
        flat, parts = super().plan(layers, facts, transcript), layers.layers[0].parts
        if len(parts) == 1:
            return flat
        if transcript.plan is None or transcript.is_unanswered(CutVote.name):
            queries, multiplier = beside_layers(CutVote, layers, facts.noise_multiplier, self.share)
            return replace(flat, sigma=flat.clip * multiplier, queries=queries)
        vote = transcript.answer(CutVote.name)
        filling = bool(transcript.plan.fills) if vote is None else vote[0] > 0.5
        return replace(flat, fills=parts) if filling else flat
