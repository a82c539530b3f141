"""A trainer that trains one client after another, each in one call of the compiled kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.errors import ConfigError, DataError
from fedlgm.planning.layers import LayerTable
from fedlgm.training.base import ClientTask, LocalTraining, Trainer
from fedlgm.training.models.built import Built
from fedlgm.training.native import call
from fedlgm.training.native.library import library
from fedlgm.training.native.program import Program
from fedlgm.training.tasks import Classification, Task


class NativeTrainer(Trainer):
    """Trains plain stacks of layers on the CPU with a compiled kernel. The results agree with
    `SequentialTrainer` up to rounding.

    The results have the same bits on every machine that has the kernel, with any instruction set.
    The trainer refuses layers and options that the kernel does not support, and never uses other
    code instead.

    Args:
        module: the model, in float32. It must be a sequence of the layers that `Program.of` lists.
        layers: the model's layer table.
        settings: settings of local training.
        device: "cpu".
        task: the task, which gives the loss; None means classification.
        in_shape: shape of one input. If it is given, an unsupported model or task is refused by the
            constructor.

    Raises:
        ConfigError: the device is not the CPU, the machine has no kernel, or the kernel does not
            support the model or task. Without `in_shape`, an unsupported model or task is refused
            only when the first client is trained.

    Example:
        >>> from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer
        >>> module = nn.Sequential(nn.Linear(2, 2))
        >>> layers = LayerTable.from_module(module)
        >>> from fedlgm.training.native import reason
        >>> maker = NativeTrainer if reason() is None else SequentialTrainer
        >>> trainer = maker(module, layers, LocalTraining(lr=0.5, batch_size=2))
        >>> task = ClientTask(torch.eye(2), torch.tensor([0, 1]), torch.Generator(), epochs=1)
        >>> next(trainer.updates(layers.flatten(module), [task])).shape
        torch.Size([1, 6])
    """

    def __init__(
        self,
        module: nn.Module,
        layers: LayerTable,
        settings: LocalTraining,
        device: torch.device | str = "cpu",
        task: Task | None = None,
        in_shape: tuple[int, ...] | None = None,
    ) -> None:
        require_cpu(torch.device(device))
        if settings.weight_decay is not None:
            raise ConfigError(
                "the compiled kernel has no training.weight_decay: use training.kernel = 'torch'"
            )
        self._library, self._module, self._layers = library(), module, layers
        self._built = Built(module)
        self._task, self._batch = task or Classification(), settings.batch_size
        self._settings = call.Settings(
            settings.optimizer == "adam",
            settings.lr,
            settings.momentum,
            settings.gradient_clip or 0.0,
        )
        self._update = torch.zeros(int(layers.size))
        self._programs: dict[tuple[int, ...], Program] = {}
        if in_shape is not None:
            self._programs[in_shape] = Program.of(module, layers, in_shape, self._task)
        self._areas: dict[tuple[int, ...], tuple[int, Tensor]] = {}

    @override
    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        if model.shape != self._update.shape:
            raise ConfigError(
                f"the model has {model.numel()} parameters, but its layer table has "
                f"{self._update.numel()}"
            )
        for task in tasks:
            if task.trained is not None:
                raise ConfigError(
                    "training.kernel = 'native' trains all layers, but this plan freezes some: use "
                    "'torch'"
                )
            self._run(model, task, task.permutations(), self._settings)
            yield self._update[None]

    def gradient(self, model: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Compute the gradient [D] of the mean loss of a batch, without clipping."""
        self._run(model, ClientTask(x, y, torch.Generator(), 1), torch.arange(len(y))[None], None)
        return self._update.clone()

    def _run(
        self, model: Tensor, task: ClientTask, order: Tensor, settings: call.Settings | None
    ) -> None:
        self._built.check()
        x, y, model = (
            one_array(task.x, task.y, least=1),
            task.y,
            model.to("cpu", torch.float32).contiguous(),
        )
        batch = min(self._batch, len(x)) if settings else len(x)
        program, memory = self._program(tuple(x.shape[1:]), batch)
        x, y = x.contiguous(), targets(program, y)
        call.run(
            self._library,
            program.ops,
            x,
            y,
            order.contiguous(),
            batch,
            program.loss,
            settings,
            model,
            self._update,
            memory,
        )

    def _program(self, shape: tuple[int, ...], batch: int) -> tuple[Program, Tensor]:
        """Return the program for inputs of one shape, and memory for the largest batch so far."""
        if shape not in self._programs:
            self._programs[shape] = Program.of(self._module, self._layers, shape, self._task)
        program = self._programs[shape]
        if self._areas.get(shape, (0,))[0] < batch:
            self._areas[shape] = batch, call.area(self._library, program.ops, batch)
        return program, self._areas[shape][1]


def require_cpu(device: torch.device) -> None:
    """Raise ConfigError if the device is not the CPU."""
    if device.type != "cpu":
        raise ConfigError(
            f"training.kernel = 'native' trains on the CPU, not on {device}: use 'torch'"
        )


def one_array(x: Any, y: Any, least: int = 0) -> Tensor:
    """Return the inputs. Raise ConfigError unless they are one float32 tensor of at least `least`
    examples, with one target for each.
    """
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or not least <= x.shape[0] == len(y):
        raise ConfigError(
            "training.kernel = 'native' needs one float32 array of inputs with one target per input: "
            "use training.kernel = 'torch'"
        )
    return x


def targets(program: Program, y: Tensor) -> Tensor:
    """Check targets and convert them to the form that the kernel reads. The check is necessary
    because the kernel uses classes as indices.

    Raises:
        ConfigError: the number of targets of an example differs from the model's number of outputs.
        DataError: targets are not classes of the model.
    """
    if program.loss:
        if y[0].numel() != program.outputs:
            raise ConfigError(
                f"the model has {program.outputs} outputs, but an example has {y[0].numel()} "
                "targets"
            )
        return y.to(torch.float32).reshape(len(y), -1).contiguous()
    if y.ndim != 1 or y.dtype.is_floating_point:
        raise DataError(
            f"targets of shape {tuple(y.shape)} and type {y.dtype}; classes are whole numbers [n]"
        )
    y = y.to(torch.int64).contiguous()
    extremes = torch.aminmax(y)
    low, high = int(extremes.min), int(extremes.max)
    if low < 0 or high >= program.outputs:
        raise DataError(
            f"the model has {program.outputs} outputs, but targets range from {low} to {high}"
        )
    return y
