"""The reference trainer: one client after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fedlgm.devices import exact_arithmetic
from fedlgm.layers import LayerTable
from fedlgm.training.base import ClientTask, LocalTraining, require_stateless
from fedlgm.training.layout import prefer_channels_last_
from fedlgm.training.optimizers import FlatOptimizer
from fedlgm.training.stack import Stack


class SequentialTrainer:
    """Trains clients one by one in one resident model.

    Parameters and gradients live in two flat vectors that the model shares, so that setting the model, stepping and
    taking the difference are single operations however many tensors it has.

    Args:
        module: the model, float32; it is taken over by the trainer.
        layers: its layer table.
        settings: local training.
        device: where to train; updates stay there.
    """

    def __init__(
        self, module: nn.Module, layers: LayerTable, settings: LocalTraining, device: torch.device | str = "cpu"
    ) -> None:
        require_stateless(module)
        self._device = torch.device(device)
        self._module, self._settings = module.to(self._device), settings
        self._weights = layers.bind_(self._module)
        self._gradient = torch.zeros_like(self._weights)
        self._update = torch.zeros_like(self._gradient)
        self._differentiate = _gradients(self._module, layers.unflatten(self._gradient), self._device)

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        """See `Trainer.updates`."""
        model = model.to(self._device)
        for task in tasks:
            with exact_arithmetic(self._device):
                self._train(model, task)
            torch.sub(self._weights, model, out=self._update)
            yield self._update[None]

    def _train(self, model: Tensor, task: ClientTask) -> None:
        settings = self._settings
        self._weights.copy_(model)
        optimizer = optimizer_of(settings, self._weights)
        self._module.train()
        inputs, targets = task.x.to(self._device), task.y.to(self._device)
        for order in task.permutations().to(self._device):
            for rows in order.split(settings.batch_size):
                self._differentiate(inputs, targets, rows)
                if settings.gradient_clip is not None:
                    norm = torch.linalg.vector_norm(self._gradient)
                    self._gradient.mul_(torch.clamp(settings.gradient_clip / norm, max=1.0))
                optimizer.step(self._gradient)


class Autograd:
    """Mean cross-entropy of any module, differentiated by autograd.

    Args:
        module: logits for a batch.
        gradients: a tensor for the gradient of every parameter, by the parameter's name.
    """

    def __init__(self, module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        self._module, parameters = module, dict(module.named_parameters())
        self._parameters = list(parameters.values())
        self._gradients = [gradients[name] for name in parameters]

    def differentiate(self, x: Tensor, y: Tensor, rows: Tensor) -> None:
        """Fill the gradients for the batch `rows` [n] of inputs `x` [N, ...] and integer targets `y` [N]."""
        loss = nn.functional.cross_entropy(self._module(x[rows]), y[rows])
        found = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        for into, gradient in zip(self._gradients, found, strict=True):
            into.copy_(gradient)


def _gradients(
    module: nn.Module, gradients: Mapping[str, Tensor], device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The fastest way to differentiate this module there."""
    if device.type != "cpu":
        return Autograd(module, gradients).differentiate
    stack = Stack.of(module, gradients)
    if stack is not None:
        return stack.differentiate
    prefer_channels_last_(module)
    return Autograd(module, gradients).differentiate


def optimizer_of(settings: LocalTraining, weights: Tensor) -> FlatOptimizer:
    """A fresh optimizer with these settings."""
    return FlatOptimizer(settings.optimizer, weights, lr=settings.lr, momentum=settings.momentum)
