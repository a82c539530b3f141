"""The task of choosing one of several classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fedlgm.data.dataset import DataSet
from fedlgm.data.names import IGNORED
from fedlgm.errors import ConfigError, DataError
from fedlgm.extension.loader import is_bundled
from fedlgm.training import inputs
from fedlgm.training.tasks.task import Task


class Classification(Task):
    """Cross-entropy of class scores, and accuracy.

    Outputs are logits [n, classes, ...]. Targets are classes int64 [n, ...] in [0, classes). If
    targets have further axes (the pixels of a segmentation), the loss of an example is the mean
    over these axes, without entries whose target is -100.
    """

    name = "classification"
    headline = "accuracy"
    better = "higher"

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none", ignore_index=IGNORED)
        if losses.ndim == 1:
            return losses
        return losses.flatten(1).sum(1) / (targets != IGNORED).flatten(1).sum(1).clamp(min=1)

    @override
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (
            self.losses(outputs, targets).mean()
            if targets.ndim > 1
            else functional.cross_entropy(outputs, targets)
        )

    @override
    def prepare(self, data: DataSet) -> DataSet:
        """Refuse targets that repeat the input tokens, because they are not classes; otherwise
        prepare the data as `Task.prepare` does.

        Raises:
            DataError: the targets repeat the input tokens, or do not fit the task.
        """
        x, y = inputs.first(data.held("test_x")), data.test_y
        if x.shape == y.shape and (y == IGNORED).any() and ((y == x) | (y == IGNORED)).all():
            raise DataError(
                f"task {self.name!r}: the targets are the tokens themselves, because the table has "
                "no column 'label': name yours, data={..., 'target': column}"
            )
        return super().prepare(data)

    @override
    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        class_targets(np.where(y == IGNORED, 0, y) if y.ndim > 1 else y, part, self.name, "class")
        if y.size and (y == IGNORED).all():
            raise DataError(
                f"task {self.name!r}: all {part} targets are {IGNORED}, which is ignored: give "
                "their classes"
            )
        return y.astype(np.int64, copy=False)

    @override
    def labels(self, y: np.ndarray) -> bool:
        """Whether the targets become integer labels. This is so for all targets [n], because
        `targets` refuses those that are not whole numbers.
        """
        return y.ndim == 1

    @override
    def check_outputs(self, outputs: Tensor, targets: Tensor, data: DataSet) -> None:
        if outputs.shape[:1] + outputs.shape[2:] != targets.shape or outputs.ndim < 2:
            flat = (
                "; one column of classes is y.ravel(), one-hot rows are y.argmax(1)"
                if targets.ndim == 2
                else ""
            )
            raise ConfigError(
                f"{self._no_fit(outputs, targets)}: for targets [n, ...] outputs must be logits "
                f"[n, classes, ...]{flat}"
            )
        require_classes(self.name, int(outputs.shape[1]), data, "class")
        sums = outputs.sum(1)
        if outputs.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-5):
            raise ConfigError(
                f"task {self.name!r}: the model returns probabilities: remove its last softmax, "
                "because the loss takes logits"
            )

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = functional.cross_entropy(outputs, targets, reduction="sum")
        return {"loss": loss, "accuracy": (outputs.argmax(dim=1) == targets).sum()}

    @override
    def count(self, targets: Tensor) -> int:
        return int((targets != IGNORED).sum())

    @override
    def gradient_operations(
        self, outputs: Tensor, targets: Tensor, gradient: Tensor
    ) -> list[Callable[[], Any]]:
        """Operations that compute (softmax - one-hot) / n for outputs [n, classes]; for other
        outputs, the default operations.
        """
        if outputs.ndim != 2:
            return super().gradient_operations(outputs, targets, gradient)
        minus_one = torch.full((len(targets), 1), -1.0, dtype=gradient.dtype)
        return [
            partial(torch.softmax, outputs, 1, out=gradient),
            partial(gradient.scatter_add_, 1, targets[:, None], minus_one),
            partial(gradient.mul_, 1 / len(targets)),
        ]

    @override
    def summed_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradient: for outputs [n, classes], by the same operations as autograd but
        without its graph; otherwise by autograd.
        """
        if outputs.ndim != 2 or not is_bundled(self):
            return super().summed_gradient(outputs, targets)
        logarithms = torch.log_softmax(outputs, 1)
        of_logarithms = torch.zeros_like(outputs).scatter_(1, targets[:, None], -1.0)
        return torch.ops.aten._log_softmax_backward_data(
            of_logarithms, logarithms, 1, outputs.dtype
        )


def class_targets(y: np.ndarray, part: str, task: str, what: str) -> np.ndarray:
    """Convert targets to int64; see `Task.targets`.

    Raises:
        DataError: targets are not whole numbers of at least 0.
    """
    if what == "class" and np.issubdtype(y.dtype, np.floating) and y.ndim == 2:
        raise DataError(
            f"task {task!r} needs one target, but the {part} targets have {y.shape[1]} columns: "
            "name one column; the task 'hazards' takes two"
        )
    if not (np.issubdtype(y.dtype, np.integer) or y.dtype == np.bool_):
        raise DataError(
            f"task {task!r} needs integer targets (each the number of a {what}), but the {part} "
            f"targets are {y.dtype}: for real-valued targets use the task 'regression', for "
            "classes in floats or truth values give y.astype(int)"
        )
    if y.size and y.min() < 0:
        remedy = "np.unique(y, return_inverse=True)[1] numbers the classes"
        if y.max() < 0:
            remedy = "none is a class, as in sets whose labels are withheld: give the classes"
        raise DataError(
            f"task {task!r} needs targets of at least 0, but the {part} targets begin at "
            f"{y.min()}: {remedy}"
        )
    return y.astype(np.int64, copy=False)


def require_classes(task: str, outputs: int, data: DataSet, what: str) -> None:
    """Raise ConfigError if a target of the data set is not below the model's number of outputs."""
    largest = max((int(y.max()) for y in (data.train_y, data.test_y) if y.size), default=0)
    if largest >= outputs:
        raise ConfigError(
            f"task {task!r}: the model has {outputs} outputs, but the targets of {data.name!r} go "
            f"up to {what} {largest}: it needs at least "
            f"{largest + 1}{_instead(outputs, largest, data)}"
        )


def _instead(outputs: int, largest: int, data: DataSet) -> str:
    """Text of the likely remedy if targets exceed the model's outputs; empty if no remedy is
    likely.
    """
    if outputs == largest == 1:
        return "; a single output for two classes is the task 'binary'"
    if largest == outputs and min(int(y.min()) for y in (data.train_y, data.test_y) if y.size) == 1:
        return ", or targets that begin at 0: y - 1"
    return ""
