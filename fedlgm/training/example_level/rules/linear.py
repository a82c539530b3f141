"""Fully connected layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedlgm.training.example_level.rules.products import ProductRule
from fedlgm.training.example_level.rules.rule import Use, add_product_


class LinearRule(ProductRule):
    """`nn.Linear` on [n, in] or [n, ..., in]."""

    module: nn.Linear

    @classmethod
    def dimensions(cls, module: nn.Module) -> int:
        """See `Rule`."""
        return 2

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Rule`."""
        return torch.nn.functional.linear(x, self.module.weight.detach(), self.bias_of()), ()

    def input_gradient(self, use: Use) -> Tensor:
        """See `Rule`."""
        return use.dy @ self.module.weight.detach()

    def positions(self, use: Use) -> int:
        """See `ProductRule`."""
        return use.dy[0].numel() // use.dy.shape[-1]

    def extent(self) -> tuple[int, int]:
        """See `ProductRule`."""
        return self.module.out_features, self.module.in_features

    def columns(self, dy: Tensor) -> Tensor:
        """See `ProductRule`."""
        return dy.reshape(len(dy), -1, dy.shape[-1])

    def operand(self, use: Use) -> Tensor:
        """See `ProductRule`."""
        return self.columns(use.x)

    def products(self, use: Use, rows: slice, out: Tensor) -> Tensor:
        """See `ProductRule`."""
        return torch.bmm(
            self.columns(use.dy[rows]).transpose(1, 2), self.columns(use.x[rows]), out=out
        )

    def grams(self, use: Use, rows: slice) -> Tensor:
        """See `ProductRule`."""
        x = self.columns(use.x[rows])
        return torch.bmm(
            x,
            x.transpose(1, 2),
            out=self.memory.take("gram of inputs", len(x), x.shape[1], x.shape[1]),
        )

    def add_product(self, total: Tensor, use: Use, factors: Tensor) -> None:
        """See `ProductRule`."""
        scaled, x = self._scale(self.columns(use.dy), factors), self.columns(use.x)
        add_product_(total.view(self.extent()), scaled.flatten(0, 1), x.flatten(0, 1))
