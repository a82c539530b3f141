"""The layer-wise Gaussian mechanism (LGM) with all noise allocations, the flat Gaussian mechanism,
and training without privacy.

Source: SNR-consistent allocation paper: Definition 3.5 (mechanism), Section 4 (allocations),
Section 5.1 (EqClip, MedClip).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fedlgm import privacy
from fedlgm.checks import Fraction, NonNegatives, Positive, Share
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.mechanism import (
    Bounded,
    Mechanism,
    Variant,
    one_per_layer,
)
from fedlgm.mechanisms.private_plans import UsesPrivateNorms
from fedlgm.planning import clipping
from fedlgm.planning.allocation import shares, spread
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, UnprotectedPlan
from fedlgm.planning.queries import (
    AuxiliaryQuery,
    BelowBound,
    BelowShare,
    NoisyQuery,
    beside_layers,
)
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Claim, Guarantee

_PROVEN = (
    "every contribution is bounded before noise of a public scale is added to the sum of all layers"
)
_MEDCLIP = (
    "MedClip derives bounds and noise scales from the clients' private layer norms, and a noise "
    "scale can be read off a large layer (docs/guarantees.md, section MedClip)"
)
_BITS: dict[str, type[AuxiliaryQuery]] = {"quantile": BelowBound, "shares": BelowShare}
"""For each value of `norms`, the query whose answers determine the bounds."""


@dataclass(frozen=True)
class LayerwiseGaussian(Bounded):
    """Per-layer bounds s_j and noise sigma_j with sum_j s_j^2 / sigma_j^2 = 1 / sigma_*^2.

    Attributes:
        bound: total l2 bound S of one client's update.
        clip: rule that spreads S over the layers: "eq" (s_j = S / sqrt(K)) or "med" (s_j is
            proportional to a layer norm m_j).
        norms: source of the norms m_j for clip = "med". "public" takes `public_norms`. "stale"
            takes the norms of the last released update, corrected for its noise. "quantile" adapts
            each bound to a noisy count of the clients that stay within it; the counts take a share
            of the budget. "shares" counts by each layer's share of a client's total norm, which
            does not depend on S.
        public_norms: m_j for "public" and for the first round of "stale"; sqrt(d_j) if empty.
        floor: for "public" and "stale", the least bound of a layer as a share of S / sqrt(K).
        quantile: for "quantile" and "shares", the share of clients that should stay below a layer's
            bound.
        quantile_rate: for "quantile" and "shares", learning rate of the geometric update of the
            bounds.
        quantile_share: for "quantile" and "shares", share of the budget that the noisy counts take.

    Raises:
        ConfigError: an option is out of range, or `floor` is 0 with norms = 'stale'.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 100, "b": 900}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> plan = LayerwiseGaussian("snr-consistent").plan(layers, facts, Transcript(0, ()))
        >>> plan.shares.round(4).tolist(), plan.sigma.round(4).tolist(), round(plan.effective_multiplier, 6)
        ([0.25, 0.75], [1.4142, 0.8165], 1.0)
    """

    clip: Literal["eq", "med"] = "eq"
    norms: Literal["public", "stale", "quantile", "shares"] = "stale"
    public_norms: NonNegatives = ()
    floor: Fraction = 0.1
    quantile: Share = 0.5
    quantile_rate: Positive = 0.2
    quantile_share: Share = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip == "med" and self.norms == "stale" and self.floor == 0:
            raise ConfigError(
                f"{self.name}: norms = 'stale' needs floor > 0, because a released layer may hold "
                "only noise"
            )

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan with the bounds of EqClip or of a sound MedClip."""
        return ReleasePlan(
            layers,
            facts=facts,
            guarantee=Guarantee("proven", _PROVEN),
            **self._release(layers, facts, transcript),
        )

    def _release(
        self, layers: LayerTable, facts: RunFacts, transcript: Transcript
    ) -> dict[str, Any]:
        """Compute the bounds, the noise scales and the queries of the round."""
        multiplier = facts.noise_multiplier
        queries: tuple[NoisyQuery, ...] = ()
        if self.clip == "med" and self.norms in _BITS:
            queries, multiplier = beside_layers(
                _BITS[self.norms], layers, multiplier, self.quantile_share
            )
        clip = self._bounds(layers, transcript)
        sigma = spread(shares(self._allocation, clip, layers.sizes), clip, multiplier)
        return {"clip": clip, "sigma": sigma, "queries": queries}

    @property
    def _allocation(self) -> str:
        return self.name

    def _bounds(self, layers: LayerTable, transcript: Transcript) -> np.ndarray:
        if self.clip == "eq":
            return clipping.eq_clip(self.bound, len(layers))
        if self.norms in _BITS:
            below, plan = transcript.answer(_BITS[self.norms].name), transcript.plan
            if below is None or plan is None:
                return clipping.eq_clip(self.bound, len(layers))
            return clipping.next_quantile_bounds(
                plan.clip, below, self.bound, self.quantile, self.quantile_rate
            )
        if self.norms == "stale" and transcript.mean is not None and transcript.plan is not None:
            return clipping.med_clip(
                self.bound, clipping.released_norms(transcript.mean, transcript.plan), self.floor
            )
        public = one_per_layer(
            self.name, layers, public_norms=self.public_norms or np.sqrt(layers.sizes)
        )
        return clipping.med_clip(self.bound, public, self.floor)


