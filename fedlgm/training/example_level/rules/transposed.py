"""Rule for `transformers.pytorch_utils.Conv1D`, a fully connected layer of GPT-2 whose weight has
the shape [in, out].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fedlgm.training.example_level.rules.linear import LinearRule
from fedlgm.training.example_level.rules.rule import Rule, Scale, Use, add_product_


class TransposedLinearRule(LinearRule):
    """Rule for Conv1D with inputs [n, in] or [n, ..., in]. The weight's gradient is X_i^T dY_i."""

    module: Any

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return torch.nn.functional.linear(x, self.module.weight.detach().t(), self.bias_of()), ()

    @override
    def input_gradient(self, use: Use) -> Tensor:
        return use.dy @ self.module.weight.detach().t()

    @override
    def extent(self) -> tuple[int, int]:
        return tuple(self.module.weight.shape)

    @override
    def products(self, use: Use, rows: slice, out: Tensor) -> Tensor:
        return torch.bmm(
            self.columns(use.x[rows]).transpose(1, 2), self.columns(use.dy[rows]), out=out
        )

    @override
    def add_product(self, total: Tensor, use: Use, factors: Tensor) -> None:
        scaled, x = self._scale(self.columns(use.dy), factors), self.columns(use.x)
        add_product_(total.view(self.extent()), x.flatten(0, 1), scaled.flatten(0, 1))

    def _add_single_rows(self, use: Use, sums: Sequence[Tensor], scale: Scale) -> None:
        Rule.immediately(self, use, sums, scale)
