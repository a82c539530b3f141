"""The server's step from one global model to the next."""

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
    """Interface of the server's step, which is post-processing of released values.

    A user's step needs only `step`. With `state` and `restore`, as in `ServerOptimizer`, an
    interrupted run continues with its state; without them the state is reset.

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
    """A step whose state is kept in checkpoints.

    Example:
        >>> first, model, mean = ServerOptimizer("momentum", 1.0), torch.zeros(1), torch.ones(1)
        >>> model, again = first.step(model, mean), ServerOptimizer("momentum", 1.0)
        >>> again.restore(model, first.state())
        >>> torch.equal(again.step(model, mean), first.step(model, mean))
        True
    """

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint; none for a step without state."""

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's global model [D] and `state`."""


def names() -> tuple[str, ...]:
    """Names of the server's steps.

    Example:
        >>> names()[:4]
        ('sgd', 'momentum', 'adam', 'yogi')
    """
    return _OPTIMIZERS.names()


@dataclass(frozen=True)
class OptimizerKind:
    """A server's step that has a name.

    Attributes:
        make: class or function that maps (lr, momentum) to a step.
        usual_lr: server learning rate of a `PrivateFedAvg` that states no rate.

    Example:
        >>> usual_lr("adam"), usual_lr("sgd")
        (0.01, 1.0)
    """

    make: Callable[[float, float], ServerStep]
    usual_lr: float = 1.0


@registers
def register(name: str, make: Callable[[float, float], ServerStep], usual_lr: float = 1.0) -> None:
    """Register a server's step under a name, for recipes and `PrivateFedAvg(server_optimizer=name)`.

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
    """Server learning rate of a step if none is stated: the usual rate of its kind, or 1 for a step
    without a registered name.
    """
    return float(_OPTIMIZERS.find(choice).usual_lr) if choice in _OPTIMIZERS else 1.0


def is_own(name: str) -> bool:
    """Whether a recipe's name names a user's step, by reference or by a registered name.

    Example:
        >>> is_own("yogi"), is_own("mine:Step")
        (False, True)
    """
    return name not in _OPTIMIZERS or package_of(_OPTIMIZERS.find(name).make) != "strategies"


def server_step(choice: Any, lr: float, momentum: float) -> ResumableStep:
    """A server step.

    Args:
        choice: one of `names()`; "package.module:name" of a class or function (lr, momentum) ->
            step, or of a step; or a step itself.
        lr: server learning rate.
        momentum: momentum, for steps that use it.

    Returns:
        The step. A step given as an object is copied, so that no two runs share its state.

    Raises:
        ConfigError: the name is unknown, or the object is not a step.

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
    """A user's step. Its result is checked to be a usable model.

    Args:
        step: as `ServerStep`.
        label: its name, for messages.

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
        """Next model [D], float32.

        Raises:
            ConfigError: the step fails, or does not return a tensor of the model's shape.
        """
        with self._label_errors():
            # a copy, because later plans may read this model
            result = self._step.step(model.clone(), mean_update)
        if not isinstance(result, Tensor) or result.shape != model.shape:
            given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(
                f"server optimizer {self.label}: step must return the next model, a tensor of "
                f"shape {tuple(model.shape)}, but it returns {given}"
            )
        return result.to(torch.float32)

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint; none for a step without `state`."""
        with self._label_errors():
            return self._step.state() if hasattr(self._step, "state") else {}

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint's state; a step without `restore` starts with a fresh
        state.
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
    """Refuse a model with NaN or infinity after the server step, because no later round could train
    it.

    The model depends only on released values, so ending the run at this point reveals nothing more.

    Args:
        model: the next model [D].
        round: the round that made it, for the message.

    Raises:
        DivergedError: the message names the round and a remedy.

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
    """An optimizer that takes the released mean update as its (negative) gradient.

    It uses only released values, so it is post-processing and costs no privacy.

    Args:
        name: "sgd" (FedAvg: model + lr * mean), "momentum" (FedAvgM) or "adam" (FedAdam with
            PyTorch's Adam: bias correction, betas 0.9 and 0.999; every coordinate moves by about
            `lr`, so 1 is far too much).
        lr: server learning rate.
        momentum: for "momentum".
        eps: for "adam".
        decay: factor of decoupled weight decay, with which "adam" is AdamW.

    Raises:
        ConfigError: the name is none of these.

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
            # One fused operation. At lr = 1 it avoids the rounding of the optimizer's own
            # arithmetic.
            return torch.add(model, mean_update, alpha=self._lr)
        optimizer = self._optimizer_for(model)
        self._weights.copy_(model)
        optimizer.step(-mean_update)
        return self._weights.clone()

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint must hold."""
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
