"""Tasks with real-valued targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fedlgm.checks import check_known
from fedlgm.data.dataset import DataSet
from fedlgm.errors import ConfigError, DataError
from fedlgm.training.tasks.task import Task, require_finite

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "squared": functional.mse_loss,
    "absolute": functional.l1_loss,
    "huber": functional.huber_loss,
}


class RealTargets(Task):
    """Base class of tasks with one output for each number of the targets [n, ...]."""

    @override
    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        """Convert targets to float32, and refuse targets that are not finite.

        Raises:
            DataError: the targets are not finite real numbers, or do not suit the task.
        """
        if not (np.issubdtype(y.dtype, np.number) or y.dtype == np.bool_) or np.issubdtype(
            y.dtype, np.complexfloating
        ):
            raise DataError(
                f"task {self.name!r} needs numbers as targets, but the {part} targets are {y.dtype}"
            )
        require_finite(y, part)
        return y.astype(np.float32, copy=False)

    @override
    def labels(self, y: np.ndarray) -> bool:
        """False, because real-valued targets do not become integer labels."""
        return False

    @override
    def outputs(self, data: DataSet) -> int:
        return math.prod(data.train_y.shape[1:])

    @override
    def check_outputs(self, outputs: Tensor, targets: Tensor, data: DataSet) -> None:
        """Require outputs of the targets' shape; for targets [n], the shape [n, 1] is also allowed.

        Raises:
            ConfigError: the outputs have another shape, or do not suit the task.
        """
        if outputs.shape != targets.shape and not (
            targets.ndim == 1 and outputs.shape == (len(targets), 1)
        ):
            expected = [len(targets), *targets.shape[1:]] if targets.ndim > 1 else [len(targets), 1]
            raise ConfigError(
                f"{self._no_fit(outputs, targets)}: outputs must have shape {tuple(expected)}"
            )

    @override
    def count(self, targets: Tensor) -> int:
        return targets.numel()


class Regression(RealTargets):
    """Squared, absolute or Huber loss of real-valued outputs. The metrics are the root mean squared
    error and the mean absolute error.

    Targets are float32 [n] or [n, ...]. Outputs have the targets' shape; for targets [n], the shape
    [n, 1] is also allowed. The loss of an example with several targets is the mean over the
    targets.

    Args:
        loss: "squared", "absolute", or "huber" (with delta = 1).
    """

    name = "regression"
    headline = "rmse"
    better = "lower"

    def __init__(self, loss: Literal["squared", "absolute", "huber"] = "squared") -> None:
        check_known("loss", loss, _LOSSES, "task 'regression'")
        self._loss = loss

    @override
    def check_outputs(self, outputs: Tensor, targets: Tensor, data: DataSet) -> None:
        """Refuse targets that are names of classes, because they are not numbers, and outputs of
        the wrong shape.

        Raises:
            ConfigError: the targets are names of classes, or the outputs have the wrong shape.
        """
        if data.labels is not None:
            raise ConfigError(
                f"task 'regression' needs numbers as targets, but those of {data.name!r} are names "
                "of classes "
                f"({', '.join(data.labels[:8])}): use the task 'classification'"
            )
        super().check_outputs(outputs, targets, data)

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = _LOSSES[self._loss](outputs.reshape(targets.shape), targets, reduction="none")
        return losses if losses.ndim == 1 else losses.flatten(1).mean(1)

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        errors = (outputs.reshape(targets.shape) - targets).double()
        losses = self.losses(outputs, targets).double() * (targets.numel() / max(len(targets), 1))
        return {"loss": losses.sum(), "squares": errors.square().sum(), "mae": errors.abs().sum()}

    @override
    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return {"loss": means["loss"], "rmse": math.sqrt(means["squares"]), "mae": means["mae"]}
