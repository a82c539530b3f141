"""LM-DP-SGD as a mechanism: the share of each layer in an example's clipped gradient depends on the
layer's membership risk.

If the weights do not depend on the batch, a step is one Gaussian release with bounds s_l = C w_l
and the same noise C sigma_* in every layer. The weights are computed in one of these ways:

    weights = "public"       error rates of public adversaries times the layers' strength in public
                             gradients
    weights = "stale"        error rates times the layers' strength in the last release, with the
                             noise subtracted, which costs nothing
    weights = "privatised"   error rates times a noisy query of the previous batch, which is part of
                             the release and costs 1 % of the budget
    variant = "published"    Algorithm 1: strengths of the batch itself, or the batch's weights of
                             least bias (Appendix D.2); not private, and charged as such

Source: LM-DP-SGD paper, Section 4.2, Algorithm 1 and Appendix D.2; docs/guarantees.md, section
LM-DP-SGD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor
from typing_extensions import override

from fedlgm.checks import AtLeastOne, Fraction, NonNegatives, Share
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.dp_sgd import check_batch_is_seen, example_plan
from fedlgm.mechanisms.layerwise_gaussian import unprotected_plan
from fedlgm.mechanisms.lm_dp_sgd import (
    FLOOR,
    as_weights,
    bias_minimising_weights,
    check_risk,
    published_weights,
    risk_weights,
)
from fedlgm.mechanisms.mechanism import (
    Bounded,
    BoundsExamples,
    Variant,
    one_per_layer,
)
from fedlgm.mechanisms.private_plans import UsesPrivateSums
from fedlgm.planning import clipping
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.queries import LayerStrength, NoisyQuery, beside_layers
from fedlgm.planning.transcript import Transcript
from fedlgm.training.example_level.scaling import FlatClip, Reweighted

_PROVEN = (
    "every example's layers are scaled to shares of its clipped length that do not depend on the "
    "batch, before noise of a public scale is added to the sum"
)
_PUBLISHED = (
    "the layer weights are computed from the private batch, so that one example changes every "
    "other example's contribution: the sum moves by up to C sqrt(B^2 + (B + 1)^2), not C "
    "(docs/guarantees.md, section LM-DP-SGD)"
)
_JUST_BELOW = 1 - 2.0**-40
"""Factor by which weights are multiplied, because rounding could otherwise make their squares add
up to more than 1.
"""


@dataclass(frozen=True)
class _Reweighting(Bounded, BoundsExamples):
    """Options and scaling that all variants share.

    Attributes:
        bound: l2 bound C of one example's contribution.
        error_rates: error rate ER_l in [0, 0.5] of each layer's membership adversary on public data
            (see `fedlgm risk`), in the order of the layers; if empty, all layers have the same
            rate.
        emphasis: r >= 1, exponent of the error rates.
    """

    error_rates: Sequence[float] = ()
    emphasis: AtLeastOne = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_risk(self.error_rates or None, self.emphasis, len(self.error_rates))

    @override
    def scaling(self, plan: ReleasePlan) -> Scaling:
        return Reweighted(self.bound, tuple((plan.clip / self.bound).tolist()))

    def _sound_plan(
        self,
        layers: LayerTable,
        facts: RunFacts,
        weights: np.ndarray,
        multiplier: float,
        queries: tuple[NoisyQuery, ...] = (),
    ) -> ReleasePlan:
        """Make the plan for weights that do not depend on the batch."""
        clip, sigma = (
            self.bound * weights * _JUST_BELOW,
            np.full(len(layers), self.bound * multiplier),
        )
        return example_plan(layers, facts, _PROVEN, clip=clip, sigma=sigma, queries=queries)

    def _rates(self, layers: LayerTable) -> np.ndarray:
        rates = one_per_layer(
            self.name, layers, error_rates=self.error_rates or np.ones(len(layers))
        )
        return check_risk(rates, self.emphasis, len(layers))


@dataclass(frozen=True)
class LMDPSGD(_Reweighting):
    """Layer-wise MIA-risk-aware DP-SGD with weights that no example of the batch can change.

    The guarantee (epsilon, delta) holds for adding or removing one example. The weights of a step
    are proportional to strength_l ER_l^r, and their squares sum to 1.

    Attributes:
        bound: l2 bound C of one example's contribution; `_Reweighting` describes `error_rates` and
            `emphasis`.
        weights: source of the strengths: "public" (the option `strengths`), "stale" (the norm of
            each layer's mean direction in the last released mean gradient, corrected for the noise)
            or "privatised" (the noisy mean of (||g_il|| / ||g_i||)_l over the last batch, released
            with the gradients of that batch). The first step always uses `strengths`.
        strengths: public strengths of the layers (see `fedlgm risk`), in the order of the layers;
            if empty, all strengths are equal.
        floor: least weight of a layer before the weights are normalised, as a share of 1 / sqrt(L).
        share: for "privatised", the share of the budget that the noisy query takes.

    Raises:
        ConfigError: an option is out of range, or `floor` is 0 with weights that are not public.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 30, "b": 10}), RunFacts(1.0, Sampling("poisson", 1000, 0.05))
        >>> mechanism = LMDPSGD("lm-dp-sgd", weights="public", strengths=(3.0, 4.0))
        >>> plan = mechanism.plan(layers, facts, Transcript(0, ()))
        >>> plan.clip.round(4).tolist(), plan.sigma.tolist(), plan.guarantee.unit
        ([0.6, 0.8], [1.0, 1.0], 'example')
    """

    weights: Literal["public", "stale", "privatised"] = "privatised"
    strengths: NonNegatives = ()
    floor: Fraction = FLOOR
    share: Share = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights != "public" and self.floor == 0:
            raise ConfigError(
                f"{self.name}: weights = {self.weights!r} needs floor > 0, because noise may hide "
                "a whole layer"
            )

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Plan the next step's release; see `Mechanism.plan`."""
        weights = risk_weights(
            self._strengths(layers, transcript), self._rates(layers), self.emphasis, self.floor
        )
        multiplier = facts.noise_multiplier
        queries: tuple[NoisyQuery, ...] = ()
        if self.weights == "privatised":
            queries, multiplier = beside_layers(LayerStrength, layers, multiplier, self.share)
        return self._sound_plan(layers, facts, weights, multiplier, queries)

    def _strengths(self, layers: LayerTable, transcript: Transcript) -> np.ndarray:
        public = one_per_layer(self.name, layers, strengths=self.strengths or np.ones(len(layers)))
        if self.weights == "privatised":
            answer = transcript.answer(LayerStrength.name)
            return public if answer is None else answer
        if self.weights == "stale" and transcript.mean is not None and transcript.plan is not None:
            # Without the division, a layer with a small weight would get a smaller weight in every
            # round.
            last = transcript.plan
            return clipping.released_norms(transcript.mean, last) / last.clip
        return public


