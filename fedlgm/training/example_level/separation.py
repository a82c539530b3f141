"""Separation of the rows of a batch in a model's forward pass.

A clipped gradient bounds an example's effect only if the gradient is a function of that example
alone. There are three ways of computing the outputs of a batch, which differ in what they prove:

* `KnownLayers`: the model consists of layers that treat rows independently. A batch is one call.
* `MappedRows`: the model's code runs under `torch.func.vmap`, where the code sees one row and
  cannot access the other rows. The layers inside the model still get the whole batch, so their
  gradients are clipped and summed at the usual cost.
* `TriedRows`: the model does not run under vmap. A batch is one call, and trials are the only
  evidence that the rows do not influence each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from typing_extensions import override

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import package_of, users_code
from fedlgm.training.devices import fork_rng
from fedlgm.training.example_level.generic import GenericSite
from fedlgm.training.example_level.on_batch import call_on_batch
from fedlgm.training.example_level.passes import call_without_graph
from fedlgm.training.example_level.rules import RULES, Rule, require_rows
from fedlgm.training.models.built import is_altered

Call = Callable[..., Any]
"""Forward pass of a layer for a whole batch, called as `call(site, *arguments, **named)`. For a
layer with a rule, the argument is one tensor that joins all inputs, and the result is the output of
the rule's `forward`.
"""
Patch = Callable[[Call, bool], AbstractContextManager[None]]
"""A function that returns a context in which a `Call` computes the layers. If the flag is set, this
package's own code computes max-pooling.
"""

TRIED_ROWS = (
    "conditional on the model treating the rows of a batch independently, which a trial on a few "
    "examples supports: the model does not run under torch.func.vmap"
)
"""Condition of a guarantee if a trial is the only evidence that rows do not influence each other.
"""

_ROW_WISE: frozenset[type[nn.Module]] = frozenset({
    *RULES.keys() - {nn.LSTM, nn.GRU}, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Dropout,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.LogSigmoid,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
})  # fmt: skip
"""PyTorch's layer types whose output for a row depends on this row alone. A row is one index of the
first dimension.
"""

_ROW_WISE_NAMES = frozenset(
    ("torchvision.models.resnet", name) for name in ("ResNet", "BasicBlock", "Bottleneck")
)
"""Types in torchvision with the same property, by module and name, because torchvision is not
imported here.
"""


class Separation(Protocol):
    """A way of computing a model's outputs for a batch.

    Attributes:
        condition: what a guarantee assumes about the model; empty if rows are separated by
            construction.
    """

    condition: str

    def outputs(self, x: tuple[Tensor, ...], call: Call) -> Any:
        """Compute outputs [n, ...] for inputs [n, ...]; `call` computes the layers."""


def separate(
    module: nn.Module, sites: Sequence[Any], x: tuple[Tensor, ...], patch: Patch
) -> Separation:
    """Return the first of the three ways of separation that the model supports.

    Args:
        module: the model.
        sites: layers of the model.
        x: inputs of at least one example [n, ...], on the model's device; their values make no
            difference.
        patch: function that replaces the layers' forward passes.

    Raises:
        ConfigError: a known layer would treat all rows of such inputs as one example, or fails on
            one row, as GroupNorm does with one value per group.

    Example:
        >>> from contextlib import nullcontext
        >>> class Centred(nn.Linear):
        ...     __module__ = "mypkg.models"
        ...
        ...     def forward(self, x):
        ...         return super().forward(x - x.mean(dim=0))
        >>> type(separate(nn.Linear(2, 1), [], (torch.ones(3, 2),), lambda *_: nullcontext())).__name__
        'KnownLayers'
        >>> type(separate(Centred(2, 1), [], (torch.ones(3, 2),), lambda *_: nullcontext())).__name__
        'MappedRows'
    """
    if has_known_layers(module):
        _require_rows(module, x)
        return KnownLayers(module, patch)
    if any(part._backward_hooks for part in module.modules()):
        return TriedRows(module, patch, RuntimeError("hooks on gradients do not run there"))
    mapped = MappedRows(module, sites, patch)
    try:
        with torch.no_grad(), fork_rng(None):
            mapped.outputs(
                tuple(value[:1].expand(2, *value.shape[1:]) for value in x), call_without_graph
            )
    except Exception as error:  # of the user's code, or of an operation that vmap does not support
        return TriedRows(module, patch, error)
    return mapped


def has_known_layers(module: nn.Module) -> bool:
    """Whether a model consists only of layers that treat rows independently. The layers are
    recognised by their exact type, and must have no hooks.

    Example:
        >>> has_known_layers(nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU())), has_known_layers(nn.GRU(2, 3))
        (True, False)
    """
    return all(map(_is_row_wise, module.modules()))


def _require_rows(module: nn.Module, x: tuple[Tensor, ...]) -> None:
    """Refuse inputs whose rows a known layer, trained or frozen, would treat as one example."""

    def checking(rule: type[Rule], name: str) -> Callable[..., None]:
        return lambda part, given, named: require_rows(
            rule, part, name, (*given, *named.values())[0]
        )

    handles = [
        part.register_forward_pre_hook(checking(RULES[type(part)], name), with_kwargs=True)
        for name, part in module.named_modules()
        if type(part) in RULES
    ]
    try:
        single = users_code("the model fails on one example", module)
        with single, torch.no_grad(), fork_rng(None, x[0].device):
            module(*(value[:1] for value in x))
    finally:
        for handle in handles:
            handle.remove()


class KnownLayers(Separation):
    """Computes a batch in one call of a model whose layers treat rows independently.

    Args:
        module: the model.
        patch: see `separate`.
    """

    condition = ""

    def __init__(self, module: nn.Module, patch: Patch) -> None:
        self._module, self._patch = module, patch

    @override
    def outputs(self, x: tuple[Tensor, ...], call: Call) -> Any:
        with self._patch(partial(_call_layer, call), True):
            return self._module(*x)


class TriedRows(KnownLayers):
    """Computes a batch in one call of a model for which trials are the only evidence that rows do
    not influence each other.

    Attributes:
        reason: reason why the model does not run under vmap.
    """

    condition = TRIED_ROWS

    def __init__(self, module: nn.Module, patch: Patch, error: Exception) -> None:
        super().__init__(module, patch)
        self.reason = str(error).partition("\n")[0] or type(error).__name__


class MappedRows(KnownLayers):
    """Computes a batch by the model under `torch.func.vmap`, where each layer is called with the
    whole batch.

    Args:
        module: the model.
        sites: layers of the model.
        patch: see `separate`.
    """

    def __init__(self, module: nn.Module, sites: Sequence[Any], patch: Patch) -> None:
        super().__init__(module, patch)
        self._generic = [site for site in sites if isinstance(site, GenericSite)]

    @override
    def outputs(self, x: tuple[Tensor, ...], call: Call) -> Any:
        def of_row(leaves: list[dict[str, Tensor]], values: tuple[Tensor, ...]) -> Any:
            for site, parameters in zip(self._generic, leaves, strict=True):
                site.of_row = parameters
            with self._patch(partial(_call_row, call, values[0]), False):
                outputs = self._module(*(value[None] for value in values))
            return pytree.tree_map(_only_row, outputs)

        leaves = [site.expand(len(x[0])) for site in self._generic]
        fast = torch.backends.mha.get_fastpath_enabled()
        # The fast path and the fused kernels have no rule for vmap.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.vmap(of_row, randomness="different")(leaves, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def _is_row_wise(part: nn.Module) -> bool:
    if is_altered(part):
        return False
    if type(part) is nn.Flatten:
        return part.start_dim >= 1
    kind = type(part)
    named = (kind.__module__, kind.__qualname__) in _ROW_WISE_NAMES
    return kind in _ROW_WISE or named or package_of(kind) == "fedlgm"


def _call_layer(call: Call, site: Any, *arguments: Any, **named: Any) -> Any:
    """Compute a layer's outputs for the batch."""
    if isinstance(site, GenericSite):
        return call(site, *arguments, **named)
    return site.rule.outputs(call(site, _join(site, *arguments, *named.values())))


def _call_row(call: Call, row: Tensor, site: Any, *arguments: Any, **named: Any) -> Any:
    """Compute a layer's outputs for one row under vmap, from one call of the layer for the whole
    batch.
    """
    if isinstance(site, GenericSite):
        return site.call_row(row, arguments, named)
    x = _join(site, *arguments, *named.values())
    _require_one_row(site.name, x)
    return site.rule.outputs(
        call_on_batch(
            lambda rows: call(site, rows.flatten(0, 1)).unflatten(0, (len(rows), 1)), row, x
        )
    )


def _join(site: Any, *given: Any) -> Tensor:
    require_rows(type(site.rule), site.module, site.name, given[0])
    joined: Tensor = site.rule.join(*given)
    return joined


def _only_row(output: Any) -> Any:
    if isinstance(output, Tensor):
        _require_one_row("the output", output)
        return output[0]
    return output


def _require_one_row(name: str, value: Tensor) -> None:
    if value.dim() == 0 or len(value) != 1:
        raise ConfigError(
            f"{name} has shape {tuple(value.shape)} for one example: the first dimension must be "
            "the example throughout"
        )
