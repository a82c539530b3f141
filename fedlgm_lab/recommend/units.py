"""Contributions of a run's units, computed from public examples: clients' updates, or examples'
gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fedlgm import data
from fedlgm.aggregation.bounded_sum import bound_update
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.mechanisms import BoundsExamples
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training import ClientTask, inputs, kinds
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.scaling import FlatClip
from fedlgm.training.optimizers import FlatOptimizer
from fedlgm.training.tasks import Task
from simulations.config.assembly import Assembly

CLIENTS = 48
"""Largest number of clients that are trained at a stage of the warm-up."""


class Units(ABC):
    """Public examples that take the place of the protected units.

    Args:
        assembly: the recipe's objects over the public examples.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly, self._module = assembly, assembly.model.module()
        self.layers = LayerTable.from_module(self._module, assembly.recipe.mechanism.group_by)
        self._weights = self.layers.bind_(self._module)
        self.x = inputs.tensors(assembly.data.dataset.train_x)
        self.y = torch.from_numpy(assembly.data.dataset.train_y)
        self.warming = len(self.y) * 2 // 5
        """Number of examples for the warm-up, which are taken first. The units have the other
        examples, which are new to the model, as in a run."""

    @abstractmethod
    def warm_up(self, model: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Train a copy of the model [D] by steps on batches of these rows, without noise."""

    @abstractmethod
    def observe(
        self, model: Tensor, methods: Sequence[Method]
    ) -> tuple[list[Tensor], list[ReleasePlan], Tensor]:
        """Compute the contributions at a model [D].

        Returns:
            The mean bounded change of the model [D] and the plan of each method, and the layers' l2
            norms of the units' unbounded contributions [units, K].
        """

    def _descend(self, model: Tensor, gradients: Iterable[Tensor]) -> Tensor:
        """Return the model after the recipe's local optimizer has made a step along each gradient
        in turn.
        """
        training = self.assembly.recipe.training
        self._weights.copy_(model)
        self._module.train()
        optimizer = FlatOptimizer.of(training.local, self._weights)
        for gradient in gradients:
            optimizer.step(gradient)
        return self._weights.clone()


class Clients(Units):
    """Clients that train on public examples, which the recipe's partition divides among them.

    If users are the unit, a user's contribution is the mean of several clients' updates.

    Args:
        assembly: see `Units`.
        most: largest number of passes over single examples per stage.
        share: mean number of examples of a client.
    """

    def __init__(self, assembly: Assembly, most: int, share: float) -> None:
        super().__init__(assembly)
        section, training = assembly.recipe.data, assembly.recipe.training
        dataset = assembly.data.dataset
        rest = replace(
            dataset,
            train_x=inputs.take(dataset.train_x, slice(self.warming, None)),
            train_y=dataset.train_y[self.warming :],
        )
        count = max(2, round(len(rest.train_y) / max(share, 1.0)))
        division = data.divide(
            rest, count, section.partition, seed=section.partition_seed, **section.options
        )
        filled = [rows.astype(np.int64) for rows in division if len(rows)]
        affordable = int(most / (max(share, 1.0) * training.epochs))
        self._of_unit = max(
            1, assembly.recipe.federation.clients // assembly.recipe.sampling.population
        )
        units = max(4, min(CLIENTS, affordable) // self._of_unit)
        self._clients = filled[: min(units, max(1, len(filled) // self._of_unit)) * self._of_unit]
        self._trainer = assembly.model.trainer(compiled=False)
        self._server = assembly.model.server_optimizer()

    def warm_up(self, model: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """See `Units`. The clients' optimizer makes the steps, on the examples that are set aside
        for the warm-up.

        Trainers other than the plain trainer may rely on the bound and on the server's step. With
        these trainers each step of the warm-up is a round of one client with one batch.
        """
        if self.assembly.model.trainer_kind is kinds.PLAIN:
            return self._descend(model, map(self._gradient, rows))
        keys, bound = KeyRing.from_seed(0), bound_of(self.assembly)
        for i, batch in enumerate(rows):
            task = ClientTask(
                inputs.take(self.x, batch), self.y[batch], keys.torch_generator(Purpose.PROBE, i), 1
            )
            update = next(iter(raw_updates(next(self._trainer.updates(model, [task])))))
            model = self._server.step(
                model, update * min(1.0, bound / max(float(update.norm()), 1e-12))
            )
        return model

    def _gradient(self, batch: Tensor) -> Tensor:
        task, clip = self.assembly.data.task, self.assembly.recipe.training.gradient_clip
        gradient = gradient_of(
            self._module, self.layers, task, inputs.take(self.x, batch), self.y[batch]
        )
        if clip is not None:
            gradient *= min(1.0, clip / max(float(gradient.norm()), 1e-12))
        return gradient

    @override
    def observe(
        self, model: Tensor, methods: Sequence[Method]
    ) -> tuple[list[Tensor], list[ReleasePlan], Tensor]:
        keys, epochs = KeyRing.from_seed(0), self.assembly.recipe.training.epochs
        tasks = [
            ClientTask(
                inputs.take(self.x, rows + self.warming),
                self.y[rows + self.warming],
                keys.torch_generator(Purpose.PROBE, i),
                epochs,
            )
            for i, rows in enumerate(self._clients)
        ]
        plans = [method.plan(Transcript.start(model)) for method in methods]
        sums = [torch.zeros(plan.size, dtype=torch.float64) for plan in plans]
        norms = []
        updates = (
            update.clone()
            for block in self._trainer.updates(model, tasks)
            for update in raw_updates(block)
        )
        while members := list(islice(updates, self._of_unit)):
            update = torch.stack(members).mean(dim=0)
            norms.append(self.layers.norms(update).double())
            for total, plan in zip(sums, plans, strict=True):
                total += bound_update(update, plan)
        means = [
            plan.expand((total / len(norms)).float())
            for total, plan in zip(sums, plans, strict=True)
        ]
        return means, plans, torch.stack(norms)


class Examples(Units):
    """Examples whose gradients are bounded one by one; the arguments are described in `Clients`."""

    def __init__(self, assembly: Assembly, most: int) -> None:
        super().__init__(assembly)
        self._gradients = ExampleGradients(self._module, self.layers, assembly.data.task)
        self._rows = torch.arange(self.warming, len(self.y))[: max(64, min(2048, most // 8))]

    def warm_up(self, model: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """See `Units`; as in DP-SGD, steps use sums of gradients that are bounded as a whole."""
        clip = FlatClip(bound_of(self.assembly))
        sums = (
            self._gradients.sum(inputs.take(self.x, batch), self.y[batch], clip) for batch in rows
        )
        gradients = (
            bounded_sum.total.float() / len(batch)
            for bounded_sum, batch in zip(sums, rows, strict=True)
        )
        return self._descend(model, gradients)

    @override
    def observe(
        self, model: Tensor, methods: Sequence[Method]
    ) -> tuple[list[Tensor], list[ReleasePlan], Tensor]:
        self._weights.copy_(model)
        self._module.train()
        means, plans = [], []
        x, y = inputs.take(self.x, self._rows), self.y[self._rows]
        for method in methods:
            plan, mechanism = method.plan(Transcript.start(model)), method.mechanism
            assert isinstance(mechanism, BoundsExamples)
            bounded_sum = self._gradients.sum(x, y, mechanism.scaling(plan))
            means.append(-bounded_sum.total.float() / len(y))
            plans.append(plan)
        norms = self._gradients.sum(x, y, FlatClip(math.inf)).norms
        return means, plans, norms


def bound_of(assembly: Assembly) -> float:
    """Return the bound of a recipe's mechanism; 1 if it has none."""
    return float(getattr(assembly.model.mechanism, "bound", 1.0))


def gradient_of(
    module: torch.nn.Module, layers: LayerTable, task: Task, x: inputs.Inputs, y: Tensor
) -> Tensor:
    """Compute the gradient [D] of the mean loss of a batch."""
    parameters = dict(module.named_parameters())
    trained = [parameters[slot.name] for slot in layers.slots()]
    loss = task.loss(inputs.call(module, x), y)
    gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
