"""Learning-rate schedules of the server's step: public factors, one per round."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.extension import misfit, named, users_code
from strategies.server_optimizer import ServerStep, restore, state_of

Schedule = Callable[[int, int], float]
"""(round from 1, rounds) -> factor of the learning rate."""

_NAMED: dict[str, Schedule] = {
    "linear": lambda round, rounds: 1 - (round - 1) / rounds,
    "cosine": lambda round, rounds: (1 + math.cos(math.pi * (round - 1) / rounds)) / 2,
}
_ROUND = "schedule.round"


def factors(schedule: str, rounds: int) -> np.ndarray:
    """Factor of the learning rate in every round, [rounds].

    Args:
        schedule: "linear" (from 1 towards 0), "cosine" (half a period), or your own function (round, rounds) -> factor
            as "package.module:name".
        rounds: of the whole run.

    Raises:
        ConfigError: unknown, or a function that fails or gives a negative, infinite or NaN factor.

    Example:
        >>> factors("linear", 4).tolist()
        [1.0, 0.75, 0.5, 0.25]
    """
    made = named(_NAMED, schedule, "schedule")
    wrong = misfit(made, 1, rounds) if callable(made) else "it is no function"
    if wrong:
        raise ConfigError(f"schedule {schedule!r} must be a function (round, rounds) -> factor: {wrong}")
    found = []
    for round_ in range(1, rounds + 1):
        with users_code(f"schedule {schedule!r}", made):
            value = made(round_, rounds)
        if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise ConfigError(f"schedule {schedule!r} gives {value!r} in round {round_}: a factor is at least 0")
        found.append(float(value))
    return np.array(found)


class Scheduled:
    """A server step whose move from model to model is scaled by each round's factor.

    The moves of the library's optimizers are proportional to their learning rate, and their state does not depend on
    it, so this is the optimizer with a scheduled learning rate. Factors depend on the number of the round alone: like
    the step itself they are post-processing.

    Args:
        step: the step to scale.
        factors: by round, [rounds].

    Example:
        >>> from strategies import ServerOptimizer
        >>> step = Scheduled(ServerOptimizer("sgd", 1.0), factors("linear", 2))
        >>> model = step.step(torch.zeros(1), torch.ones(1))
        >>> step.step(model, torch.ones(1)).tolist()
        [1.5]
    """

    def __init__(self, step: ServerStep, factors: np.ndarray) -> None:
        self.inner, self._factors, self._round = step, factors, 0

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Next model [D]."""
        factor = float(self._factors[min(self._round, len(self._factors) - 1)])
        self._round += 1
        return model + factor * (self.inner.step(model, mean_update) - model)

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint."""
        return {**state_of(self.inner), _ROUND: torch.tensor([self._round])}

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's state."""
        self._round = int(state[_ROUND])
        restore(self.inner, model, {name: value for name, value in state.items() if name != _ROUND})
