"""A mechanism applied to one model in one run: what server and clients agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from fedlgm.errors import PrivacyError
from fedlgm.facts import RunFacts
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.base import Mechanism, UsesPrivateNorms, UsesPrivateUpdates
from fedlgm.plan import ReleasePlan
from fedlgm.transcript import Transcript


@dataclass(frozen=True)
class Method:
    """What is released in every round.

    Attributes:
        mechanism: source of each round's plan.
        layers: `mechanism.table(...)` of the model's layers.
        facts: the run's public facts, with the calibrated noise multiplier.
    """

    mechanism: Mechanism
    layers: LayerTable
    facts: RunFacts

    @classmethod
    def of(
        cls,
        module: nn.Module,
        mechanism: Mechanism,
        facts: RunFacts,
        group_by: str | Callable[[str], str] = "module",
    ) -> Method:
        """The mechanism on the layers of `module`, its noise calibrated to the budget of `facts`.

        Example:
            >>> import torch
            >>> from fedlgm import Sampling, mechanisms
            >>> facts = RunFacts(0.0, Sampling("poisson", 100, 0.1), rounds=5, epsilon=8.0, delta=1e-5)
            >>> method = Method.of(torch.nn.Linear(3, 2), mechanisms.get("snr-consistent"), facts)
            >>> method.layers.size, method.facts.noise_multiplier > 0
            (8, True)

        Args:
            module: the model; may live on the meta device.
            mechanism: the mechanism.
            facts: the run's facts; their `noise_multiplier` is replaced.
            group_by: see `LayerTable.from_module`.

        Raises:
            ConfigError, PrivacyError: see `Mechanism.calibrate`.
        """
        return cls.calibrated(mechanism, mechanism.table(LayerTable.from_module(module, group_by)), facts)

    @classmethod
    def calibrated(cls, mechanism: Mechanism, layers: LayerTable, facts: RunFacts) -> Method:
        """The mechanism on layers as it sees them, its noise calibrated to the budget of `facts`.

        Raises:
            ConfigError, PrivacyError: see `Mechanism.calibrate` and `Mechanism.check_run`.
        """
        if not facts.separate_rounds:
            mechanism.check_run(layers, facts)
        return cls(mechanism, layers, facts.with_multiplier(mechanism.calibrate(facts)))

    def plan(self, transcript: Transcript) -> ReleasePlan:
        """The next round's release; pure. It knows its place in the run where its cost and noise depend on that.

        Raises:
            PrivacyError: a mechanism whose plans are made of private data calls one protected.
        """
        plan = self.mechanism.plan(self.layers, self.facts, transcript)
        if isinstance(self.mechanism, (UsesPrivateNorms, UsesPrivateUpdates)):
            self._refuse_protected(plan)
        return plan if self.facts.separate_rounds else replace(plan, position=transcript.rounds)

    def plan_from_private_norms(self, norms: np.ndarray) -> ReleasePlan:
        """The round's plan of a published variant that looks at private layer norms (`UsesPrivateNorms`).

        Args:
            norms: as the mechanism takes them.

        Raises:
            PrivacyError: the mechanism calls a plan that is made of private data protected.
        """
        assert isinstance(self.mechanism, UsesPrivateNorms)
        plan = self.mechanism.plan_from_private_norms(self.layers, self.facts, norms)
        self._refuse_protected(plan)
        return plan

    def _refuse_protected(self, plan: ReleasePlan) -> None:
        if plan.protected:
            raise PrivacyError(
                f"{self.mechanism.name}: its plans are made of private data (UsesPrivateNorms, UsesPrivateUpdates), "
                "which no noise of theirs makes private: they must be of the type UnprotectedPlan"
            )
