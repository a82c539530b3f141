"""The reference trainer, which trains one client after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.extension.restored import Restored, fresh
from fedlgm.extension.separation import keeps_nothing
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.layout import pools_maxima, prefer_channels_last_
from fedlgm.training import inputs
from fedlgm.training.base import ClientTask, LocalTraining, Trainer
from fedlgm.training.devices import exact_arithmetic, fork_rng, keep_freed_memory
from fedlgm.training.inputs import Inputs
from fedlgm.training.models.built import Built
from fedlgm.training.models.requirements import Unchanged, require_stateless
from fedlgm.training.optimizers import FlatOptimizer
from fedlgm.training.stack import Stack
from fedlgm.training.tasks import Classification, Task


class SequentialTrainer(Trainer):
    """Trains clients one by one, with one model that stays in memory. A user's model and task are
    restored before each client.

    The model's parameters, and their gradients, are views of two flat vectors. Setting the weights,
    taking a step and computing the update are therefore single operations for any number of
    parameters.

    Args:
        module: the model in float32; the trainer changes its weights.
        layers: the model's layer table.
        settings: settings of local training.
        device: device on which the clients are trained; updates stay on this device.
        task: the task, which gives the loss; None means classification.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: LayerTable,
        settings: LocalTraining,
        device: torch.device | str = "cpu",
        task: Task | None = None,
    ) -> None:
        require_stateless(module)
        self._device = torch.device(device)
        self._module, self._settings = module.to(self._device), settings
        self._weights = layers.bind_(self._module)
        self._gradient = torch.zeros_like(self._weights)
        self._update = torch.zeros_like(self._gradient)
        task, gradients, cpu = (
            fresh(task or Classification()),
            layers.unflatten(self._gradient),
            self._device.type == "cpu",
        )
        self._built, self._state = Built(self._module), Unchanged(self._module)
        recorded = cpu and (
            keeps_nothing(task) or type(task).gradient_operations is Task.gradient_operations
        )
        self._stack = Stack.of(self._module, gradients, task) if recorded else None
        self._task, self._restored = task, Restored.of(self._module, task)
        self._autograd, self._unsettled = Autograd(self._module, gradients, task), cpu

    @override
    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        model = model.to(self._device)
        for task in tasks:
            with exact_arithmetic(self._device):
                self._train(model, task)
            torch.sub(self._weights, model, out=self._update)
            yield self._update[None]

    def _train(self, model: Tensor, task: ClientTask) -> None:
        settings = self._settings
        restore(self._restored, self._built)
        self._weights.copy_(model)
        x, y = inputs.to(task.x, self._device), task.y.to(self._device)
        trained = None if task.trained is None else task.trained.to(self._device)
        stack, orders = self._stack_for(x), task.permutations().to(self._device)
        if stack is None:
            self._module.train()
        optimizer = self._optimizer(len(orders) * -(-len(y) // settings.batch_size))
        optimizer.trained = trained
        differentiate = (stack or self._autograd).differentiate
        # Layers of a stack draw no random numbers. A user's task may draw some, which would differ
        # between a stack and autograd without a seed.
        with (
            nullcontext()
            if stack and self._restored is None
            else fork_rng(task.seed(), self._device)
        ):
            for rows in (rows for order in orders for rows in order.split(settings.batch_size)):
                differentiate(x, y, rows)
                self.adjust_(self._gradient, self._weights, model)
                if trained is not None:
                    self._gradient.mul_(trained)
                if settings.gradient_clip is not None:
                    norm = torch.linalg.vector_norm(self._gradient)
                    self._gradient.mul_(torch.clamp(settings.gradient_clip / norm, max=1.0))
                optimizer.step(self._gradient)
        self._state.check()
        if self._restored is not None:
            self._restored.check()

    def _stack_for(self, x: Inputs) -> Stack | None:
        """Return the stack that differentiates the module without autograd; None if there is no
        stack for inputs like `x`.

        Raises:
            ConfigError: the module was changed after the trainer was created.
        """
        self._built.check()
        if self._stack is not None and self._stack.takes(x):
            return self._stack
        if self._unsettled:
            self._unsettled = False
            pooled = pools_maxima(self._module, x)
            # `pools_maxima` may have run a user's model on zeros.
            restore(self._restored, self._built)
            if pooled:
                prefer_channels_last_(self._module)
                self._built.renew()
                self._restored = Restored.of(self._module, self._task)
        return None

    def _optimizer(self, steps: int) -> FlatOptimizer:
        """Create an optimizer for the `steps` steps of one client."""
        return FlatOptimizer.of(self._settings, self._weights)

    def adjust_(self, gradient: Tensor, weights: Tensor, model: Tensor) -> None:
        """Change a step's gradient [D] in place, for local objectives other than the loss. By
        default, the gradient is not changed.

        Subclasses such as `FedProx` override this method.

        Args:
            gradient: gradient of the batch's loss, before `gradient_clip`.
            weights: the client's current weights [D].
            model: the global model [D].
        """


def restore(restored: Restored | None, built: Built) -> bool:
    """Restore a user's model and task before the next client. Return whether the restored objects
    may have changed.

    Raises:
        ConfigError: the model was changed after its trainer was created.
    """
    if restored is None:
        return False
    built.check()
    changed = restored.restore()
    built.renew_if_changed()
    return changed


class Autograd:
    """Computes the gradient of the mean loss of any module, with autograd.

    Args:
        module: a module that returns outputs for a batch.
        gradients: a tensor for the gradient of each trained parameter, by the parameter's name.
        task: the task, which gives the loss.
    """

    def __init__(self, module: nn.Module, gradients: Mapping[str, Tensor], task: Task) -> None:
        keep_freed_memory()
        self._module, self._task, parameters = module, task, dict(module.named_parameters())
        self._parameters = [parameters[name] for name in gradients]
        self._gradients = list(gradients.values())

    def differentiate(self, x: Inputs, y: Tensor, rows: Tensor) -> None:
        """Compute the gradients for the batch `rows` [n] of inputs `x` [N, ...] and targets `y` [N,
        ...], and write them to the given tensors.
        """
        loss = self._task.loss(self._outputs(inputs.take(x, rows)), y[rows])
        gradients = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        for into, gradient in zip(self._gradients, gradients, strict=True):
            into.copy_(gradient)

    def _outputs(self, x: Inputs) -> Tensor:
        outputs: Tensor = inputs.call(self._module, x)
        return outputs