@dataclass(frozen=True)
class PublishedMedClip(LayerwiseGaussian, UsesPrivateNorms):
    """MedClip as printed in the paper, with bounds and noise from the unprotected layer norms of
    the cohort. NOT PRIVATE, and charged as not private.

    Source: SNR-consistent allocation paper, Section 5.1, rule (2).

    Raises:
        ConfigError: `clip` is not 'med'.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 3, "b": 2}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> mechanism, private = PublishedMedClip("uniform", clip="med"), np.array([[1.0, 3.0], [1.0, 5.0], [9.0, 3.0]])
        >>> plan = mechanism.plan_from_private_norms(layers, facts, private)
        >>> plan.clip.tolist(), plan.event
        ([0.25, 0.75], NonPrivateDpEvent())
    """

    variant: ClassVar[Variant] = "published"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip != "med":
            raise ConfigError(
                f"{self.name}: only clip = 'med' has a published variant; EqClip is sound as "
                "published"
            )

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the plan that results if all layers of all clients have the same norm. The rounds of
        a run use `plan_from_private_norms` instead.
        """
        return self.plan_from_private_norms(layers, facts, np.ones((1, len(layers))))

    def plan_from_private_norms(
        self, layers: LayerTable, facts: RunFacts, norms: np.ndarray
    ) -> ReleasePlan:
        """Make a plan with bounds from the cohort's norms [clients, K]; its claim treats the bounds
        as public.
        """
        clip, sigma = self._from_private(layers, facts, norms)
        return unprotected_plan(
            ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", _PROVEN)), _MEDCLIP
        )

    def _from_private(
        self, layers: LayerTable, facts: RunFacts, norms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute bounds and noise scales from unprotected norms, [K] each. Clients whose norms are
        not finite are ignored.
        """
        finite = norms[np.isfinite(norms).all(axis=1)]
        clip = clipping.med_clip_published(
            self.bound, finite if len(finite) else np.ones((1, len(layers)))
        )
        clip = np.maximum(clip, clipping.LEAST_CLIP)
        return clip, spread(
            shares(self._allocation, clip, layers.sizes), clip, facts.noise_multiplier
        )


@dataclass(frozen=True)
class FlatGaussian(Bounded):
    """The standard Gaussian mechanism, which treats the whole update as one layer with bound S and
    noise scale S sigma_*.

    Attributes:
        bound: l2 bound S of one client's update.

    Example:
        >>> from fedlgm import Sampling
        >>> mechanism, layers = FlatGaussian("gaussian", bound=0.5), LayerTable.from_sizes({"a": 3, "b": 2})
        >>> facts = RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> plan = mechanism.plan(mechanism.table(layers), facts, Transcript(0, ()))
        >>> plan.sigma.tolist(), plan.effective_multiplier
        ([1.0], 2.0)
    """

    def table(self, layers: LayerTable) -> LayerTable:
        """Merge all layers into one."""
        return layers.as_single_layer()

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan, which is the same in every round."""
        clip = np.array([self.bound])
        return ReleasePlan(
            layers, clip, clip * facts.noise_multiplier, facts, Guarantee("proven", _PROVEN)
        )


@dataclass(frozen=True)
class NoPrivacy(Mechanism):
    """FedAvg without any protection: no bounds, no noise.

    Example:
        >>> from fedlgm import Sampling
        >>> facts = RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> plan = NoPrivacy("none").plan(LayerTable.from_sizes({"a": 3}), facts, Transcript(0, ()))
        >>> plan.sigma.tolist(), plan.guarantee.status, plan.protected
        ([0.0], 'none', False)
    """

    def calibrate(self, facts: RunFacts) -> float:
        """Return 0, because there is no noise, whatever the budget."""
        return 0.0

    def check_run(self, layers: LayerTable, facts: RunFacts) -> None:
        """Accept any participation. Refuse correlated noise, because this mechanism adds no noise.

        Raises:
            ConfigError: the noise is correlated over rounds.
        """
        if facts.noise is not None:
            raise ConfigError(
                f"{self.name}: this mechanism adds no noise that could be correlated over rounds"
            )

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan, which is the same in every round and has the guarantee "none"."""
        guarantee = Guarantee("none", "this run asks for no privacy")
        unbounded = np.full(len(layers), math.inf)
        return UnprotectedPlan(layers, unbounded, np.zeros(len(layers)), facts, guarantee)


def unprotected_plan(sound: ReleasePlan, reason: str) -> UnprotectedPlan:
    """Make a plan that is charged as not private. Its claim, the charge that the method's authors
    would state, is the event of `sound`.

    Args:
        sound: the plan as if its bounds were public.
        reason: the reason why the plan is not private.

    Example:
        >>> from fedlgm import Sampling
        >>> facts = RunFacts(2.0, Sampling("poisson", 100, 1.0))
        >>> sound = FlatGaussian("gaussian").plan(LayerTable.from_sizes({"a": 3}), facts, Transcript(0, ()))
        >>> unprotected_plan(sound, "its bound is a private norm").claim
        {'event': {'type': 'GaussianDpEvent', 'noise_multiplier': 2.0}}
    """
    guarantee = Guarantee("none", reason, unit=sound.guarantee.unit)
    claim: Claim = {"event": privacy.events.encode(sound.event)}
    return UnprotectedPlan(
        sound.layers,
        sound.clip,
        sound.sigma,
        sound.facts,
        guarantee,
        bounded_by=sound.bounded_by,
        claim=claim,
    )
