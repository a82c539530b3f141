"""What has been released so far: the only input of an adaptive plan besides public configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedlgm.plan import ReleasePlan


@dataclass(frozen=True)
class Transcript:
    """Released outputs of the past rounds.

    Attributes:
        rounds: number of rounds released so far.
        models: the most recent global models, oldest first, each [D]; at most `DEPTH`. The last one is the current
            model.
        mean: the last released noisy mean (layers, then sides), [plan.size]; None before the first round.
        plan: the plan that released `mean`.
    """

    DEPTH = 3

    rounds: int
    models: tuple[Tensor, ...]
    mean: Tensor | None = None
    plan: ReleasePlan | None = None

    @classmethod
    def start(cls, model: Tensor) -> Transcript:
        """Before the first round: the initial model is public."""
        return cls(0, (model,))

    def extend(self, model: Tensor, mean: Tensor, plan: ReleasePlan) -> Transcript:
        """After one more round."""
        models = (*self.models, model)[-self.DEPTH :]
        return replace(self, rounds=self.rounds + 1, models=models, mean=mean, plan=plan)

    @property
    def side(self) -> Tensor | None:
        """The sides' part of the last released mean, or None."""
        if self.mean is None or self.plan is None or not self.plan.sides:
            return None
        return self.mean[-sum(side.size for side in self.plan.sides) :]
