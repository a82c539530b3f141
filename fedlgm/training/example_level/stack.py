"""Passes over plain stacks of fully connected layers, without autograd and without hooks inside the
model.

For the small batches of clients, the overhead of autograd and of hooks costs several times as much
as the arithmetic. The operations and their order are the same as in `passes.Pass`, so the results
have the same bits. NumPy computes the few float64 numbers of every example, because a call of NumPy
costs a third of a call of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlgm.extension.loader import is_bundled
from fedlgm.planning.clipping import Scaling
from fedlgm.training.example_level.norms import norm_of
from fedlgm.training.example_level.passes import Place, Site, cast
from fedlgm.training.example_level.rules.linear import LinearRule
from fedlgm.training.example_level.rules.products import squares_of_rows
from fedlgm.training.example_level.rules.rule import add_product_, add_scaled_
from fedlgm.training.example_level.scaling import PerLayerClip
from fedlgm.training.stack.model import is_plain_stack
from fedlgm.training.tasks import Task

aten = torch.ops.aten
_ACTIVATIONS: dict[
    type[nn.Module], tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]
] = {
    nn.Tanh: (torch.tanh, aten.tanh_backward),
    nn.Sigmoid: (torch.sigmoid, aten.sigmoid_backward),
    nn.ReLU: (torch.relu, lambda gradient, y: aten.threshold_backward(gradient, y, 0)),
}


class StackPass:
    """Forward and backward pass of a stack. Use `StackPass.of`.

    Args:
        layers: the fully connected layers in order from the input, each with its activation and the
            activation's derivative (None without an activation).
        flattens: whether the stack flattens its inputs.
        task: task that computes the losses.
    """

    def __init__(self, layers: list[tuple[Site, Any, Any]], flattens: bool, task: Task) -> None:
        self._layers, self._flattens, self._task = layers, flattens, task
        entries: list[
            tuple[Place, tuple[int, bool, int]]
        ] = []  # (index of the layer from the last layer, whether it is the weight, column)
        for i, (site, *_) in enumerate(reversed(layers)):
            named = zip(site.rule.parameters, site.places, strict=True)
            entries += [(place, (i, name == "weight", place.column)) for name, place in named]
        self._places = [where for _, where in entries]
        entries.sort(key=lambda entry: entry[0].offset)
        self._parts, self._sizes = (
            [where for _, where in entries],
            [place.size for place, _ in entries],
        )
        self._columns = 1 + max(place.column for place, _ in entries)

    @classmethod
    def of(cls, module: nn.Module, sites: Sequence[Any], task: Any) -> StackPass | None:
        """Return the pass of a module, or None unless the module is a stack of fully connected
        layers on the CPU and the task belongs to this package.

        Args:
            module: module whose parameters are read in place.
            sites: sites of the module's layers.
            task: task that computes the losses. The losses of a user's task may depend on
                parameters outside the layers, so a user's task is not accepted.
        """
        if not is_plain_stack(module):
            return None
        cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
        if not (cpu and isinstance(task, Task) and is_bundled(task)):
            return None
        site_of, layers, children = {site.module: site for site in sites}, list[Any](), list(module)
        flattens = bool(children) and type(children[0]) is nn.Flatten and _whole(children[0])
        for child in children[flattens:]:
            site = site_of.get(child)
            if (
                isinstance(site, Site)
                and type(site.rule) is LinearRule
                and type(child) is nn.Linear
            ):
                layers.append((site, None, None))
            elif type(child) in _ACTIVATIONS and layers and layers[-1][1] is None:
                layers[-1] = (layers[-1][0], *_ACTIVATIONS[type(child)])
            else:
                return None
        return cls(layers, flattens, task) if layers else None

    def takes(self, inputs: tuple[Tensor, ...], scaling: Scaling) -> bool:
        """Whether the inputs have one row per example, and the scaling bounds the l2 norm and is
        not per-layer clipping.
        """
        rows = len(inputs) == 1 and (inputs[0].ndim == 2 or (self._flattens and inputs[0].ndim > 2))
        return rows and not isinstance(scaling, PerLayerClip) and norm_of(scaling).fused

    @torch.no_grad()
    def sum(
        self, x: Tensor, y: Tensor, scaling: Scaling, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the sum [D] of a batch's scaled gradients in the given dtype, and the norms [n,
        K] before scaling.

        Returns:
            The sum and the norms; None if a gradient is not finite, because only `passes.Pass`
            leaves out such examples.
        """
        inputs, gradients = self._differentiate(x.flatten(1), y)
        of_rows = squares_of_rows([*inputs, *gradients])
        if not math.isfinite(of_rows.sum()):
            return None
        of_gradients = of_rows[len(inputs) :]
        of_weights = of_rows[: len(inputs)] * of_gradients
        squares = np.zeros((x.shape[0], self._columns))
        for layer, weight, column in self._places:
            squares[:, column] += (of_weights if weight else of_gradients)[layer]
        # PyTorch computes the root, as in `Pass`, because NumPy rounds differently.
        norms = torch.from_numpy(squares).sqrt()
        factors = cast(scaling.factors(norms), x.dtype).t().contiguous().unbind()
        total = torch.zeros(sum(self._sizes), dtype=dtype)
        for part, (layer, weight, column) in zip(
            total.split_with_sizes(self._sizes), self._parts, strict=True
        ):
            dy, rows = gradients[layer], inputs[layer]
            if weight:
                scaled = dy * factors[column].unsqueeze(1)
                add_product_(part.view(dy.shape[1], rows.shape[1]), scaled, rows)
            else:
                add_scaled_(part, dy, factors[column])
        return total, norms

    def _differentiate(self, x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """For each layer, in order from the last, compute its input and the gradient of the sum of
        the losses with respect to its output.
        """
        inputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for site, activation, _ in self._layers:
            inputs.insert(0, x)
            # PyTorch's look-up of an attribute takes as long as some of the arithmetic
            parameters = site.module._parameters
            x = functional.linear(x, parameters["weight"], parameters["bias"])
            x = x if activation is None else activation(x)
        gradient = self._task.summed_gradient(x, y)
        for i, (site, _, derivative) in enumerate(reversed(self._layers)):
            if derivative is not None:
                gradient = derivative(gradient, inputs[i - 1] if i else x)
            gradients.append(gradient)
            if i + 1 < len(self._layers):
                gradient = gradient @ site.module._parameters["weight"]
        return inputs, gradients


def _whole(flatten: Any) -> bool:
    """Whether a flattening layer returns one row per example."""
    return (flatten.start_dim, flatten.end_dim) == (1, -1)
