"""Rule for fully connected layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.training.example_level.rules.products import ProductRule
from fedlgm.training.example_level.rules.rule import Use, add_product_


class LinearRule(ProductRule):
    """Rule for `nn.Linear` with inputs [n, in] or [n, ..., in]."""

    module: nn.Linear
    unites = True

    @classmethod
    @override
    def dimensions(cls, module: nn.Module) -> int:
        return 2

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return torch.nn.functional.linear(x, self.module.weight.detach(), self.bias_of()), ()

    @override
    def input_gradient(self, use: Use) -> Tensor:
        return use.dy @ self.module.weight.detach()

    @override
    def unite(self, uses: Sequence[Use]) -> Use:
        """Join several uses to one use, whose positions are the positions of all uses."""
        x = torch.cat([self.columns(use.x) for use in uses], 1)
        return Use(x, torch.cat([self.columns(use.dy) for use in uses], 1))

    @override
    def positions(self, use: Use) -> int:
        return use.dy[0].numel() // use.dy.shape[-1]

    @override
    def extent(self) -> tuple[int, int]:
        return self.module.out_features, self.module.in_features

    @override
    def columns(self, dy: Tensor) -> Tensor:
        return dy.reshape(len(dy), -1, dy.shape[-1])

    @override
    def operand(self, use: Use) -> Tensor:
        return self.columns(use.x)

    @override
    def products(self, use: Use, rows: slice, out: Tensor) -> Tensor:
        return torch.bmm(
            self.columns(use.dy[rows]).transpose(1, 2), self.columns(use.x[rows]), out=out
        )

    @override
    def grams(self, use: Use, rows: slice) -> Tensor:
        x = self.columns(use.x[rows])
        return torch.bmm(
            x,
            x.transpose(1, 2),
            out=self.memory.take("gram of inputs", len(x), x.shape[1], x.shape[1]),
        )

    @override
    def add_product(self, total: Tensor, use: Use, factors: Tensor) -> None:
        scaled, x = self._scale(self.columns(use.dy), factors), self.columns(use.x)
        add_product_(total.view(self.extent()), scaled.flatten(0, 1), x.flatten(0, 1))
