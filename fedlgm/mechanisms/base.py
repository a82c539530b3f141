"""What every mechanism is: a pure plan made of public configuration and past released outputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from torch import Tensor

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.layers import LayerTable
from fedlgm.plan import Budget, ReleasePlan
from fedlgm.privacy.guarantee import Relation, Trust
from fedlgm.training.base import LocalTraining
from fedlgm.transcript import Transcript

Variant = Literal["sound", "published"]


@dataclass(frozen=True)
class Setting:
    """Public facts of a run, for mechanisms whose noise is made of them.

    Attributes:
        epsilon: the run's budget, as the recipe states it.
        delta: its delta.
        rounds: number T of rounds.
        trust: who adds the noise.
        training: what a client does locally.
    """

    epsilon: float
    delta: float
    rounds: int
    trust: Trust
    training: LocalTraining


@dataclass(frozen=True)
class Mechanism:
    """Base of all mechanisms.

    Subclasses are frozen dataclasses whose fields are the options a recipe may set. `plan` must be pure: equal
    arguments give equal plans, and no client's data is among them.

    Attributes:
        name: registered name.
        variant: "sound", or "published" for a paper's text taken literally where that is not private.
    """

    variants: ClassVar[tuple[Variant, ...]] = ("sound",)
    needs_private_norms: ClassVar[bool] = False
    plans_from_private_updates: ClassVar[bool] = False
    setting: ClassVar[Setting | None] = None  # an instance's own after `under`

    name: str
    variant: Variant = "sound"

    def __post_init__(self) -> None:
        if self.variant not in self.variants:
            raise ConfigError(f"{self.name} has no variant {self.variant!r}; known: {', '.join(self.variants)}")

    def under(self, setting: Setting) -> Self:
        """The same mechanism in a run with the given public facts; most mechanisms never look at them."""
        told = copy.copy(self)
        object.__setattr__(told, "setting", setting)
        return told

    def table(self, layers: LayerTable) -> LayerTable:
        """The layers as this mechanism sees them (the flat mechanism sees one)."""
        return layers

    def calibrate(
        self, epsilon: float, delta: float, *, steps: int, sampling_rate: float, relation: Relation, accountant: str
    ) -> float:
        """sigma_* of a round such that `steps` rounds stay within (epsilon, delta); see `privacy.calibrate`."""
        return privacy.accounting.calibrate(
            epsilon, delta, steps=steps, sampling_rate=sampling_rate, relation=relation, accountant=accountant
        )

    def costs(self, layers: LayerTable, rounds: int) -> np.ndarray:
        """(sigma_* / sigma_eff)^2 of each round: its cost beside a release at the budget's multiplier, [rounds].

        To be given by mechanisms whose plans differ from the budget's multiplier; clients under local trust go by it.

        Args:
            layers: `self.table(...)` of the model's layers.
            rounds: number T of rounds.
        """
        return np.ones(rounds)

    def plan(self, layers: LayerTable, budget: Budget, transcript: Transcript) -> ReleasePlan:
        """The next round's release.

        Args:
            layers: `self.table(...)` of the model's layers.
            budget: what one round may spend.
            transcript: past released outputs.
        """
        raise NotImplementedError

    def plan_from_private_norms(self, layers: LayerTable, budget: Budget, norms: np.ndarray) -> ReleasePlan:
        """Plan of a published variant that looks at the cohort's private norms [clients, K] first. NOT PRIVATE."""
        raise PrivateDataNotUsed(f"{self.name} does not look at private norms")

    def plan_from_private_update(
        self, plan: ReleasePlan, update: Tensor, model: Tensor
    ) -> tuple[ReleasePlan, dict[str, np.ndarray]]:
        """A client's own plan of a published variant that looks at its raw update first. NOT PRIVATE.

        Args:
            plan: the round's common plan.
            update: the client's raw update [D].
            model: the global model that it started from [D].

        Returns:
            The plan by which this client bounds and noises (its guarantee is "none"), and figures by name, each [K],
            which are logged as diagnostics.
        """
        raise PrivateDataNotUsed(f"{self.name} does not look at private updates")


class PrivateDataNotUsed(TypeError):
    """Raised when private data is offered to a mechanism that has no business with it."""


def check_positive(owner: str, **values: float) -> None:
    """Refuse options that are not finite and positive, naming the option."""
    for option, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise ConfigError(f"{owner}: {option} must be finite and positive, got {value}")
