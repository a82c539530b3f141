"""Rule for embeddings. The gradient of a row of the weight is a sum over the positions that use
this row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.errors import ConfigError
from fedlgm.training.example_level.rules.products import row_squares
from fedlgm.training.example_level.rules.rule import Kept, Rule, Use, all_finite


class EmbeddingRule(Rule):
    """Rule for `nn.Embedding` of tokens [n, ...].

    Raises:
        ConfigError: an option of the module makes an example's result depend on other examples.
    """

    module: nn.Embedding
    unites = True

    def __init__(self, module: nn.Embedding, *args: object) -> None:
        super().__init__(module, *args)  # type: ignore[arg-type]
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(module, option):
                raise ConfigError(
                    f"{self.name}: Embedding({option}=...) depends on the other examples: switch "
                    "it off"
                )

    @override
    def shares(self, x: Tensor) -> bool:
        """Whether the input is one row for all examples [1, length], such as the positions 0, 1,
        ...
        """
        return x.dim() > 1 and len(x) == 1

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return torch.nn.functional.embedding(x, self.module.weight.detach()), ()

    @override
    def unite(self, uses: Sequence[Use]) -> Use:
        tokens = torch.cat([use.x.reshape(len(use), -1) for use in uses], 1)
        return Use(tokens, torch.cat([_by_token(use) for use in uses], 1))

    @override
    def keep(self, use: Use) -> Kept:
        return _KeptRows(use.x.reshape(len(use), -1), _by_token(use), self.module)

    @override
    def instantiate(self, use: Use) -> list[Tensor]:
        x = use.x
        rows, width = self.module.weight.shape
        dy = _without_padding(x.reshape(len(x), -1), _by_token(use), self.module.padding_idx)
        every = dy.new_zeros(len(x), rows, width)
        index = x.reshape(len(x), -1, 1).expand(-1, -1, width)
        return [every.scatter_add_(1, index, dy).flatten(1)]


class _KeptRows(Kept):
    """Gradients of the embedding's rows that each example uses, with one gradient for each pair of
    example and row.

    If an example uses a row several times, the gradients are summed before the norm is computed.
    Summing the squares over all positions would give a wrong norm.
    """

    def __init__(self, tokens: Tensor, dy: Tensor, module: nn.Embedding) -> None:
        n, rows = len(tokens), len(module.weight)
        dy = _without_padding(tokens, dy, module.padding_idx)
        keys = tokens + rows * torch.arange(n, device=tokens.device)[:, None]
        used, place = keys.flatten().unique(return_inverse=True)
        self._gradients = dy.new_zeros(len(used), dy.shape[-1]).index_add_(
            0, place, dy.flatten(0, 1)
        )
        self._token, self._example = used % rows, used // rows
        squares = torch.zeros(n, dtype=torch.float64, device=dy.device)
        self.squares = [squares.index_add_(0, self._example, row_squares(self._gradients))]
        self._shape = module.weight.shape

    @override
    def add(self, sums: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        gradients, token, factor = self._gradients, self._token, factors[0][self._example]
        if not all_finite(self.squares[0]):
            keep = factor != 0
            gradients, token, factor = gradients[keep], token[keep], factor[keep]
        sums[0].view(self._shape).index_add_(
            0, token, (gradients * factor[:, None]).to(sums[0].dtype)
        )


def _by_token(use: Use) -> Tensor:
    """Reshape the output's gradient to [n, tokens, width]."""
    return use.dy.reshape(len(use), -1, use.dy.shape[-1])


def _without_padding(tokens: Tensor, dy: Tensor, padding: int | None) -> Tensor:
    return dy if padding is None else dy.masked_fill((tokens == padding)[..., None], 0.0)
