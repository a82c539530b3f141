"""DP-SGD: each step releases one noisy sum of clipped per-example gradients. The unit of privacy is
an example.

If the server adds the noise, a round in the facts is one step, the population is the number of
examples, and the sampling rate is the probability that an example is in the step's batch. If
clients add the noise (`facts.steps`), a round consists of a client's local steps. In both cases the
plan gives the bounds and the noise of one step's sum.

Source: Abadi et al. (CCS 2016); Bu et al. (NeurIPS 2023) for Auto-S, equal to NSGD (Yang et al.,
2022); Xia et al. (AAAI 2023) for DP-PSAC; SNR-consistent allocation paper, Table 2, for the
allocations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from fedlgm.checks import check_known
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.layerwise_gaussian import (
    FlatGaussian,
    LayerwiseGaussian,
    NoPrivacy,
    PublishedMedClip,
    unprotected_plan,
)
from fedlgm.mechanisms.mechanism import BoundsExamples
from fedlgm.planning.allocation import names as allocations
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.training.example_level.scaling import (
    LEAST_STABILISER,
    PSAC,
    AutoS,
    FlatClip,
    PerLayerClip,
)

_PROVEN = "every example's gradient is bounded before noise of a public scale is added to the sum of a Poisson batch"
_EXACT = "in exact arithmetic (a batch's gradients are computed and, unless sums are exact, added up in float32)"
_MEDCLIP = (
    "MedClip derives bounds and noise scales from the private layer norms of the batch's "
    "examples, and a noise scale can be read off a large layer (docs/guarantees.md, section "
    "MedClip)"
)
_STYLES = ("flat", "per-layer")


def example_plan(
    layers: LayerTable, facts: RunFacts, reason: str = _PROVEN, **release: Any
) -> ReleasePlan:
    """Make the plan of a step in which the trainer bounds the examples' gradients.

    Args:
        layers: the mechanism's table.
        facts: the run's facts.
        reason: the reason why the step is private, for the plan's guarantee.
        release: the fields `clip`, `sigma` and, optionally, `queries` and `notes` of `ReleasePlan`.

    Raises:
        ConfigError: the server does not draw a step's examples by Poisson sampling or allocation,
            or clients add the noise although the facts have no `steps`.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 3}), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> plan = example_plan(layers, facts, clip=[0.5], sigma=[1.0])
        >>> plan.bounded_by, plan.guarantee.unit, plan.effective_multiplier
        ('trainer', 'example', 2.0)
    """
    drawn = facts.sampling.scheme in ("poisson", "allocation")
    if not facts.steps and (facts.noised_by.uploads_released or not drawn):
        raise ConfigError(
            "an example-level step draws its examples by Poisson sampling or allocation, and the server (trust "
            "= 'central') or each client (facts.steps) adds the noise"
        )
    guarantee = Guarantee("proven", f"{reason}, {_EXACT}", unit="example")
    return ReleasePlan(layers, facts=facts, guarantee=guarantee, bounded_by="trainer", **release)


@dataclass(frozen=True)
class DPSGD(LayerwiseGaussian, BoundsExamples):
    """DP-SGD: per-example gradients are clipped, and Gaussian noise is added to their sum.

    Raises:
        ConfigError: an option is out of range, the style is a separate mechanism, or the style is
            'flat' and an option of 'per-layer' is given.

    Example:
        >>> from fedlgm.planning.facts import Sampling
        >>> facts = RunFacts(1.0, Sampling("poisson", 1000, 0.05), rounds=100)
        >>> layers = LayerTable.from_sizes({"a": 30, "b": 10})
        >>> mechanism = DPSGD("dp-sgd", style="per-layer", allocation="snr-consistent")
        >>> plan = mechanism.plan(mechanism.table(layers), facts, Transcript(0, ()))
        >>> plan.guarantee.unit, mechanism.scaling(plan).bound <= 1
        ('example', True)

    Attributes:
        bound: l2 bound C of one example's contribution.
        style: "flat" (the whole gradient is clipped to C) or "per-layer" (the gradient of each
            layer is clipped to a bound of that layer).
        allocation: for "per-layer", the rule that spreads the noise over the layers (see
            `fedlgm.planning.allocation`).
        clip: for "per-layer", the rule that spreads C over the layers. This option and the
            following ones have the same meaning as in `LayerwiseGaussian`, with examples instead of
            clients.
    """

    style: str = "flat"
    allocation: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style in ("auto-s", "nsgd", "dp-psac"):
            name = "auto-s" if self.style == "nsgd" else self.style
            raise ConfigError(
                f"{self.name}: {self.style!r} is a separate mechanism: set mechanism.name = "
                f"{name!r}"
            )
        check_known("style", self.style, _STYLES, self.name)
        check_known("allocation", self.allocation, allocations(), self.name)
        if self.style == "flat" and (self.allocation != "uniform" or self.clip != "eq"):
            raise ConfigError(
                f"{self.name}: style 'flat' has one bound and one noise scale: allocation and clip "
                "belong to style 'per-layer'"
            )

    def table(self, layers: LayerTable) -> LayerTable:
        """Return the layers; for style "flat", merge them into one layer."""
        return layers if self.style == "per-layer" else layers.as_single_layer()

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the plan of the next step."""
        return example_plan(layers, facts, **self._release(layers, facts, transcript))

    @override
    def scaling(self, plan: ReleasePlan) -> Scaling:
        if self.style == "flat":
            return FlatClip(float(plan.clip[0]))
        return PerLayerClip(tuple(np.where(plan.released, plan.clip, 0.0).tolist()))

    @property
    def _allocation(self) -> str:
        return self.allocation


