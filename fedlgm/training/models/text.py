"""Small text models. They map tokens int64 [n, length] to logits of the next token [n, length,
vocabulary].

The two models use only plain tensor operations, so that `torch.func` can train the models of many
clients at once. For the fused kernels of PyTorch's `nn.GRU` and `nn.MultiheadAttention`,
`torch.func` has no rule, so clients would be trained one after another.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlgm.checks import check_count
from fedlgm.errors import ConfigError


class GatedUnit(nn.Module):
    """Gated recurrent unit (Cho et al., EMNLP 2014), with the same gates as PyTorch's `nn.GRU`.

    Args:
        width: width of the inputs.
        hidden: width of the state.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 3 * hidden)
        self.hidden = nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the states [n, length, hidden] for inputs [n, length, width]. The state before
        the first input is zero.
        """
        width = self.hidden.in_features
        state = x.new_zeros(x.shape[0], width)
        states = []
        gates_x, news_x = self.input(x).split((2 * width, width), dim=2)
        for gate_x, new_x in zip(gates_x.unbind(1), news_x.unbind(1), strict=True):
            gate_h, new_h = self.hidden(state).split((2 * width, width), dim=1)
            reset, update = torch.sigmoid(gate_x + gate_h).chunk(2, dim=1)
            state = torch.lerp(torch.tanh(torch.addcmul(new_x, reset, new_h)), state, update)
            states.append(state)
        return torch.stack(states, dim=1)


class RecurrentText(nn.Module):
    """Model of an embedding, gated recurrent units and a linear output layer; see `gru`."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.units = nn.Sequential(
            *(GatedUnit(width if i == 0 else hidden, hidden) for i in range(layers))
        )
        self.outputs = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next token."""
        logits: Tensor = self.outputs(self.units(self.embedding(tokens)))
        return logits


class CausalAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al., NeurIPS 2017) of each position to itself and
    earlier positions.

    Args:
        width: width of inputs and outputs.
        heads: number of heads, a divisor of the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs [n, length, width] for inputs [n, length, width]."""
        length, width = x.shape[1], x.shape[2]
        query, key, value = (
            projection(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = scores.masked_fill(later, -math.inf).softmax(dim=3) @ value
        mixed: Tensor = self.mix(seen.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and a two-layer perceptron, each applied to normalised inputs, with residual
    connections (pre-norm).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), CausalAttention(width, heads)
        self.norm2, self.expand, self.contract = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs [n, length, width] for inputs [n, length, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x))))


class TransformerText(nn.Module):
    """Model of token and position embeddings, causal blocks and a linear output layer; see
    `transformer`.
    """

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.outputs = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=1 / math.sqrt(width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next token. There may be at most as many tokens as the model
        has positions.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        logits: Tensor = self.outputs(
            self.norm(self.blocks(self.embedding(tokens) + self.position(positions)))
        )
        return logits


def gru(
    in_shape: tuple[int, ...], classes: int, *, width: int = 16, hidden: int = 64, layers: int = 1
) -> nn.Module:
    """Character or token model with gated recurrent units. By default, it has 20,928 parameters for
    a vocabulary of 64.

    Args:
        in_shape: shape (length,) of one input.
        classes: size of the vocabulary.
        width: width of the token embedding.
        hidden: width of the recurrent state.
        layers: number of recurrent layers.

    Returns:
        The model, which maps tokens int64 [n, length] to logits [n, length, classes].

    Raises:
        ConfigError: an option is below 1, or there are more than 1,000 layers.
    """
    _require_counts(width=width, hidden=hidden, layers=layers)
    return RecurrentText(classes, width, hidden, layers)


def transformer(
    in_shape: tuple[int, ...], classes: int, *, width: int = 32, heads: int = 2, layers: int = 2
) -> nn.Module:
    """Small causal transformer (pre-norm, learned positions). By default, it has 22,336 parameters
    for a vocabulary of 64 and 32 positions.

    Args:
        in_shape: shape (length,) of one input.
        classes: size of the vocabulary.
        width: width of the embeddings; the perceptrons are twice as wide.
        heads: number of attention heads, a divisor of the width.
        layers: number of blocks.

    Returns:
        The model, which maps tokens int64 [n, length] to logits [n, length, classes].

    Raises:
        ConfigError: an option is below 1, there are more than 1,000 layers, or `heads` does not
            divide `width`.
    """
    _require_counts(width=width, heads=heads, layers=layers)
    if width % heads:
        raise ConfigError(f"heads must divide width, got heads = {heads} and width = {width}")
    return TransformerText(classes, in_shape[0], width, heads, layers)


_MOST = {"layers": 1000}  # limits on the number of objects, checked before the first object is made


def _require_counts(**values: int) -> None:
    for name, value in values.items():
        if check_count(name, value) > _MOST.get(name, value):
            raise ConfigError(f"{name} must be at most {_MOST[name]}, got {value}")
