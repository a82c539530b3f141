"""The task for labels that are each present or absent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fedlgm.data import DataSet
from fedlgm.errors import ConfigError, DataError
from fedlgm.extension.loader import is_bundled
from fedlgm.training.tasks.regression import RealTargets

_RESHAPING = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice")
"""Prefixes of autograd's names for operations that only reshape or select values."""


class Binary(RealTargets):
    """Binary cross-entropy of one label [n] or of several labels [n, labels], where each label is
    present (1) or absent (0).

    Outputs are logits in the targets' shape; for targets [n], the shape [n, 1] is also allowed. The
    loss of an example with several labels is the mean over the labels. The task reports the mean
    loss and accuracy over all labels, and the F1 score of all labels together (micro average).
    """

    name = "binary"
    headline = "accuracy"
    better = "higher"

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.reshape(targets.shape)
        losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses if losses.ndim == 1 else losses.flatten(1).mean(1)

    @override
    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        real = super().targets(y, part)
        if not np.isin(real, (0, 1)).all():
            wrong = real[~np.isin(real, (0, 1))].flat[0]
            raise DataError(
                f"task {self.name!r} needs targets 0 and 1, but the {part} targets hold {wrong:g}: "
                "for one class of several use the task 'classification'"
            )
        return real

    @override
    def check_outputs(self, outputs: Tensor, targets: Tensor, data: DataSet) -> None:
        super().check_outputs(outputs, targets, data)
        made_by = outputs.grad_fn
        while made_by is not None and made_by.name().startswith(_RESHAPING):
            made_by = made_by.next_functions[0][0]
        if made_by is not None and made_by.name().startswith("Sigmoid"):
            raise ConfigError(
                f"task {self.name!r}: the model returns probabilities: remove its last sigmoid, "
                "because the loss takes logits"
            )

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = outputs.reshape(targets.shape)
        predicted, present = logits > 0, targets > 0.5
        return {
            "loss": functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum"),
            "accuracy": (predicted == present).sum(),
            "hits": (predicted & present).sum(),
            "found": predicted.sum(),
            "present": present.sum(),
        }

    @override
    def summed_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradient: sigmoid - target if each example has one label, and otherwise by
        autograd.
        """
        if targets.ndim > 1 or not is_bundled(self):
            return super().summed_gradient(outputs, targets)
        return torch.sigmoid(outputs) - targets.view(outputs.shape)

    @override
    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Compute the metrics. F1 is 0 if no label is present and no label is predicted."""
        either = means["found"] + means["present"]
        f1 = 2 * means["hits"] / either if either else 0.0
        return {"loss": means["loss"], "accuracy": means["accuracy"], "f1": f1}
