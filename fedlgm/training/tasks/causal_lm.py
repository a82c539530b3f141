"""Causal language modelling in the convention of Hugging Face, where the labels are the tokens
themselves.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fedlgm.training.tasks.next_token import NextToken


class CausalLM(NextToken):
    """`NextToken` for labels that are not shifted. The logits of position t are compared with the
    label of position t + 1.

    Outputs are logits [n, length, vocabulary]. Targets are tokens int64 [n, length], with -100 at
    positions that do not count (padding). The first label is not used.

    Example:
        >>> import torch
        >>> logits = torch.zeros(1, 3, 4)
        >>> logits[0, 0, 2] = 100.0  # after the first token, token 2 is certain
        >>> CausalLM().losses(logits, torch.tensor([[1, 2, -100]])).tolist()
        [0.0]
    """

    name = "causal-lm"

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().losses(outputs[:, :-1], targets[:, 1:])

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return super().sums(outputs[:, :-1], targets[:, 1:])

    @override
    def count(self, targets: Tensor) -> int:
        return super().count(targets[:, 1:])
