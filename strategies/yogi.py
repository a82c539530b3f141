"""FedYogi, a server optimizer whose estimates of the squared updates change slowly, so that one
noisy round has little influence on the step sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BETA1, _BETA2 = 0.9, 0.99


class Yogi:
    """FedYogi (Reddi et al., ICLR 2021, algorithm 2), equal to Flower's `FedYogi`.

    With d the released mean update: m = 0.9 m + 0.1 d, v = v - 0.01 d^2 sign(v - d^2), model + lr m
    / (sqrt(v) + tau). Both m and v start at zero. This is post-processing of released values, so it
    costs no privacy.

    Args:
        lr: server learning rate; every coordinate moves by about this much.
        tau: constant in the denominator (degree of adaptivity), in units of the update.

    Example:
        >>> moved = Yogi(lr=0.1, tau=0.0).step(torch.zeros(2), torch.tensor([2.0, -3.0]))
        >>> [round(value, 4) for value in moved.tolist()]
        [0.1, -0.1]
    """

    def __init__(self, lr: float, tau: float = 1e-3) -> None:
        self._lr, self._tau = lr, tau
        self._mean, self._square = torch.zeros(()), torch.zeros(())

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Compute the next model [D] from the current one and the released mean update [D]."""
        square = mean_update.square()
        self._mean = torch.lerp(mean_update, self._mean.expand_as(mean_update), _BETA1)
        self._square = self._square - (1 - _BETA2) * square * torch.sign(self._square - square)
        return torch.addcdiv(model, self._mean, self._square.sqrt() + self._tau, value=self._lr)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint."""
        return {"mean": self._mean.clone(), "square": self._square.clone()}

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's `state`; the model [D] is not needed."""
        self._mean, self._square = state["mean"].clone(), state["square"].clone()
