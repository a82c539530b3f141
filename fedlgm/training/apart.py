"""A user's trainer, which is created anew for every client from fresh copies of all objects that
the user may have defined.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.aggregation.contributions import Updates
from fedlgm.errors import ConfigError
from fedlgm.extension.restored import Watched, one_client
from fedlgm.training.base import ClientTask, Trainer
from fedlgm.training.devices import fork_rng
from fedlgm.training.models.copies import copy_model
from fedlgm.training.tasks import Task


class ClientsApart(Trainer):
    """Trains each client with a separate trainer, so that no trainer, model or task sees two
    clients.

    If the task or the maker cannot be copied, one trainer trains all clients, and `shared_state`
    reports this.

    Args:
        make: function or class (module, layers, settings, *, device, task) -> `Trainer`, which
            creates a trainer.
        module: see `SequentialTrainer`.
        given: the layer table and the settings; see `SequentialTrainer`.
        device: see `SequentialTrainer`.
        task: see `SequentialTrainer`.

    Raises:
        ConfigError: the model cannot be copied.

    Example:
        >>> class Counts:
        ...     def __init__(self, module, layers, settings, *, device, task):
        ...         self.clients, self.size = 0, layers.size
        ...     def updates(self, model, tasks):
        ...         for _ in tasks:
        ...             self.clients += 1
        ...             yield torch.full((1, self.size), float(self.clients))
        >>> from fedlgm import LayerTable
        >>> from fedlgm.training import LocalTraining
        >>> module = nn.Linear(1, 1)
        >>> layers = LayerTable.from_module(module)
        >>> trainer = ClientsApart(Counts, module, layers, LocalTraining())
        >>> task = ClientTask(torch.zeros(1, 1), torch.zeros(1), torch.Generator(), 1)
        >>> [update.tolist() for update in trainer.updates(layers.flatten(module), [task, task])]
        [[[1.0, 1.0]], [[1.0, 1.0]]]
    """

    def __init__(
        self,
        make: Callable[..., Trainer],
        module: nn.Module,
        *given: Any,
        device: torch.device | str = "cpu",
        task: Task | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._parts: tuple[Any, ...] = make, module, *given, task
        self._shared: Trainer | None = None
        self._watched: Watched | None = None
        copy_model(module)
        try:
            self._parts = copy.deepcopy(self._parts)  # the caller may use its objects elsewhere
        except Exception:  # a user's object may raise anything
            self._shared = self._trainer(self._parts)
            return
        self._watched = Watched(model=module, task=task, trainer=make)
        self._own_trainer()  # raises the error of a trainer that refuses the model before any client is trained

    @override
    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Updates]:
        for task in tasks:
            trainer = self._shared or self._own_trainer()
            task_copy = replace(
                task, trained=None if task.trained is None else task.trained.clone()
            )
            # Without a seed, a client's random numbers would depend on the draws of earlier
            # clients.
            with fork_rng(task.order.initial_seed(), self._device):
                updates = list(trainer.updates(model.clone(), [task_copy]))
            if self._watched is not None:
                self._watched.check()
            if len(updates) != 1 or len(updates[0]) != 1:
                raise ConfigError(
                    f"the trainer yields {sum(map(len, updates))} updates for one client: yield "
                    "one [1, D] per task"
                )
            yield updates[0]

    def _own_trainer(self) -> Trainer:
        with one_client():
            return self._trainer(copy.deepcopy(self._parts))

    def _trainer(self, parts: tuple[Any, ...]) -> Trainer:
        make, *given, task = parts
        trainer: Trainer = make(*given, device=self._device, task=task)
        return trainer
