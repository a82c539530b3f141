"""The vectorised trainer, which trains many clients at once with `torch.func`.

In every step, one backward pass under vmap over stacked parameters computes the gradients of all
clients in a batch. The examples of clients of unequal size are padded and masked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedlgm.aggregation.kernels import empty_block
from fedlgm.errors import ConfigError, MemoryWarning, Notice, out_of_memory
from fedlgm.extension.restored import Restored, fresh
from fedlgm.planning.layers import LayerTable
from fedlgm.training.base import ClientTask, LocalTraining
from fedlgm.training.devices import exact_arithmetic, keep_freed_memory
from fedlgm.training.inputs import Inputs, parts
from fedlgm.training.models.built import Built, refuse_gradient_hooks
from fedlgm.training.models.requirements import Unchanged, require_stateless
from fedlgm.training.optimizers import FlatOptimizer
from fedlgm.training.recorded import Recorded
from fedlgm.training.schedule import Schedule
from fedlgm.training.sequential import restore
from fedlgm.training.tasks import Classification, Task

Gradients = Callable[[dict[str, Tensor], Inputs, Tensor, Tensor], dict[str, Tensor]]


class VectorizedTrainer:
    """Trains up to `width` clients at once.

    The results agree with `SequentialTrainer` up to rounding, because the batches, their order and
    the optimizer are the same. On a CUDA device, the kernels of a step's gradients are recorded
    once and then replayed (`fedlgm.training.recorded`). A user's model and task are restored before
    each batch of clients. Within a batch, `vmap` keeps the clients separate, and the number and the
    shapes of a client's steps do not depend on the other clients.

    Args:
        module: the model in float32, of which the structure and the buffers are used; the weights
            come from the global model.
        layers: the model's layer table.
        settings: settings of local training.
        width: number of clients that are trained at once. It is halved permanently if a batch of
            clients does not fit into memory.
        compile: whether to compile the step with `torch.compile`. Without a working compiler, the
            step runs uncompiled after one notice.
        device: device on which the clients are trained; updates stay on this device.
        task: the task, which gives the loss; None means classification.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: LayerTable,
        settings: LocalTraining,
        *,
        width: int = 8,
        compile: bool = False,
        device: torch.device | str = "cpu",
        task: Task | None = None,
    ) -> None:
        require_stateless(module)
        refuse_gradient_hooks(module)
        keep_freed_memory()
        self._layers, self._settings, self._width = layers, settings, width
        self._device = torch.device(device)
        module = module.to(self._device).train()
        task = fresh(task or Classification())
        losses_of, self._restored = task.losses, Restored.of(module, task)
        self._state, self._built, self._proven = Unchanged(module), Built(module), False

        # Gradients are computed with respect to the parameters, not to the flat vector, because the
        # gradient of each slice of the vector would be as long as the vector.
        def loss(parameters: dict[str, Tensor], x: Inputs, y: Tensor, mask: Tensor) -> Tensor:
            outputs = functional_call(module, parameters, parts(x))
            losses = losses_of(outputs, y)
            return (losses * mask).sum() / mask.sum().clamp(min=1)

        self._eager: Gradients = vmap(grad(loss))
        self._fast: Gradients | None = None
        self._compiles, cuda = compile, self._device.type == "cuda"
        if compile:
            # The compiler must choose kernels by rules and not by measured times, because the bits
            # of results must not depend on timing.
            options: dict[str, Any] | None = {"deterministic": True} if cuda else None
            self._fast = torch.compile(self._eager, dynamic=False, options=options)
        elif cuda:
            self._fast = Recorded(self._eager)

    @property
    def width(self) -> int:
        """Number of clients that are trained at once, after any halving."""
        return self._width

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        """Yield the clients' updates in blocks of up to `width` clients, [b, D], in the order of
        `tasks`.
        """
        self._built.check()
        waiting = list(tasks)
        # The order is drawn only once, because a batch of clients that is tried again must use the
        # same order of examples.
        orders = [task.permutations() for task in waiting]
        model = model.to(self._device)
        position = 0
        while position < len(waiting):
            part = slice(position, position + self._width)
            try:
                with exact_arithmetic(self._device):
                    updates = self._train(model, waiting[part], orders[part])
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or self._width == 1:
                    raise
                self._halve()
                continue
            position += len(updates)
            yield updates
            del updates  # before the next updates need the memory

    def _halve(self) -> None:
        half = (self._width + 1) // 2
        text = f"{self._width} clients at once do not fit into memory: continuing with {half}"
        warnings.warn(text, MemoryWarning, stacklevel=3)
        self._width = half

    def _train(self, model: Tensor, batch: list[ClientTask], orders: list[Tensor]) -> Tensor:
        """Train one batch of clients, and return their updates [clients, D]."""
        if restore(self._restored, self._built) and isinstance(self._fast, Recorded):
            # The old recording reads tensors of the model that `restore` may have replaced.
            self._fast = Recorded(self._eager)
        schedule = Schedule(batch, orders, self._width, self._settings.batch_size, self._device)
        weights = model.expand(self._width, -1).clone()
        parameters = self._layers.unflatten(weights)
        gradient = torch.zeros_like(weights)
        trained = None if batch[0].trained is None else batch[0].trained.to(self._device)
        optimizer = FlatOptimizer.of(self._settings, weights)
        optimizer.trained = trained
        result = empty_block(self._width, self._layers.size, self._device, weights.dtype)
        for step in range(schedule.steps):
            gradients = self._call(parameters, *schedule.batch(step))
            torch.cat([gradients[name].flatten(1) for name in parameters], dim=1, out=gradient)
            self.adjust_(gradient, weights, model)
            if trained is not None:
                gradient.mul_(trained)
            self._clip_(gradient)
            optimizer.step(gradient)
            # Rows of finished clients still take steps with the other rows, so the finished weights
            # are copied here.
            done = schedule.finishing_rows(step)
            if len(done):
                result[done] = weights[done]
        self._state.check()
        if self._restored is not None:
            self._restored.check()
        return result[: len(batch)].sub_(model)

    def _call(
        self, parameters: dict[str, Tensor], x: Inputs, y: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        if self._fast is not None and (self._compiles or self._proven):
            try:
                return self._fast(parameters, x, y, mask)
            except Exception as error:  # the compiler's failures have no common base
                if out_of_memory(error):
                    raise
                kind, self._fast = type(error).__name__, None
                text = (
                    f"the step cannot be recorded as a CUDA graph ({kind}): launching its kernels"
                )
                if self._compiles:
                    text = f"torch.compile does not work here ({kind}): running uncompiled"
                warnings.warn(text, Notice, stacklevel=2)
        try:
            gradients = self._eager(parameters, x, y, mask)
        except Exception as error:  # what torch.func cannot transform fails in many ways
            if self._proven or out_of_memory(error):
                raise
            raise ConfigError(
                "training.vectorize: this model and task cannot train many clients at once: use "
                "training.vectorize = 'off' (a model of transformers may need "
                'attn_implementation="eager", use_cache=False and inputs without an attention '
                f"mask): {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            ) from error
        self._proven = True
        return gradients

    def adjust_(self, gradient: Tensor, weights: Tensor, model: Tensor) -> None:
        """Change the gradients [width, D] of a step in place; see `SequentialTrainer.adjust_`."""

    def _clip_(self, gradient: Tensor) -> None:
        bound = self._settings.gradient_clip
        if bound is not None:
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_(torch.clamp(bound / norms, max=1.0))
