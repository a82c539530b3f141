"""Gradients of plain stacks of layers on the CPU, without autograd.

For one client's small batches, autograd's bookkeeping costs as much as the arithmetic. Each layer
therefore records its operations on a tape once per batch size, and a training step replays the
tape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fedlgm.training.inputs import Inputs
from fedlgm.training.models.built import is_altered
from fedlgm.training.stack import layers
from fedlgm.training.stack.convolutions import Convolution, ProductConvolution
from fedlgm.training.stack.tape import Memory, Tape
from fedlgm.training.tasks import Task


class Stack:
    """Computes the gradient of the mean loss of a stack of layers.

    The result agrees with autograd up to rounding. `Stack.of` creates a stack.

    Args:
        stack: the layers, in order from the input.
        dtype: dtype of the parameters.
        task: the task, which gives the loss.
    """

    def __init__(self, stack: list[layers.Layer], dtype: torch.dtype, task: Task) -> None:
        self._stack, self._dtype, self._task = stack, dtype, task
        self._first = next(
            i for i, layer in enumerate(stack) if isinstance(layer, layers.Parametric)
        )
        self._memories: dict[tuple[int, ...], Memory] = {}
        self._tapes: dict[tuple[object, ...], tuple[Tensor, Tensor, Tape]] = {}

    @classmethod
    def of(cls, module: nn.Module, gradients: Mapping[str, Tensor], task: Task) -> Stack | None:
        """Create the stack of a module. Return None unless the module is a sequence of supported
        layers.

        Args:
            module: module whose parameters are read in place. The parameters must stay in the same
                memory.
            gradients: a tensor for the gradient of each parameter, by the parameter's name.
            task: the task, which gives the loss.
        """
        if not is_plain_stack(module):
            return None
        stack: list[layers.Layer] = []
        for name, child in module.named_children():
            first = not any(isinstance(layer, layers.Parametric) for layer in stack)
            layer = _layer(
                name,
                child,
                first,
                [gradients[f"{name}.{leaf}"] for leaf, _ in child.named_parameters()],
            )
            overwrites = isinstance(layer, layers.Activation) and (
                not stack or isinstance(stack[-1], layers.Activation)
            )
            if layer is None or overwrites:
                return None
            stack.append(layer)
        dtypes = {parameter.dtype for parameter in module.parameters()}
        return cls(stack, dtypes.pop(), task) if len(dtypes) == 1 else None

    def takes(self, x: Inputs) -> bool:
        """Whether the stack supports inputs of this dtype and number of axes."""
        if not isinstance(x, Tensor) or x.dtype != self._dtype:
            return False
        axes = x.ndim
        for layer in self._stack:
            if isinstance(layer, layers.Flatten):
                axes = 2
            elif not isinstance(layer, layers.Activation) and axes != (
                2 if isinstance(layer, layers.Linear) else 4
            ):
                return False
        return axes == 2

    @torch.no_grad()
    def differentiate(self, x: Inputs, y: Tensor, rows: Tensor) -> None:
        """Compute the gradients for the batch `rows` [n] of inputs `x` [N, ...] and targets `y` [N,
        ...], and write them to the given tensors.
        """
        assert isinstance(x, Tensor)  # `takes` has checked this
        key = (len(rows), x.shape[1:], y.shape[1:], y.dtype)
        if key not in self._tapes:
            targets = torch.zeros((len(rows), *y.shape[1:]), dtype=y.dtype)
            self._tapes[key] = self._record((len(rows), *x.shape[1:]), targets)
        inputs, targets, tape = self._tapes[key]
        torch.index_select(x, 0, rows, out=inputs)
        torch.index_select(y, 0, rows, out=targets)
        tape.replay()

    def _record(self, shape: tuple[int, ...], targets: Tensor) -> tuple[Tensor, Tensor, Tape]:
        tape = Tape(self._memories.setdefault(shape[1:], Memory(self._dtype)))
        inputs = tape.memory.take("inputs", *shape)
        x = inputs.permute(0, 2, 3, 1) if len(shape) == 4 else inputs
        for layer in self._stack:
            x = layer.forward(tape, x)
        of_outputs = tape.memory.take("loss", *x.shape)
        for operation in self._task.gradient_operations(x, targets, of_outputs):
            tape.apply(operation)
        gradient: Tensor | None = of_outputs
        for i in range(len(self._stack) - 1, self._first - 1, -1):
            # All layers except the first layer with parameters compute the gradient of their input.
            assert gradient is not None
            gradient = self._stack[i].backward(tape, gradient, wanted=i > self._first)
        return inputs, targets, tape


def _layer(name: str, module: Any, first: bool, gradients: Sequence[Tensor]) -> layers.Layer | None:
    """Create a layer of the stack; None if the module is not supported. `first` is true if no layer
    with parameters comes before this layer.
    """
    kind = type(module)
    if kind in layers.Activation.KINDS:
        return layers.Activation(module)
    if kind is nn.Linear:
        return layers.Linear(name, module, *gradients)
    if kind is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        by_product = ProductConvolution.suits(module, first)
        return (ProductConvolution if by_product else Convolution)(name, module, *gradients)
    # Only exactly these classes are supported, because a subclass may have another `forward`.
    if kind is nn.MaxPool2d and layers.MaxPool.suits(module):
        return layers.MaxPool(name, module)
    if kind is nn.AvgPool2d:
        return layers.AveragePool(name, module)
    if kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return layers.Flatten(name)
    return None


def is_plain_stack(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module is a sequence of distinct layers without hooks, replaced `forward` methods,
    shared parameters or frozen parameters.
    """
    if type(module) is not nn.Sequential or any(map(is_altered, module.modules())):
        return False
    parameters = [parameter for child in module for parameter in child.parameters()]
    alone = len(set(module)) == len(module) and len(set(parameters)) == len(parameters)
    return alone and all(parameter.requires_grad for parameter in parameters)
