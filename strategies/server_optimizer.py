"""The server's step from one global model to the next."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError

Name = Literal["sgd", "momentum", "adam"]


class ServerStep(Protocol):
    """What the strategy asks of the server's step: post-processing of released values."""

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Next model [D] from the current one and the released mean update [D]."""
        ...


class ServerOptimizer:
    """A torch optimizer that takes the released mean update as its (negative) gradient.

    Works on released values only, so it is post-processing and costs no privacy.

    Args:
        name: "sgd" (FedAvg: model + lr * mean), "momentum" (FedAvgM) or "adam" (FedAdam).
        lr: server learning rate.
        momentum: for "momentum".
    """

    def __init__(self, name: Name, lr: float, momentum: float = 0.9) -> None:
        if name not in ("sgd", "momentum", "adam"):
            raise ConfigError(f"unknown server optimizer {name!r}; known: sgd, momentum, adam")
        self._name, self._lr, self._momentum = name, lr, momentum
        self._weights: nn.Parameter | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Next model [D] from the current one and the released mean update [D]."""
        if self._name == "sgd":
            # One fused operation, which keeps lr = 1 free of rounding by the optimizer's own arithmetic.
            return torch.add(model, mean_update, alpha=self._lr)
        weights, optimizer = self._prepared(model)
        weights.data.copy_(model)
        weights.grad = -mean_update
        optimizer.step()
        return weights.detach().clone()

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint must hold."""
        if self._optimizer is None or self._weights is None:
            return {}
        return {name: torch.as_tensor(value).clone() for name, value in self._optimizer.state[self._weights].items()}

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's `state`."""
        if state:
            weights, optimizer = self._prepared(model)
            optimizer.state[weights] = {name: value.clone() for name, value in state.items()}

    def _prepared(self, model: Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        if self._weights is None or self._optimizer is None:
            self._weights = nn.Parameter(model.clone())
            if self._name == "momentum":
                self._optimizer = torch.optim.SGD([self._weights], lr=self._lr, momentum=self._momentum, foreach=False)
            else:
                self._optimizer = torch.optim.Adam([self._weights], lr=self._lr, eps=1e-3, foreach=False)
        return self._weights, self._optimizer
