"""Learning-rate schedules of the server optimizer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from strategies.server_optimizer import ResumableStep

_ROUND = "schedule.round"


class Scheduled:
    """A server optimizer whose change of the model in each round is scaled by a factor.

    The server optimizers of this library change the model in proportion to their learning rate, and
    their state does not depend on this rate. Scaling the change is therefore the same as scheduling
    the learning rate. The factors depend only on the number of the round, so scaling is
    post-processing, like the step of the optimizer.

    Args:
        step: the server optimizer whose changes are scaled.
        factors: factor of each round, [rounds].

    Example:
        >>> from fedlgm.training.rates import factors
        >>> from strategies import ServerOptimizer
        >>> step = Scheduled(ServerOptimizer("sgd", 1.0), factors("linear", 2))
        >>> model = step.step(torch.zeros(1), torch.ones(1))
        >>> step.step(model, torch.ones(1)).tolist()
        [1.5]
    """

    def __init__(self, step: ResumableStep, factors: np.ndarray) -> None:
        self.inner, self._factors, self._round = step, factors, 0

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Compute the next model [D]."""
        factor = float(self._factors[min(self._round, len(self._factors) - 1)])
        self._round += 1
        return model + factor * (self.inner.step(model, mean_update) - model)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint."""
        return {**self.inner.state(), _ROUND: torch.tensor([self._round])}

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's state."""
        self._round = int(state[_ROUND])
        self.inner.restore(model, {name: value for name, value in state.items() if name != _ROUND})