@dataclass(frozen=True)
class PublishedLMDPSGD(_Reweighting, UsesPrivateSums):
    """LM-DP-SGD as printed, with weights from the batch's gradients. NOT PRIVATE, and charged as
    not private.

    Sums are divided by the public expected batch size q N. The paper divides by the batch's actual
    size, which would reveal more.

    Attributes:
        bound: l2 bound C of one example's contribution; `_Reweighting` describes `error_rates` and
            `emphasis`.
        weights: "risk" for Algorithm 1 (the layers' strengths in the batch times ER_l^r), "bias"
            for the weights of least bias (Appendix D.2; negative weights count as 0), or
            "bias-greatest-root" for the greatest root of the equation in Appendix D.2, which the
            paper does not exclude. This root has the largest bias, and all its weights have the
            wrong sign, so the magnitudes of the weights are used. "bias" and "bias-greatest-root"
            do not use the error rates.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 30, "b": 10}), RunFacts(1.0, Sampling("poisson", 1000, 0.05))
        >>> plan = PublishedLMDPSGD("lm-dp-sgd").plan_from_private_norms(layers, facts, np.array([[3.0, 4.0]]))
        >>> plan.clip.round(4).tolist(), plan.event
        ([0.6, 0.8], NonPrivateDpEvent())
    """

    weights: Literal["risk", "bias", "bias-greatest-root"] = "risk"

    variant: ClassVar[Variant] = "published"

    def calibrate(self, facts: RunFacts) -> float:
        """Calibrate by Theorem 5.1. Runs in which clients add the noise are refused, because the
        server has no batch from which to plan the clients' steps.
        """
        check_batch_is_seen(self.name, facts)
        return super().calibrate(facts)

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the plan that results if all layers have the same norm. The steps of a run use
        `plan_from_private_norms` instead.
        """
        return self.plan_from_private_norms(
            layers, facts, np.ones((1 if self.weights == "risk" else 2, len(layers)))
        )

    @override
    def looks(self, layers: int) -> tuple[Scaling, ...]:
        """Return scalings to the clipped directions C_i g_il / ||g_il|| and to the unclipped
        gradients; none for "risk".
        """
        if self.weights == "risk":
            return ()
        return Reweighted(self.bound, (layers**-0.5 * _JUST_BELOW,) * layers), FlatClip(math.inf)

    @override
    def figures(self, layers: LayerTable, sums: Sequence[Tensor], examples: int) -> np.ndarray:
        """Compute A_l and B_l of Appendix D.2, [2, K]."""
        directions, gradients = (layers.split(total.double() / max(1, examples)) for total in sums)
        length = len(layers) ** 0.5
        squares = [float(u @ u) * length**2 for u in directions]
        products = [float(u @ g) * length for u, g in zip(directions, gradients, strict=True)]
        return np.array([squares, products])

    def plan_from_private_norms(
        self, layers: LayerTable, facts: RunFacts, norms: np.ndarray
    ) -> ReleasePlan:
        """Make a plan with weights from the batch's norms [B, L], or from `figures`. Its claim
        (Theorem 5.1) treats the weights as public.
        """
        sound = self._sound_plan(
            layers, facts, self._weights(layers, norms), facts.noise_multiplier
        )
        return unprotected_plan(sound, _PUBLISHED)

    def _weights(self, layers: LayerTable, norms: np.ndarray) -> np.ndarray:
        if self.weights == "risk":
            finite = norms[np.isfinite(norms).all(axis=1)]
            return published_weights(finite, self.bound, self._rates(layers), self.emphasis)
        if norms.shape != (2, len(layers)):
            raise ConfigError(
                f"{self.name}: weights = {self.weights!r} needs all examples in one place: "
                "federation.clients = 1"
            )
        if not np.isfinite(norms).all():
            return np.full(len(layers), len(layers) ** -0.5)
        squares, products = norms
        if self.weights == "bias":
            return as_weights(np.maximum(bias_minimising_weights(squares, products), 0.0))
        return as_weights(np.abs(bias_minimising_weights(squares, products, "greatest")))
