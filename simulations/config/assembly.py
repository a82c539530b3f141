"""From a recipe to the objects of a run, which are the same for every engine and for a
deployment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from clients import Consent, LayerwiseClient, PartitionedSource
from clients.serving import Serving
from fedlgm import data
from fedlgm.data import DataSet, Partition
from fedlgm.data.spent import Spent, division_name
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_reference, object_or_name
from fedlgm.extension.restored import fresh
from fedlgm.extension.trial import Examples, prepare_data
from fedlgm.mechanisms import Mechanism, UsesPrivateNorms
from fedlgm.mechanisms.method import Method
from fedlgm.noise.draws import NoiseBackend
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training import Trainer, devices, inputs, kinds, models, tasks
from fedlgm.training.devices import Numerics
from fedlgm.training.kinds import TrainerKind
from fedlgm.training.rates import factors
from fedlgm.training.tasks import Task
from fedlgm.training.tasks.own_figures import own_figures
from fedlgm.wording import prefix_key
from simulations import tools
from simulations.config import trials
from simulations.config.facts import facts_of, published_examples
from simulations.config.fixed_noise import require_noise
from simulations.config.messages import in_section
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.config.spent import method_beside, require_planned
from strategies.schedule import Scheduled
from strategies.server_optimizer import OwnStep, ResumableStep


@dataclass(frozen=True)
class Assembly:
    """Everything that a recipe defines, made on first use.

    Attributes:
        recipe: the recipe.
        own: a user's objects that replace names in it.
        planned: whether nothing will be trained, so that no file of a bundled set is needed.
        no_kernel: reason why `training.kernel = "auto"` became PyTorch; None if it did not.
        divided: data and division that are used instead of the recipe's, such as a worker's.
    """

    recipe: Recipe
    own: Own = Own()  # noqa: RUF009  (frozen)
    planned: bool = False
    no_kernel: str | None = None
    divided: tuple[DataSet, Partition] | None = None

    def with_data(self, dataset: DataSet, partition: Partition) -> Self:
        """The same with this data and partition, which are neither loaded nor divided again."""
        return replace(self, divided=(dataset, partition))

    @cached_property
    def dataset(self) -> DataSet:
        """The data, held once per process."""
        if self.divided is not None:
            return self.divided[0]
        task, section = self.task, self.recipe.data
        with in_section("data", section.partition):
            original = data.load(
                object_or_name(self.own.data, section.name, "data"), section.dir, **section.reading
            )
            data_set, parts = prepare_data(task, original)
            self.on_parts.extend(parts)
            return data_set

    def public_examples(self, rows: slice | np.ndarray = slice(None)) -> Examples:
        """Test examples, which are public: inputs and targets of these rows."""
        data_set = self.dataset
        return inputs.tensors(inputs.take(data_set.test_x, rows)), torch.from_numpy(
            data_set.test_y[rows]
        )

    @cached_property
    def on_parts(self) -> list[Task]:
        """Copies of a user's task that have prepared parts of the data."""
        return []

    @cached_property
    def task(self) -> Task:
        """The model's task: loss, targets and metrics."""
        if self.own.task is None:
            return self.recipe.task.build()
        with prefix_key("task"):
            return tasks.get(self.own.task)

    @cached_property
    def partition(self) -> Partition:
        """The division of the data among clients, which depends only on the recipe."""
        if self.divided is not None:
            return self.divided[1]
        dataset, section = self.dataset, self.recipe.data
        clients, seed = self.recipe.federation.clients, section.partition_seed
        with in_section("data", section.partition, "data.partition"):
            scheme = object_or_name(self.own.partition, section.partition, "partition")
            return data.divide(dataset, clients, scheme, seed=seed, **section.options)

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client, [clients]."""
        return self.partition.sizes

    @property
    def efforts(self) -> np.ndarray:
        """Expected effort of each participant of the sampling, [population]."""
        return self.recipe.protects.efforts(self.recipe, self.sizes)

    @cached_property
    def device(self) -> torch.device:
        """Device on which clients train and on which their sums are bounded and noised."""
        return devices.resolve(self.recipe.training.device)

    @cached_property
    def noise_backend(self) -> NoiseBackend:
        """Generator of the noise."""
        return devices.resolve_noise(self.recipe.privacy.noise_backend, self.device)

    def module(self) -> nn.Module:
        """A fresh initial model, which is public. Its seed is model.seed, otherwise the run's seed,
        otherwise 0.
        """
        section = self.recipe.model
        with in_section("model", section.name):
            module = models.build(
                object_or_name(self.own.model, section.name, "model"),
                in_shape=self.in_shape,
                classes=self.task.outputs(self.outline),
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

    @property
    def has_data(self) -> bool:
        """Whether the data are there already, and no file has to be read for them."""
        known = self.own.data is not None or self.divided is not None
        return known or "dataset" in vars(self)  # where a `cached_property` keeps its value

    @property
    def outline(self) -> DataSet:
        """The shapes and classes that the model needs, without loading a bundled set."""
        if not self.has_data:
            section = self.recipe.data
            shapes = data.outline(section.name, **section.reading)
            if shapes is not None:
                return shapes
        return self.dataset

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.outline.shape)

    @cached_property
    def mechanism(self) -> Mechanism:
        """The mechanism."""
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
    def method(self) -> Method:
        """Mechanism, layers and facts, with the noise calibrated so that the run stays within the
        recipe's budget.
        """
        facts = facts_of(self.recipe, self._examples).assuming(*self.conditions)
        make = partial(
            Method.calibrate, self.mechanism, self.layers, by=self.recipe.protects.calibrate
        )
        if self.spent is None:
            method = make(facts)
        else:
            division = division_name(self.partition) if self.spent.clients else ""
            method = method_beside(self.spent, facts, make, self.start(), division)
        require_noise(self.recipe, method)
        return method

    @property
    def own_model(self) -> bool:
        """Whether the model is a user's."""
        return self.own.model is not None or is_reference(self.recipe.model.name)

    @property
    def own_parts(self) -> bool:
        """Whether clients may run code of a user."""
        own_task = self.own.task is not None or is_reference(self.recipe.task.name)
        return (
            self.own_model
            or own_task
            or self.own.trainer is not None
            or self.recipe.trainer is not None
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """Assumptions of the guarantee about users' parts (`RunFacts.assumes`)."""
        return self.recipe.protects.conditions(self) if self.own_parts else ()

    @property
    def spent(self) -> Spent | None:
        """Cost of releases from the data before the run."""
        return self.dataset.spent if self.has_data else None

    @property
    def _examples(self) -> int:
        """Number of training examples of all clients together, if the server adds noise to steps;
        it is then public.
        """
        if not self.recipe.protects.counts_examples(self.recipe):
            return 0
        count = self._published_examples if self.planned else None
        return int(self.sizes.sum()) if count is None else count

    @property
    def _published_examples(self) -> int | None:
        """Number of training examples as published or as stated by the recipe; None if only the
        data contain it.
        """
        return None if self.own.data is not None else published_examples(self.recipe)

    @property
    def stated(self) -> str:
        """A plan's assumptions about data that it has not read, which a run checks; empty if there
        are none.
        """
        section, examples = self.recipe.data, self._published_examples
        if not self.planned or examples is None or section.train_images is None or self.has_data:
            return ""
        return (
            f"{examples:,} training examples, as the recipe states (data.train_images = "
            f"{section.train_images}); no folder was read: a run refuses one with another number"
        )

    @property
    def cohorts(self) -> Sampling:
        """The choice of a round's clients; `facts.sampling` may be that of a step's examples."""
        return self.recipe.sampling

    @property
    def facts(self) -> RunFacts:
        """The run's public facts."""
        return self.method.facts

    @property
    def numerics(self) -> Numerics:
        """Numerical settings on which the result's bits depend, in addition to seed and data."""
        run = self.recipe.run
        return Numerics(run.threads, self.device, self.noise_backend, run.block_size)

    def check(self) -> None:
        """Run all checks that need no training: division, model and plan.

        Raises:
            FedlgmError: the message gives the problem and the remedy.
        """
        self.partition  # noqa: B018
        module = self.check_model()
        plan = self.first_plan()
        self.recipe.protects.check_data(self, module)
        if (
            self.recipe.run.patience is not None and self.spent is None
        ):  # with statistics, the budget is kept by design
            require_planned(self.method, plan)
        if self.recipe.run.audit and not isinstance(self.mechanism, UsesPrivateNorms):
            with prefix_key("run.audit"):
                tools.RunAudit().check(plan)

    def check_model(self) -> nn.Module:
        """Refuse a model, task or server optimizer that does not work, using only the public test
        examples.

        Returns: The initial model.

        Raises:
            FedlgmError: the message gives the problem and the remedy.
        """
        module, dataset = self.module(), self.dataset
        task, unused = fresh(self.task), fresh(self.task)  # the run's own sees no examples
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
            x, y = self.public_examples()
            tasks.evaluate(task, module, x, y, metrics=self.own.metrics, finite=True)
        if self.own.evaluate is not None:
            own_figures(self.own.evaluate, 0, self.module())
        module.train(training)
        if self.recipe.training.kernel == "native":
            self.trainer(vectorized=False, compiled=False)
        if self.own_parts:
            trials.try_training(self, unused)
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
        return module

    def server_optimizer(self) -> ResumableStep:
        """The server's step, afresh."""
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

    def initial_model(self) -> Tensor:
        """The initial global model [D]."""
        return self.layers.flatten(self.module())

    def start(self) -> Transcript:
        """The transcript before the first round."""
        return Transcript.start(self.initial_model())

    def first_plan(self) -> ReleasePlan:
        """The first round's plan."""
        method = self.method
        with in_section("mechanism", self.recipe.mechanism.name):
            return method.plan(self.start())

    @cached_property
    def trainer_kind(self) -> TrainerKind:
        """The clients' kind of training."""
        section, trainer = self.recipe.trainer, self.own.trainer
        with prefix_key("trainer"):
            return (
                kinds.get(trainer)
                if trainer is not None
                else section.build()
                if section is not None
                else kinds.PLAIN
            )

    def trainer(self, vectorized: bool, compiled: bool) -> Trainer:
        """A new trainer: sequential (the reference) or vectorised, and possibly compiled."""
        section, kind = self.recipe.training, self.trainer_kind
        if not vectorized:
            if section.kernel == "native":
                return self.native(self.module(), self.layers, section.local, device=self.device)
            return kind.sequential(
                self.module(), self.layers, section.local, device=self.device, task=self.task
            )
        if kind.vectorized is None:
            raise ConfigError(
                "training.vectorize: this trainer has no vectorised form: use training.vectorize = "
                "'off'"
            )
        return kind.vectorized(
            self.module(),
            self.layers,
            section.local,
            width=section.width or self.recipe.run.block_size,
            compile=compiled,
            device=self.device,
            task=self.task,
        )

    def native(self, module: nn.Module, *arguments: Any, **keywords: Any) -> Trainer:
        """The compiled kernel's trainer; ConfigError if no kernel is available for this model or
        trainer.
        """
        if self.trainer_kind.native is None:
            raise ConfigError(
                "training.kernel: this trainer has no native form: use training.kernel = 'torch'"
            )
        return self.trainer_kind.native(
            module, *arguments, task=self.task, in_shape=self.in_shape, **keywords
        )

    def consent(self) -> Consent | None:
        """The consent of clients under local trust."""
        if not self.recipe.noised_by.uploads_released:
            return None
        first = self.first_plan()
        costs = np.sort(self.mechanism.costs(self.layers, self.facts.rounds))
        # Nobody knows in which rounds a client will be drawn.
        allowance = float(costs[-self.facts.releases :].sum())
        return Consent(self.facts, first.protected, first.family, first.bounded_by, allowance)

    def client(self, keys: KeyRing, serves: Serving) -> LayerwiseClient:
        """A client object over the recipe's own division of data.

        Args:
            keys: key ring of the clients.
            serves: clients that it represents.
        """
        work = self.recipe.protects.work(self, PartitionedSource(self.dataset, self.partition))
        options: dict[str, Any] = {"consent": self.consent(), "numerics": self.numerics}
        return LayerwiseClient(work, self.mechanism, self.layers, keys, serves, **options)
