"""The reference trainer: one client after another, plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from fedlgm.devices import exact_arithmetic
from fedlgm.layers import LayerTable
from fedlgm.training.base import ClientTask, LocalTraining
from fedlgm.training.layout import prefer_channels_last_
from fedlgm.training.optimizers import FlatOptimizer


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
        self._device = torch.device(device)
        module = module.to(self._device)
        if self._device.type == "cpu":
            prefer_channels_last_(module)
        self._module, self._settings = module, settings
        self._weights = layers.bind_(module)
        self._gradient = torch.zeros_like(self._weights)
        self._update = torch.zeros_like(self._gradient)
        views = layers.unflatten(self._gradient)
        self._parameters = dict(module.named_parameters())
        self._views = [views[name] for name in self._parameters]

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
            batches = zip(
                inputs[order].split(settings.batch_size), targets[order].split(settings.batch_size), strict=True
            )
            for x, y in batches:
                loss = nn.functional.cross_entropy(self._module(x), y)
                self._differentiate(loss)
                if settings.gradient_clip is not None:
                    norm = torch.linalg.vector_norm(self._gradient)
                    self._gradient.mul_(torch.clamp(settings.gradient_clip / norm, max=1.0))
                optimizer.step(self._gradient)

    def _differentiate(self, loss: Tensor) -> None:
        """Fill the flat gradient; cheaper than accumulating into `.grad`."""
        gradients = torch.autograd.grad(loss, list(self._parameters.values()), materialize_grads=True)
        for view, gradient in zip(self._views, gradients, strict=True):
            view.copy_(gradient)


def optimizer_of(settings: LocalTraining, weights: Tensor) -> FlatOptimizer:
    """A fresh optimizer with these settings."""
    return FlatOptimizer(settings.optimizer, weights, lr=settings.lr, momentum=settings.momentum)
