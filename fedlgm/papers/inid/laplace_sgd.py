"""SGD with Laplace noise on examples' gradients, for the Laplace rows of Table IV of the i.n.i.d.
noise paper.

Every layer of an example's gradient, or the whole gradient, is clipped in l1 norm. Laplace noise
with one scale per layer is added to the sum of a Poisson batch. Computing l1 norms requires the
gradient of every example, so a step takes longer than a step of DP-SGD. Recipes and studies name it
as `mechanism.name = "fedlgm.papers.inid.laplace_sgd:LaplaceSGD"`.

Source: i.n.i.d. noise paper, Section VI-C, Theorem 5, Table IV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from typing_extensions import override

from fedlgm.errors import ConfigError
from fedlgm.mechanisms.dp_sgd import example_plan
from fedlgm.mechanisms.group_noise import GroupNoise
from fedlgm.mechanisms.mechanism import Bounded, BoundsExamples
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training.example_level.norms import L1
from fedlgm.training.example_level.scaling import PerLayerClip

_PROVEN = (
    "every example's gradient is bounded in l1 norm before Laplace noise of a public scale is "
    "added to the sum of a Poisson batch"
)


@dataclass(frozen=True)
class L1Clip(PerLayerClip):
    """Scaling by f_ij = min(1, c_j / ||g_ij||_1), which clips every layer to a separate l1 bound.

    Example:
        >>> L1Clip((1.0, 2.0)).norm.order
        1
    """

    norm: ClassVar[L1] = L1()


@dataclass(frozen=True)
class LaplaceSGD(Bounded, BoundsExamples):
    """Per-layer l1 clipping of examples' gradients and Laplace noise.

    The guarantee (epsilon, delta) holds for adding or removing one example. With delta = 0, the
    steps are composed by basic composition.

    Attributes:
        bound: l1 bound C of one example's contribution, spread evenly over the layers.
        rule: "global" (the whole gradient is clipped, with one scale), or the rule that spreads the
            noise over the layers: "inid", "spr" or "iid" (see `GroupNoise`).

    Raises:
        ConfigError: an option is out of range.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 8, "b": 1}), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> plan = LaplaceSGD("laplace-sgd").plan(layers, facts, Transcript(0, ()))
        >>> plan.clip.tolist(), plan.sigma.round(3).tolist(), plan.guarantee.unit, plan.family
        ([0.5, 0.5], [1.5, 3.0], 'example', 'laplace')
    """

    rule: Literal["global", "inid", "spr", "iid"] = "inid"

    @property
    def _noise(self) -> GroupNoise:
        return GroupNoise(
            f"laplace-{'iid' if self.rule == 'global' else self.rule}", bound=self.bound
        )

    def table(self, layers: LayerTable) -> LayerTable:
        """Return the layers; for rule "global", merge them into one layer."""
        return layers.as_single_layer() if self.rule == "global" else layers

    def calibrate(self, facts: RunFacts) -> float:
        """Compute the multiplier of a step, the reciprocal of sum_m C_m / b_m (see
        `calibrate_laplace`).

        Raises:
            ConfigError: clients add the noise to their local steps.
        """
        if facts.steps is not None:
            raise ConfigError(
                f"{self.name}: clients' own steps have Gaussian noise: use trust = 'central'"
            )
        return self._noise.calibrate(facts)

    @override
    def check_run(self, layers: LayerTable, facts: RunFacts) -> None:
        self._noise.check_run(layers, facts)

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the step's plan, which is the same in every step."""
        of_clients = self._noise.plan(layers, facts, transcript)
        return example_plan(
            layers,
            facts,
            _PROVEN,
            clip=of_clients.clip,
            sigma=of_clients.sigma,
            family=of_clients.family,
        )

    @override
    def scaling(self, plan: ReleasePlan) -> Scaling:
        return L1Clip(tuple(np.where(plan.released, plan.clip, 0.0).tolist()))
