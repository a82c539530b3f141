"""The task of predicting the next token of a sequence."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fedlgm.data.dataset import DataSet
from fedlgm.errors import ConfigError
from fedlgm.training.tasks.classification import class_targets, require_classes
from fedlgm.training.tasks.task import Task

PADDING = -100
"""Target of a position that does not count; PyTorch's default for `ignore_index`."""


class NextToken(Task):
    """Cross-entropy of the next token at every position; the metrics are perplexity and accuracy
    per token.

    Outputs are logits [n, length, vocabulary]. Targets are tokens int64 [n, length] in [0,
    vocabulary), with -100 at positions that do not count (padding). In training, the loss of a
    sequence is the mean over its counted positions, so sequences of all lengths have the same
    weight. Reported figures are means over all tokens. Perplexity is exp(loss), with the loss in
    nats per token.
    """

    name = "next-token"
    headline = "perplexity"
    better = "lower"

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=PADDING
        ).unflatten(0, targets.shape)
        return losses.sum(1) / (targets != PADDING).sum(1).clamp(min=1)

    @override
    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        class_targets(np.where(y == PADDING, 0, y), part, self.name, "token")
        return y.astype(np.int64, copy=False)

    @override
    def check_outputs(self, outputs: Tensor, targets: Tensor, data: DataSet) -> None:
        if outputs.ndim != 3 or outputs.shape[:2] != targets.shape:
            hint = (
                "; without a column of labels the tokens are the targets"
                if targets.ndim == 1
                else ""
            )
            raise ConfigError(
                f"{self._no_fit(outputs, targets)}: outputs must be logits [n, length, "
                f"vocabulary]{hint}"
            )
        require_classes(self.name, int(outputs.shape[2]), data, "token")

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits, tokens = outputs.flatten(0, 1), targets.flatten()
        loss = functional.cross_entropy(logits, tokens, reduction="sum", ignore_index=PADDING)
        return {"loss": loss, "accuracy": (logits.argmax(1) == tokens).sum()}

    @override
    def count(self, targets: Tensor) -> int:
        return int((targets != PADDING).sum())

    @override
    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Compute the metrics. If exp(loss) would exceed the range of a float, the perplexity is
        infinite.
        """
        perplexity = math.exp(means["loss"]) if means["loss"] < 700 else math.inf
        return {"loss": means["loss"], "perplexity": perplexity, "accuracy": means["accuracy"]}
