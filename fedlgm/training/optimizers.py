"""SGD and Adam over one flat vector, with the same operations as PyTorch's optimizers.

For a small model, PyTorch's optimizers take twice as long for the same steps. They also import
`torch._dynamo`, which takes two seconds in every process.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import Tensor
from torch.optim.adam import adam

from fedlgm.planning.facts import LocalTraining


class FlatOptimizer:
    """Takes the same steps as `torch.optim.SGD` or `torch.optim.Adam`.

    Args:
        name: "sgd" or "adam".
        weights: weights of any shape, float32 or float64, which `step` changes in place.
        lr: learning rate; may be changed between steps.
        momentum: momentum of "sgd".
        eps: the eps of "adam", which is added to the denominator.
        decay: factor of decoupled weight decay, as in `torch.optim.AdamW`.

    Attributes:
        trained: a tensor with 1 for each coordinate that is trained and 0 for each other
            coordinate, in the shape of the weights or of one row of the weights; None trains all
            coordinates. Only trained coordinates decay.
    """

    trained: Tensor | None = None

    def __init__(
        self,
        name: Literal["sgd", "adam"],
        weights: Tensor,
        *,
        lr: float,
        momentum: float = 0.0,
        eps: float = 1e-8,
        decay: float = 0.0,
    ) -> None:
        self._weights, self.lr, self._momentum, self._eps, self._decay = (
            weights,
            lr,
            momentum,
            eps,
            decay,
        )
        self._state: dict[str, Tensor] = {}
        if name == "adam":
            self._state = {
                "exp_avg": torch.zeros_like(weights),
                "exp_avg_sq": torch.zeros_like(weights),
            }
            self._state["step"] = torch.zeros((), device=weights.device)

    @classmethod
    def of(cls, settings: LocalTraining, weights: Tensor) -> Self:
        """Create a new optimizer with the given settings of local training."""
        decay = settings.weight_decay or 0.0
        return cls(
            settings.optimizer, weights, lr=settings.lr, momentum=settings.momentum, decay=decay
        )

    def step(self, gradient: Tensor) -> None:
        """Take one step against `gradient`, which has the shape of the weights."""
        with torch.no_grad():
            if self._decay:
                shrink = self.lr * self._decay
                self._weights.mul_(
                    1 - shrink if self.trained is None else 1 - shrink * self.trained
                )
            # An attribute with the chosen method would create a reference cycle, which would keep
            # the memory of clients until Python's garbage collector runs.
            (self._adam if "exp_avg" in self._state else self._sgd)(gradient)

    def state(self) -> dict[str, Tensor]:
        """Copy the optimizer's tensors for a checkpoint."""
        return {name: value.clone() for name, value in self._state.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Replace the optimizer's tensors with a checkpoint's `state`."""
        self._state = {name: value.clone() for name, value in state.items()}

    def _adam(self, gradient: Tensor) -> None:
        state = self._state
        adam(
            [self._weights],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            lr=self.lr,
            beta1=0.9,
            beta2=0.999,
            eps=self._eps,
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
        )

    def _sgd(self, gradient: Tensor) -> None:
        if self._momentum != 0:
            if "momentum_buffer" in self._state:
                self._state["momentum_buffer"].mul_(self._momentum).add_(gradient)
            else:
                self._state["momentum_buffer"] = gradient.clone()
            gradient = self._state["momentum_buffer"]
        self._weights.add_(gradient, alpha=-self.lr)
