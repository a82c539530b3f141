"""Describes the cost of a release in words, from its accounting event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dp_accounting import dp_event

from fedlgm.privacy.events import AllocationDpEvent, as_gaussian, pure_epsilon
from fedlgm.privacy.guarantee import Relation, Unit

Law = Literal["gaussian", "laplace", "pure", "none", "free"]


@dataclass(frozen=True)
class Cost:
    """The cost of one release, as its accounting event states it.

    Attributes:
        law: distribution of the release's noise: "gaussian", "laplace", "pure" (unknown, but with a
            known pure epsilon), "none" (no protection, so no bound) or "free" (the release adds
            nothing to the cost of the releases before it).
        figure: noise multiplier of Gaussian noise, or pure epsilon of other releases; 0 if neither
            is known.
        rate: probability of a unit's participation on which the cost relies; 1 if sampling does not
            amplify. For random allocation, the share of the rounds in which a unit takes part.
        steps: number of mechanisms with this noise and rate in the release.
        participations: number of the `steps` rounds in which a unit takes part by a secret draw
            (random allocation); 0 without random allocation.
    """

    law: Law
    figure: float = 0.0
    rate: float = 1.0
    steps: int = 1
    participations: int = 0

    @classmethod
    def of(cls, event: dp_event.DpEvent) -> Cost:
        """The cost that a ledger's event states.

        >>> from fedlgm.privacy.events import gaussian_event, repeat_event
        >>> Cost.of(repeat_event(gaussian_event(0.6, sampling_rate=0.1), 5))
        Cost(law='gaussian', figure=0.6, rate=0.1, steps=5, participations=0)
        """
        steps, rate = 1, 1.0
        if isinstance(event, AllocationDpEvent):
            taken, rounds = event.participations, event.rounds
            inner = cls.of(event.event)
            return cls(inner.law, inner.figure, taken / rounds, rounds, taken)
        while isinstance(event, dp_event.SelfComposedDpEvent | dp_event.PoissonSampledDpEvent):
            if isinstance(event, dp_event.SelfComposedDpEvent):
                steps *= event.count
            else:
                rate *= event.sampling_probability
            event = event.event
        match as_gaussian(event):
            case dp_event.GaussianDpEvent(multiplier):
                return cls("gaussian", float(multiplier), rate, steps)
            case dp_event.LaplaceDpEvent():
                return cls("laplace", pure_epsilon(event), rate, steps)
            case dp_event.RandomizedResponseDpEvent():
                return cls("pure", pure_epsilon(event), rate, steps)
            case dp_event.NoOpDpEvent():
                return cls("free")
        return cls("none")

    @property
    def noise(self) -> str:
        """Noise of the release, in words.

        >>> Cost("gaussian", 0.519406).noise, Cost("laplace", 0.25).noise, Cost("none").noise
        ('Gaussian, multiplier 0.5194', 'Laplace, epsilon 0.25', 'none that protects')
        """
        return {
            "gaussian": f"Gaussian, multiplier {self.figure:.4g}",
            "laplace": f"Laplace, epsilon {self.figure:.4g}",
            "pure": f"epsilon {self.figure:.4g}",
            "none": "none that protects",
            "free": "costs nothing more",
        }[self.law]

    @property
    def sampling(self) -> str:
        """Sampling on which the cost relies, in words.

        >>> Cost("gaussian", 1.0, rate=0.1).sampling, Cost("gaussian", 1.0).sampling
        ('probability 0.1', 'none counted on')
        """
        if self.law in ("none", "free"):
            return "-"
        if self.participations:
            return f"{self.participations} of {self.steps} rounds"
        return f"probability {self.rate:.4g}" if self.rate < 1 else "none counted on"

    def sentence(self, unit: Unit) -> str:
        """Noise, sampling and steps in one line.

        Args:
            unit: the sampled unit.

        >>> Cost("gaussian", 0.6, 0.1, 5).sentence("example")
        'Gaussian, multiplier 0.6; each example with probability 0.1; 5 steps'
        >>> Cost("gaussian", 2.0).sentence("client")
        'Gaussian, multiplier 2'
        >>> Cost("gaussian", 1.0, 0.1, 100, participations=10).sentence("client")
        'Gaussian, multiplier 1; each client in 10 of 100 rounds, drawn in secret'
        """
        if self.participations:
            return f"{self.noise}; each {unit} in {self.sampling}, drawn in secret"
        sampled = [f"each {unit} with {self.sampling}"] if self.rate < 1 else []
        return "; ".join(
            [self.noise, *sampled, *([f"{self.steps} steps"] if self.steps > 1 else [])]
        )


_MOVED: dict[Relation, str] = {
    "add-remove": "one {} more or less",
    "replace-one": "one {} replaced by another",
    "zero-out": "one {} whose contributions become zero",
}


def multiplier_explained(unit: Unit, relation: Relation) -> str:
    """The meaning of the noise multiplier in a row of the ledger.

    >>> multiplier_explained("client", "add-remove")
    'multiplier: noise divided by the largest change that one client more or less can make, all layers together'
    """
    moved = _MOVED[relation].format(unit)
    return f"multiplier: noise divided by the largest change that {moved} can make, all layers together"
