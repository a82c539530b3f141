"""Server optimizers, which compute the next global model from the current model and the released
mean update.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from fedlgm.checks import check_positive
from fedlgm.errors import ConfigError, DivergedError, Notice
from fedlgm.extension.loader import misfit, package_of, shown_name, users_code
from fedlgm.extension.registration import registers
from fedlgm.extension.registry import Registry
from fedlgm.training import FlatOptimizer
from strategies.yogi import Yogi


class ServerStep(Protocol):
    """Interface of a server optimizer. Its step is post-processing of released values.

    A user's optimizer needs only the method `step`. If it also has `state` and `restore`, as
    `ServerOptimizer` has, an interrupted run continues with the optimizer's state; otherwise the
    run continues with a fresh optimizer.

    Example:
        >>> class Halfway:
        ...     def step(self, model, mean_update):
        ...         return model + 0.5 * mean_update
        >>> server_step(Halfway(), lr=1.0, momentum=0.0).step(torch.tensor([1.0]), torch.tensor([2.0])).tolist()
        [2.0]
    """

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Next model [D] from the current one and the released mean update [D]."""


class ResumableStep(ServerStep, Protocol):
    """A server optimizer whose state is saved in checkpoints.

    Example:
        >>> first, model, mean = ServerOptimizer("momentum", 1.0), torch.zeros(1), torch.ones(1)
        >>> model, again = first.step(model, mean), ServerOptimizer("momentum", 1.0)
        >>> again.restore(model, first.state())
        >>> torch.equal(again.step(model, mean), first.step(model, mean))
        True
    """

    def state(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint; a step without state returns none."""

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from the global model [D] and the `state` of a checkpoint."""


def names() -> tuple[str, ...]:
    """List the names of the server optimizers.

    Example:
        >>> names()[:4]
        ('sgd', 'momentum', 'adam', 'yogi')
    """
    return _OPTIMIZERS.names()


@dataclass(frozen=True)
class OptimizerKind:
    """A server optimizer that has a name.

    Attributes:
        make: class or function (lr, momentum) that makes the optimizer.
        usual_lr: server learning rate if the arguments of `PrivateFedAvg` do not set one.

    Example:
        >>> usual_lr("adam"), usual_lr("sgd")
        (0.01, 1.0)
    """

    make: Callable[[float, float], ServerStep]
    usual_lr: float = 1.0


@registers
def register(name: str, make: Callable[[float, float], ServerStep], usual_lr: float = 1.0) -> None:
    """Register a server optimizer under a name, for recipes and `PrivateFedAvg(optimizer=name)`.

    Args:
        name: the name in recipes.
        make: see `OptimizerKind`.
        usual_lr: see `OptimizerKind`.

    Raises:
        ConfigError: the name is taken, or `make` cannot be called.

    Example:
        >>> class Scaled:
        ...     def __init__(self, lr, momentum):
        ...         self.lr = lr
        ...     def step(self, model, mean_update):
        ...         return model + self.lr * mean_update
        >>> register("scaled", Scaled)
        >>> server_step("scaled", lr=0.5, momentum=0.0).step(torch.zeros(1), torch.ones(1)).tolist()
        [0.5]
    """
    if not callable(make):
        raise ConfigError(
            f"server optimizer {name!r}: it must be a class or function of (lr, momentum), got "
            f"{make!r}"
        )
    check_positive(f"server optimizer {name!r}", usual_lr=usual_lr)
    _OPTIMIZERS.add(name, OptimizerKind(make, usual_lr))


def usual_lr(choice: Any) -> float:
    """Return the server learning rate that applies if none is set: the usual rate of a registered
    optimizer, or 1 for any other optimizer.
    """
    return float(_OPTIMIZERS.find(choice).usual_lr) if choice in _OPTIMIZERS else 1.0


def is_own(name: str) -> bool:
    """Return whether a name in a recipe stands for a user's optimizer, which may be registered or
    referred to as "package.module:name".

    Example:
        >>> is_own("yogi"), is_own("mine:Step")
        (False, True)
    """
    return name not in _OPTIMIZERS or package_of(_OPTIMIZERS.find(name).make) != "strategies"


def server_step(choice: Any, lr: float, momentum: float) -> ResumableStep:
    """Make a server optimizer.

    Args:
        choice: one of `names()`; "package.module:name" of an optimizer, or of a class or function
            (lr, momentum) that makes it; or any of these objects.
        lr: server learning rate.
        momentum: momentum, for optimizers that use it.

    Returns:
        The optimizer. If `choice` is an optimizer, the result is a copy, so that no two runs share
        the state.

    Raises:
        ConfigError: the name is unknown, or the object is not a server optimizer.

    Example:
        >>> server_step("sgd", lr=0.5, momentum=0.0).step(torch.tensor([1.0]), torch.tensor([2.0])).tolist()
        [2.0]
    """
    if package_of(type(choice)) == "strategies":
        return cast(ResumableStep, copy.deepcopy(choice))
    optimizer = _OPTIMIZERS.find(choice) if isinstance(choice, str) else choice
    optimizer = optimizer.make if isinstance(optimizer, OptimizerKind) else optimizer
    if isinstance(choice, str) and not is_own(choice):
        return cast(ResumableStep, optimizer(lr, momentum))
    label = shown_name(choice)
    if isinstance(optimizer, torch.optim.Optimizer) or (
        isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    ):
        raise ConfigError(
            f"server optimizer {label} is a torch optimizer, which steps on gradients: use "
            f"{', '.join(map(repr, names()))}, or an object with step(model, mean_update)"
        )
    if (not hasattr(optimizer, "step") and callable(optimizer)) or isinstance(optimizer, type):
        wrong = misfit(optimizer, lr, momentum)
        if wrong:
            raise ConfigError(
                f"server optimizer {label} must be made by a call with (lr, momentum): {wrong}"
            )
        with users_code(f"server optimizer {label}", optimizer):
            optimizer = optimizer(lr, momentum)
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(f"server optimizer {label} has no step(model, mean_update)")
    remedy = "give a function (lr, momentum) that makes one"
    with users_code(f"server optimizer {label} cannot be copied, {remedy}", optimizer):
        return OwnStep(copy.deepcopy(optimizer), label)


class OwnStep:
    """A user's server optimizer, with a check that each step returns a tensor of the model's shape.

    Args:
        step: the user's optimizer, an object with the methods of `ServerStep`.
        label: the optimizer's name, for messages.

    Example:
        >>> class Halved:
        ...     def step(self, model, mean_update):
        ...         return model + mean_update / 2
        >>> OwnStep(Halved(), "'halved'").step(torch.zeros(2), torch.tensor([2.0, 4.0]))
        tensor([1., 2.])
    """

    def __init__(self, step: Any, label: str) -> None:
        self._step, self.label = step, label

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Compute the next model [D], as float32.

        Raises:
            ConfigError: the step fails, or does not return a tensor of the model's shape.
        """
        with self._label_errors():
            # a copy, because the step may change its argument and later plans may read this model
            result = self._step.step(model.clone(), mean_update)
        if not isinstance(result, Tensor) or result.shape != model.shape:
            given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(
                f"server optimizer {self.label}: step must return the next model, a tensor of "
                f"shape {tuple(model.shape)}, but it returns {given}"
            )
        return result.to(torch.float32)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint; an optimizer without `state` has none."""
        with self._label_errors():
            return self._step.state() if hasattr(self._step, "state") else {}

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's state. An optimizer without `restore` starts afresh, and a
        notice warns of this.
        """
        if hasattr(self._step, "restore"):
            with self._label_errors():
                self._step.restore(model, state)
        elif getattr(self._step, "__dict__", None):
            warnings.warn(
                Notice(
                    f"server optimizer {self.label} starts afresh: if it has a state, it needs "
                    "state() and restore(), so that the resumed run ends where it would have "
                    "ended without the interruption"
                ),
                stacklevel=2,
            )

    def _label_errors(self) -> AbstractContextManager[None]:
        return users_code(f"server optimizer {self.label}", self._step)


def require_finite(model: Tensor, round: int) -> None:
    """Raise DivergedError if a model contains NaN or infinity after the server step, because no
    later round could train such a model.

    The model depends only on released values, so ending the run at this point reveals nothing more.

    Args:
        model: the next model [D].
        round: the round that produced the model, for the message.

    Raises:
        DivergedError: the model contains NaN or infinity; the message names the round and remedies.

    Example:
        >>> require_finite(torch.tensor([1.0, float("inf")]), round=3)
        Traceback (most recent call last):
            ...
        fedlgm.errors.DivergedError: training diverged in round 3: after the server step 1 of the model's 2 values ...
    """
    lost = model.numel() - int(torch.isfinite(model).sum())
    if lost:
        raise DivergedError(
            f"training diverged in round {round}: after the server step {lost} of the model's "
            f"{model.numel()} values are NaN or infinite; start a new run with smaller steps: a "
            "smaller server learning rate (federation.server_lr), training.lr or mechanism.bound, "
            "or another server optimizer"
        )


class ServerOptimizer:
    """A server optimizer that takes the negative of the released mean update as its gradient.

    The optimizer uses only released values, so its steps are post-processing and cost no privacy.

    Args:
        name: "sgd" (FedAvg: model + lr * mean), "momentum" (FedAvgM) or "adam" (FedAdam with
            PyTorch's Adam: bias correction, betas 0.9 and 0.999; every coordinate moves by about
            `lr` in each step, so lr = 1 is far too much).
        lr: server learning rate.
        momentum: coefficient of the momentum, for "momentum".
        eps: constant that "adam" adds to the denominator.
        decay: factor of decoupled weight decay, with which "adam" is AdamW.

    Raises:
        ConfigError: the name is not one of these three.

    Example:
        >>> optimizer, model = ServerOptimizer("momentum", lr=1.0, momentum=0.5), torch.zeros(1)
        >>> for _ in range(3):
        ...     model = optimizer.step(model, torch.ones(1))
        >>> model.tolist()  # steps of 1, 1.5 and 1.75
        [4.25]
    """

    def __init__(
        self,
        name: Literal["sgd", "momentum", "adam"],
        lr: float,
        momentum: float = 0.9,
        eps: float = 1e-3,
        decay: float = 0.0,
    ) -> None:
        if name not in ("sgd", "momentum", "adam"):
            raise ConfigError(
                f"unknown server optimizer {name!r}: ServerOptimizer is sgd, momentum or adam"
            )
        self._name, self._lr, self._momentum, self._eps = name, lr, momentum, eps
        self._decay = decay
        self._optimizer: FlatOptimizer | None = None
        self._weights = torch.empty(0)

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Next model [D] from the current one and the released mean update [D]."""
        if self._name == "sgd" and not self._decay:
            # One fused operation. At lr = 1 this avoids the rounding errors of the optimizer's
            # arithmetic.
            return torch.add(model, mean_update, alpha=self._lr)
        optimizer = self._optimizer_for(model)
        self._weights.copy_(model)
        optimizer.step(-mean_update)
        return self._weights.clone()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must contain."""
        return {} if self._optimizer is None else self._optimizer.state()

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's `state`."""
        if state:
            self._optimizer_for(model).restore(state)

    def _optimizer_for(self, model: Tensor) -> FlatOptimizer:
        if self._optimizer is None:
            self._weights = model.clone()
            kind: Literal["sgd", "adam"] = "adam" if self._name == "adam" else "sgd"
            self._optimizer = FlatOptimizer(
                kind,
                self._weights,
                lr=self._lr,
                momentum=self._momentum if self._name == "momentum" else 0.0,
                eps=self._eps,
                decay=self._decay,
            )
        return self._optimizer


def _sgd(lr: float, momentum: float) -> ServerOptimizer:
    return ServerOptimizer("sgd", lr)


def _momentum(lr: float, momentum: float) -> ServerOptimizer:
    return ServerOptimizer("momentum", lr, momentum)


def _adam(lr: float, momentum: float) -> ServerOptimizer:
    return ServerOptimizer("adam", lr)


def _yogi(lr: float, momentum: float) -> Yogi:
    return Yogi(lr)


_OPTIMIZERS: Registry[OptimizerKind] = Registry(
    "server optimizer",
    {
        "sgd": OptimizerKind(_sgd),
        "momentum": OptimizerKind(_momentum, 0.1),  # 1 - 0.9: as far as without momentum
        "adam": OptimizerKind(_adam, 0.01),
        "yogi": OptimizerKind(_yogi, 0.01),
    },
)
