"""The server's step from one global model to the next."""

from __future__ import annotations

from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.extension import is_reference, load_object, shown_name
from fedlgm.training import FlatOptimizer

Name = Literal["sgd", "momentum", "adam"]


class ServerStep(Protocol):
    """What the strategy asks of the server's step: post-processing of released values.

    One of a user's own needs `step` alone; with `state` and `restore`, as `ServerOptimizer` has them, an interrupted
    run continues where it was, without them its state starts afresh.
    """

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Next model [D] from the current one and the released mean update [D]."""
        ...


def server_step(choice: Any, lr: float, momentum: float) -> ServerStep:
    """A server step.

    Args:
        choice: a name of `ServerOptimizer`; "package.module:name" of a class or function (lr, momentum) -> step, or of
            a step; or a step itself.
        lr: server learning rate.
        momentum: for those that take it.

    Raises:
        ConfigError: unknown, or no step.
    """
    if isinstance(choice, str) and not is_reference(choice):
        return ServerOptimizer(choice, lr, momentum)  # type: ignore[arg-type]
    found = load_object(choice, "server optimizer") if isinstance(choice, str) else choice
    label = shown_name(choice)
    if (not hasattr(found, "step") and callable(found)) or isinstance(found, type):
        try:
            found = found(lr, momentum)
        except TypeError as error:
            raise ConfigError(f"server optimizer {label} is made by (lr, momentum): {error}") from error
    if not callable(getattr(found, "step", None)):
        raise ConfigError(f"server optimizer {label} has no step(model, mean_update)")
    return cast(ServerStep, found)


def state_of(step: ServerStep) -> dict[str, Tensor]:
    """Tensors that a checkpoint must hold of a server step; none of one without `state`."""
    return step.state() if hasattr(step, "state") else {}


def restore(step: ServerStep, model: Tensor, state: dict[str, Tensor]) -> None:
    """Continue from a checkpoint's state."""
    if hasattr(step, "restore"):
        step.restore(model, state)


class ServerOptimizer:
    """An optimizer that takes the released mean update as its (negative) gradient.

    Works on released values only, so it is post-processing and costs no privacy.

    Args:
        name: "sgd" (FedAvg: model + lr * mean), "momentum" (FedAvgM) or "adam" (FedAdam with PyTorch's Adam: bias
            correction, betas 0.9 and 0.999; every coordinate moves by about `lr`, so 1 is far too much).
        lr: server learning rate.
        momentum: for "momentum".
        eps: for "adam".
    """

    def __init__(self, name: Name, lr: float, momentum: float = 0.9, eps: float = 1e-3) -> None:
        if name not in ("sgd", "momentum", "adam"):
            raise ConfigError(f"unknown server optimizer {name!r}; known: sgd, momentum, adam")
        self._name, self._lr, self._momentum, self._eps = name, lr, momentum, eps
        self._optimizer: FlatOptimizer | None = None
        self._weights = torch.empty(0)

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Next model [D] from the current one and the released mean update [D]."""
        if self._name == "sgd":
            # One fused operation, which keeps lr = 1 free of rounding by the optimizer's own arithmetic.
            return torch.add(model, mean_update, alpha=self._lr)
        optimizer = self._prepared(model)
        self._weights.copy_(model)
        optimizer.step(-mean_update)
        return self._weights.clone()

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint must hold."""
        return {} if self._optimizer is None else self._optimizer.state()

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's `state`."""
        if state:
            self._prepared(model).restore(state)

    def _prepared(self, model: Tensor) -> FlatOptimizer:
        if self._optimizer is None:
            self._weights = model.clone()
            kind: Literal["sgd", "adam"] = "adam" if self._name == "adam" else "sgd"
            self._optimizer = FlatOptimizer(kind, self._weights, lr=self._lr, momentum=self._momentum, eps=self._eps)
        return self._optimizer