def check_batch_is_seen(name: str, facts: RunFacts) -> None:
    """Refuse a variant that plans every step from its batch if clients add the noise to their
    steps.

    Raises:
        ConfigError: the facts have `steps`, so clients add the noise.
    """
    if facts.steps is not None:
        raise ConfigError(
            f"{name}: variant = 'published' plans every step from its batch: use trust = 'central'"
        )


@dataclass(frozen=True)
class PublishedDPSGD(DPSGD, PublishedMedClip):
    """Per-layer DP-SGD with MedClip as printed: the batch's norms determine bounds and noise. NOT
    PRIVATE, and charged as not private.

    The paper takes the medians "across the dataset" and does not say at which weights of the model.
    Here the medians are taken over the batch's examples at the weights of the step, just as
    `PublishedMedClip` takes them over the cohort. The batch is processed twice, because the bounds
    must be known before clipping.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 3, "b": 2}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> plan = PublishedDPSGD("dp-sgd").plan_from_private_norms(layers, facts, np.array([[1.0, 3.0]]))
        >>> plan.clip.tolist(), plan.event, plan.claim["event"]["type"]
        ([0.25, 0.75], NonPrivateDpEvent(), 'PoissonSampledDpEvent')
    """

    style: str = "per-layer"
    clip: Literal["eq", "med"] = "med"

    def calibrate(self, facts: RunFacts) -> float:
        """Calibrate as for DP-SGD. Runs in which clients add the noise are refused, because the
        server has no batch from which to plan the clients' steps.
        """
        check_batch_is_seen(self.name, facts)
        return super().calibrate(facts)

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the plan that results if all layers of all examples have the same norm. The steps of
        a run use `plan_from_private_norms` instead.
        """
        return PublishedMedClip.plan(self, layers, facts, transcript)

    def plan_from_private_norms(
        self, layers: LayerTable, facts: RunFacts, norms: np.ndarray
    ) -> ReleasePlan:
        """Make a plan with bounds from the examples' norms [B, K]; its claim treats the bounds as
        public.
        """
        clip, sigma = self._from_private(layers, facts, norms)
        return unprotected_plan(example_plan(layers, facts, clip=clip, sigma=sigma), _MEDCLIP)


@dataclass(frozen=True)
class PlainSGD(NoPrivacy, BoundsExamples):
    """SGD on Poisson batches without bounds or noise, for comparisons.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 3}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> plan = PlainSGD("sgd").plan(layers, facts, Transcript(0, ()))
        >>> plan.clip.tolist(), plan.sigma.tolist(), plan.protected
        ([inf], [0.0], False)
    """

    def table(self, layers: LayerTable) -> LayerTable:
        """Merge all layers into one."""
        return layers.as_single_layer()

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the step's plan, which is the same in every step and has the guarantee "none"."""
        plan = super().plan(layers, facts, transcript)
        return replace(
            plan, guarantee=replace(plan.guarantee, unit="example"), bounded_by="trainer"
        )

    def scaling(self, plan: ReleasePlan) -> Scaling:
        """Return a scaling that leaves the gradients unchanged."""
        return FlatClip(math.inf)


@dataclass(frozen=True)
class _Normalised(FlatGaussian, BoundsExamples):
    """Base of mechanisms that scale the whole gradient of an example to a norm below C, with one
    noise scale.

    Attributes:
        bound: l2 bound C of one example's contribution. The papers absorb C into the learning rate.
        stabiliser: constant, at least 1e-6, that limits how much gradients with a small norm are
            enlarged.
    """

    stabiliser: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.stabiliser) and self.stabiliser >= LEAST_STABILISER):
            raise ConfigError(
                f"{self.name}: stabiliser must be at least {LEAST_STABILISER:g}, got "
                f"{self.stabiliser}"
            )

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the step's plan, which is the same in every step."""
        clip = np.array([self.bound])
        return example_plan(layers, facts, clip=clip, sigma=clip * facts.noise_multiplier)


@dataclass(frozen=True)
class NormalisedSGD(_Normalised):
    """Auto-S, equal to NSGD: g_i is multiplied by C / (||g_i|| + gamma).

    Attributes:
        stabiliser: gamma.

    Example:
        >>> import torch
        >>> from fedlgm import Sampling
        >>> facts, mechanism = RunFacts(1.0, Sampling("poisson", 100, 0.1)), NormalisedSGD("auto-s", stabiliser=1.0)
        >>> plan = mechanism.plan(LayerTable.from_sizes({"all": 5}), facts, Transcript(0, ()))
        >>> mechanism.scaling(plan).factors(torch.tensor([[1.0], [3.0]])).round(decimals=4).tolist()
        [[0.5], [0.25]]
    """

    @override
    def scaling(self, plan: ReleasePlan) -> Scaling:
        return AutoS(float(plan.clip[0]), self.stabiliser)


@dataclass(frozen=True)
class PSACSGD(_Normalised):
    """DP-PSAC: g_i is multiplied by C / (||g_i|| + r / (||g_i|| + r)).

    Attributes:
        stabiliser: r.

    Example:
        >>> import torch
        >>> from fedlgm import Sampling
        >>> facts = RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> mechanism = PSACSGD("dp-psac", bound=3.0, stabiliser=1.0)
        >>> plan = mechanism.plan(LayerTable.from_sizes({"all": 5}), facts, Transcript(0, ()))
        >>> factors = mechanism.scaling(plan).factors(torch.tensor([[1.0]]))  # 3 / (1 + 1 / (1 + 1))
        >>> factors.round(decimals=4).tolist()
        [[2.0]]
    """

    stabiliser: float = 0.1

    @override
    def scaling(self, plan: ReleasePlan) -> Scaling:
        return PSAC(float(plan.clip[0]), self.stabiliser)
