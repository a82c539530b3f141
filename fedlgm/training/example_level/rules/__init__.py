"""Rules for layer types whose per-example gradients are clipped and summed during the backward
pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence

from fedlgm.errors import ConfigError
from fedlgm.training.example_level.rules.convolution import ConvolutionRule
from fedlgm.training.example_level.rules.embedding import EmbeddingRule
from fedlgm.training.example_level.rules.linear import LinearRule
from fedlgm.training.example_level.rules.normalisation import GroupNormRule, LayerNormRule
from fedlgm.training.example_level.rules.recurrent import GruRule, LstmRule
from fedlgm.training.example_level.rules.rule import (
    Kept,
    KeptGradients,
    Rule,
    Scale,
    Use,
    add_scaled_,
)
from fedlgm.training.example_level.rules.transposed import TransposedLinearRule
from fedlgm.training.models.built import is_altered

RULES: dict[type[nn.Module], type[Rule]] = {
    nn.Linear: LinearRule,
    nn.Conv1d: ConvolutionRule,
    nn.Conv2d: ConvolutionRule,
    nn.Embedding: EmbeddingRule,
    nn.LayerNorm: LayerNormRule,
    nn.GroupNorm: GroupNormRule,
    nn.LSTM: LstmRule,
    nn.GRU: GruRule,
}
_FOREIGN = {("transformers.pytorch_utils", "Conv1D"): TransposedLinearRule}
"""Rules for types of packages that are not imported here, by the type's module and name."""


def rule_for(module: nn.Module) -> type[Rule] | None:
    """Return the rule for exactly the type and configuration of a module; None without a rule.
    Subclasses have no rule, because their forward pass may differ. Altered modules, and modules
    with one parameter under two names, have no rule either.
    """
    kind = type(module)
    rule = RULES.get(kind) or _FOREIGN.get((kind.__module__, kind.__qualname__))
    named = [value for value in vars(module)["_parameters"].values() if value is not None]
    plain = not is_altered(module) and len({*map(id, named)}) == len(named)
    return rule if rule is not None and plain and rule.suits(module) else None


def require_rows(rule: type[Rule], module: nn.Module, name: str, x: Any) -> None:
    """Refuse an input of a layer if the input has no dimension for the example.

    Args:
        rule: rule of the layer's type.
        module: the layer.
        name: name of the layer.
        x: input of the layer.

    Raises:
        ConfigError: the input has no dimension for the example.
    """
    refuse_packed(module, name, (x,))
    if x.dim() < rule.dimensions(module):
        raise ConfigError(
            f"{name or 'the module'} ({type(module).__name__}) needs {rule.dimensions(module)} "
            f"dimensions, the example first, but got {tuple(x.shape)}, whose rows it would "
            "treat as one example"
        )


def refuse_packed(module: nn.Module, name: str, given: Iterable[Any]) -> None:
    """Refuse a packed sequence, which joins the rows of a batch.

    Raises:
        ConfigError: a value given to a layer is a packed sequence.
    """
    if any(isinstance(value, PackedSequence) for value in given):
        raise ConfigError(
            f"{name or 'the module'} ({type(module).__name__}) takes a packed sequence, which joins "
            "the rows of a batch, so that no example has a separate gradient: pass padded "
            "sequences, and read each output at its example's length"
        )


__all__ = [
    "RULES",
    "Kept",
    "KeptGradients",
    "Rule",
    "Scale",
    "Use",
    "add_scaled_",
    "refuse_packed",
    "require_rows",
    "rule_for",
]
