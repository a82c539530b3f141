"""The model of a run: its layers, the clients' trainer and the server's step."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_reference, load_object, object_or_name, users_code
from fedlgm.extension.restored import fresh
from fedlgm.extension.trial import require_same_losses
from fedlgm.mechanisms import Mechanism
from fedlgm.planning.layers import LayerTable
from fedlgm.training import Trainer, devices, kinds, models, tasks
from fedlgm.training.devices import Numerics
from fedlgm.training.kinds import TrainerKind
from fedlgm.training.rates import factors
from fedlgm.training.tasks import Task
from fedlgm.training.tasks.own_figures import own_figures
from fedlgm.wording import prefix_key
from simulations.config.run_data import RunData
from simulations.config.validation_messages import in_section
from strategies.schedule import Scheduled
from strategies.server_optimizer import OwnStep, ResumableStep

_PROBED = 8  # public examples


class RunModel:
    """Model, layers, trainers and server optimizer of a run, each made on first use.

    Args:
        data: the run's data.
    """

    def __init__(self, data: RunData) -> None:
        self.data, self.recipe, self.own = data, data.recipe, data.own

    @cached_property
    def device(self) -> torch.device:
        """Device on which clients train and on which their sums are bounded and noised."""
        return devices.resolve(self.recipe.training.device)

    @cached_property
    def numerics(self) -> Numerics:
        """Numerical settings on which the result's bits depend, in addition to seed and data."""
        run = self.recipe.run
        backend = devices.resolve_noise(self.recipe.privacy.noise_backend, self.device)
        return Numerics(run.threads, self.device, backend, run.block_size)

    def module(self) -> nn.Module:
        """A fresh initial model, which is public. Its seed is model.seed, otherwise the run's seed,
        otherwise 0.

        Raises:
            ConfigError: the file of pretrained weights is missing, or the model cannot be built.
        """
        section = self.recipe.model
        with in_section("model", section.name):
            module = models.build(
                object_or_name(self.own.model, section.name, "model"),
                in_shape=self.data.in_shape,
                classes=self.data.task.outputs(self.data.outline),
                seed=(self.recipe.run.seed or 0) if section.seed is None else section.seed,
                adapters=section.adapters,
                **section.options,
            )
            if section.weights is None:
                return module
            if self.recipe.task.name == "next-token" and not Path(section.weights).exists():
                raise ConfigError(
                    f"there is no file {section.weights}: run `fedlgm pretrain {self.recipe.name}` "
                    "in its folder to train this base on public text"
                )
            return models.load_weights_(module, section.weights)

    def initial(self) -> Tensor:
        """The initial global model [D]."""
        return self.layers.flatten(self.module())

    @cached_property
    def mechanism(self) -> Mechanism:
        """The mechanism, which groups the model's layers."""
        if self.own.mechanism is None:
            return self.recipe.mechanism.build()
        self.recipe.check_mechanism(self.own.mechanism.unit)
        return self.own.mechanism

    @cached_property
    def layers(self) -> LayerTable:
        """The model's layers as the mechanism sees them."""
        return self.mechanism.table(
            LayerTable.from_module(self.module(), self.recipe.mechanism.group_by)
        )

    @cached_property
    def trainer_kind(self) -> TrainerKind:
        """The clients' kind of training."""
        section, trainer = self.recipe.trainer, self.own.trainer
        with prefix_key("trainer"):
            if trainer is not None:
                return kinds.get(trainer)
            return kinds.PLAIN if section is None else section.build()

    def trainer(self, vectorized: bool | None = None, compiled: bool | None = None) -> Trainer:
        """A new trainer: sequential (the reference) or vectorised, and possibly compiled; by
        default as the recipe says.

        Raises:
            ConfigError: the kind of trainer has no such form.
        """
        section, kind = self.recipe.training, self.trainer_kind
        vectorized = section.vectorize == "on" if vectorized is None else vectorized
        form = kind.vectorized if vectorized else kind.sequential
        options: dict[str, Any] = {"device": self.device, "task": self.data.task}
        if vectorized:
            options["width"] = section.width or self.recipe.run.block_size
            options["compile"] = section.compile is True if compiled is None else compiled
        elif section.kernel == "native":
            return self.native(self.device)
        if form is None:
            raise ConfigError(
                "training.vectorize: this trainer has no vectorised form: use training.vectorize = "
                "'off'"
            )
        return form(self.module(), self.layers, section.local, **options)

    def native(self, device: torch.device) -> Trainer:
        """The compiled kernel's trainer.

        Raises:
            ConfigError: no kernel is available for this model or trainer.
        """
        if self.trainer_kind.native is None:
            raise ConfigError(
                "training.kernel: this trainer has no native form: use training.kernel = 'torch'"
            )
        module, settings, data = self.module(), self.recipe.training.local, self.data
        return self.trainer_kind.native(
            module, self.layers, settings, device=device, task=data.task, in_shape=data.in_shape
        )

    def server_optimizer(self) -> ResumableStep:
        """A new server step."""
        federation = self.recipe.federation
        with prefix_key("federation.server_optimizer"):
            object_or_name(
                self.own.server_optimizer, federation.server_optimizer, "server_optimizer"
            )
            step = self.recipe.protects.server_step(self.recipe, self.own.server_optimizer)
        if federation.server_schedule is None:
            return step
        with prefix_key("federation.server_schedule"):
            return Scheduled(step, factors(federation.server_schedule, federation.rounds))

    @property
    def users_parts(self) -> bool:
        """Whether clients may run code of a user."""
        own, recipe = self.own, self.recipe
        parts = (own.model, own.task, own.trainer, recipe.trainer)
        names = (recipe.model.name, recipe.task.name)
        return any(part is not None for part in parts) or any(map(is_reference, names))

    def check(self) -> nn.Module:
        """Refuse a model, task or server optimizer that does not work, using only the public test
        examples.

        Returns: The initial model.

        Raises:
            FedlgmError: the message gives the problem and the remedy.
        """
        module, dataset = self.module(), self.data.dataset
        # The run's own task sees no examples.
        task, unused = fresh(self.data.task), fresh(self.data.task)
        try:
            with prefix_key("task"):
                task.check(module, dataset)
        except ConfigError as error:
            if self.own.model is None or self.own.data is not None:
                raise
            used = f"the data {self.recipe.data.name!r} of the recipe were used: pass your own as data="
            raise ConfigError(f"{error}; {used}") from error
        training = module.training
        if self.own.metrics or task.set_metrics():
            x, y = self.data.public_examples()
            tasks.evaluate(task, module, x, y, metrics=self.own.metrics, finite=True)
        if self.own.evaluate is not None:
            own_figures(self.own.evaluate, 0, self.module())
        module.train(training)
        if self.recipe.training.kernel == "native":
            self.trainer(vectorized=False, compiled=False)
        if self.users_parts:
            self._try_training(unused)
        self._try_step(module)
        return module

    def _try_training(self, task: Task) -> None:
        """Refuse a user's model or task that cannot be trained on a few public examples.

        Args:
            task: the task, before it has seen examples.

        Raises:
            ConfigError: the message names the problem.
        """
        module, count = self.module(), len(self.data.dataset.test_y)
        # rows from the whole set, because the set may be sorted
        rows = np.linspace(0, count - 1, min(_PROBED, count)).astype(np.int64)
        x, y = self.data.public_examples(rows)
        require_same_losses(fresh(task), self.data.on_parts, self.module(), x, y)
        given = object_or_name(self.own.model, self.recipe.model.name, "model")
        bundled = isinstance(given, str) and not is_reference(given)
        owner = type(task if bundled else module)
        self.recipe.protects.try_training(self, task, x, y, owner)
        original = load_object(given, "model") if is_reference(given) else given
        with prefix_key("model"), users_code("a copy of the model cannot be tried", module):
            if isinstance(original, nn.Module):
                models.require_faithful_copies(models.plain(original), x)
            elif self.trainer_kind.apart:
                models.require_faithful_copies(module, x)

    def _try_step(self, module: nn.Module) -> None:
        """Refuse a user's server optimizer that turns a small update into NaN or infinity."""
        step = self.server_optimizer()
        step = step.inner if isinstance(step, Scheduled) else step
        if isinstance(step, OwnStep):
            start = self.layers.flatten(module)
            tried = step.step(start, torch.full_like(start, 1e-3))
            if not bool(torch.isfinite(tried).all()):
                raise ConfigError(
                    f"server optimizer {step.label}: for a mean update of 0.001 in every "
                    "coordinate the next model is NaN or infinite"
                )
