"""From a recipe to the objects of a run: the same ones for every engine and for a deployment."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients import Consent, ExampleClient, LayerwiseClient, LocalWork, PartitionedSource
from clients.serving import Serving
from fedlgm import data, devices, inputs, models, tasks
from fedlgm.contributions import unbounded
from fedlgm.data import DataSet, Partition
from fedlgm.devices import Numerics, torch_threads
from fedlgm.errors import ConfigError, prefix_key
from fedlgm.example_level.trainer import ExampleTrainer
from fedlgm.extension import is_object, is_reference, missing_object, users_code
from fedlgm.facts import RunFacts, Sampling
from fedlgm.inputs import Inputs
from fedlgm.keys import KeyRing, Purpose
from fedlgm.layers import LayerTable
from fedlgm.mechanisms import Mechanism, UsesPrivateNorms
from fedlgm.mechanisms.method import Method
from fedlgm.noise import NoiseBackend
from fedlgm.plan import ReleasePlan
from fedlgm.tasks import Task
from fedlgm.training import ClientTask, SequentialTrainer, Trainer, VectorizedTrainer, fastest
from fedlgm.transcript import Transcript
from fedlgm.trial import try_clients, try_examples
from simulations.config import example_level
from simulations.config.facts import facts_of
from simulations.config.messages import in_section
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.config.sections import Training
from strategies import ServerStep
from strategies.server_optimizer import OwnStep, server_step

_PROBED = 8  # public examples on which a user's own model is tried before anything is written


@dataclass(frozen=True)
class Assembly:
    """Everything that a recipe defines, made when it is first needed.

    Attributes:
        recipe: the recipe.
        own: objects of a user's own that stand for names in it.
        planned: whether nothing will be trained: then no file of a bundled set is needed.
    """

    recipe: Recipe
    own: Own = Own()  # noqa: RUF009  (frozen)
    planned: bool = False

    def with_data(self, dataset: DataSet, partition: Partition) -> Assembly:
        """Use these instead of loading and dividing again, as a worker does that is handed both; returns `self`."""
        self.__dict__.update(dataset=dataset, partition=partition)
        return self

    @cached_property
    def dataset(self) -> DataSet:
        """The data, held once per process."""
        task, own, section = self.task, self.own.data, self.recipe.data
        with in_section("data", section.partition):
            if own is None and is_object(section.name):
                raise missing_object(section.name, "data")
            found = data.load(section.name if own is None else own, section.dir, **section.images)
            with users_code(f"task {task.name!r}", task):
                return task.prepare(found)

    @cached_property
    def task(self) -> Task:
        """What the model is trained for: loss, targets and metrics."""
        if self.own.task is None:
            return self.recipe.task.build()
        with prefix_key("task"):
            return tasks.get(self.own.task)

    @cached_property
    def partition(self) -> Partition:
        """Whose data is whose; it depends on the recipe only."""
        dataset, section = self.dataset, self.recipe.data
        clients, seed = self.recipe.federation.clients, section.partition_seed
        with in_section("data", section.partition, "data.partition"):
            if self.own.partition is None and is_object(section.partition):
                raise missing_object(section.partition, "partition")
            scheme = section.partition if self.own.partition is None else self.own.partition
            return data.divide(dataset, clients, scheme, seed=seed, **section.options)

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client, [clients]."""
        return self.partition.sizes

    @cached_property
    def device(self) -> torch.device:
        """Where clients train, and where sums lie while they are bounded and noised."""
        return devices.resolve(self.recipe.training.device)

    @cached_property
    def noise_backend(self) -> NoiseBackend:
        """Who draws the noise."""
        return devices.resolve_noise(self.recipe.privacy.noise_backend, self.device)

    def module(self) -> nn.Module:
        """A fresh model, initialised from model.seed, else the run's seed, else 0: the initial model is public."""
        section = self.recipe.model
        with in_section("model", section.name):
            if self.own.model is None and is_object(section.name):
                raise missing_object(section.name, "model")
            return models.build(
                section.name if self.own.model is None else self.own.model,
                in_shape=self._outline.shape,
                classes=self.task.outputs(self._outline),
                seed=(self.recipe.run.seed or 0) if section.seed is None else section.seed,
                **section.options,
            )

    @property
    def _outline(self) -> DataSet:
        """What the model needs to know of the data: shapes and classes, without loading a bundled set for it."""
        if "dataset" not in self.__dict__ and self.own.data is None:
            section = self.recipe.data
            known = data.outline(section.name, **section.images)
            if known is not None:
                return known
        return self.dataset

    @cached_property
    def mechanism(self) -> Mechanism:
        """The mechanism."""
        if self.own.mechanism is None:
            return self.recipe.mechanism.build()
        example_level.check_unit(self.recipe, self.own.mechanism.unit)
        return self.own.mechanism

    @cached_property
    def layers(self) -> LayerTable:
        """The model's layers as the mechanism sees them."""
        return self.mechanism.table(LayerTable.from_module(self.module(), self.recipe.mechanism.group_by))

    @cached_property
    def method(self) -> Method:
        """Mechanism, layers and facts, the noise calibrated so that the run stays within the recipe's budget."""
        if self.recipe.unit == "example":
            facts = facts_of(self.recipe, self._examples)
            return Method(self.mechanism, self.layers, example_level.calibrated(self.mechanism, facts))
        return Method.calibrated(self.mechanism, self.layers, facts_of(self.recipe))

    @property
    def _examples(self) -> int:
        """Training examples of all clients together, where the server noises steps: their number is public."""
        if self.recipe.privacy.trust == "local":
            return 0
        known = self._published_examples if self.planned else None
        return int(self.sizes.sum()) if known is None else known

    @property
    def _published_examples(self) -> int | None:
        """The number of training examples as published, or as the recipe states it; None where only the data say."""
        section = self.recipe.data
        if self.own.data is not None or section.partition != "iid":
            return None
        return data.published_examples(section.name, section.train_images)

    @property
    def stated(self) -> str:
        """What a plan believes of data that it has not read, and a run checks; empty where there is none."""
        section, examples = self.recipe.data, self._published_examples
        if not self.planned or examples is None or section.train_images is None or "dataset" in self.__dict__:
            return ""
        return (
            f"{examples:,} training examples, as the recipe states (data.train_images = {section.train_images}); no "
            "folder was read: a run refuses one with another number"
        )

    @property
    def cohorts(self) -> Sampling:
        """How the clients of a round are chosen; `facts.sampling` may be that of a step's examples."""
        return self.recipe.sampling

    @property
    def facts(self) -> RunFacts:
        """The run's public facts."""
        return self.method.facts

    @property
    def numerics(self) -> Numerics:
        """What the result's bits depend on besides seed and data."""
        run = self.recipe.run
        return Numerics(run.threads, self.device, self.noise_backend, run.block_size)

    def check(self) -> None:
        """Refuse what can be refused without training: a division, model or plan that does not fit.

        Raises:
            FedlgmError: what is wrong, and what would be right.
        """
        self.partition  # noqa: B018
        module = self.check_model()
        plan = self.first_plan()
        if self.recipe.unit == "example":
            self._check_examples(module)
        if self.recipe.run.audit and not isinstance(self.mechanism, UsesPrivateNorms):
            from fedlgm.audits.canaries import check_auditable  # the driver's alone: half a second of imports

            with prefix_key("run.audit"):
                check_auditable(plan)

    def check_model(self) -> nn.Module:
        """Refuse a model, task or server optimizer that does not work; needs nothing but the public test examples.

        Returns:
            The initial model.

        Raises:
            FedlgmError: what is wrong, and what would be right.
        """
        module = self.module()
        with prefix_key("task"):
            self.task.check(module, self.dataset)
        own_model = self.own.model is not None or is_reference(self.recipe.model.name)
        if own_model or self.own.task is not None or is_reference(self.recipe.task.name):
            self._try_training(module, own_model)
        step = self.server_optimizer()
        if isinstance(step, OwnStep):
            start = self.layers.flatten(module)
            tried = step.step(start, torch.full_like(start, 1e-3))
            if not bool(torch.isfinite(tried).all()):
                raise ConfigError(
                    f"server optimizer {step.label}: for a mean update of 0.001 in every coordinate the next model is "
                    "NaN or infinite"
                )
        return module

    def _try_training(self, module: nn.Module, own_model: bool) -> None:
        """Refuse a user's own model or task that a few public examples show cannot be trained."""

        def updates(x: Inputs, y: Tensor) -> list[Tensor]:
            trainer = self.trainer(self.recipe.training.vectorize == "on", compiled=False)
            alike = [ClientTask(x, y, torch.Generator(), 1) for _ in range(2)]
            made = trainer.updates(self.layers.flatten(module), alike)
            return list(torch.cat([unbounded(update).clone() for update in made]))

        count = len(self.dataset.test_y)  # rows from all of the set: it may be sorted by class
        rows = np.linspace(0, count - 1, min(_PROBED, count)).astype(np.int64)
        x, y = inputs.tensors(inputs.take(self.dataset.test_x, rows)), torch.from_numpy(self.dataset.test_y[rows])
        owner = type(module if own_model else self.task)
        if self.recipe.unit == "example":
            try_examples(module, self.layers, self.task, x, y, owner)
        else:
            try_clients(module, updates, self.task, x, y, owner)

    def _check_examples(self, module: nn.Module) -> None:
        """Refuse a model without gradients per example, and batches larger than anybody's data."""
        with prefix_key("model"):
            ExampleTrainer(module, self.layers, self.mechanism, task=self.task)
        training, largest = self.recipe.training, int(self.sizes.max())
        own = self.facts.steps is not None
        if own and training.batch_size > largest:
            raise ConfigError(
                f"training.batch_size = {training.batch_size} is more than the {largest} examples of the largest client"
            )
        examples = largest if own else int(self.sizes.sum())
        if self.recipe.privacy.delta >= 1 / examples:
            warnings.warn(
                f"privacy.delta = {self.recipe.privacy.delta:g} is not below 1/{examples}, one over the number of "
                "examples: such a guarantee allows one example to be given away entirely",
                stacklevel=2,
            )

    def server_optimizer(self) -> ServerStep:
        """The server's step, afresh."""
        with prefix_key("federation.server_optimizer"):
            return self._server_optimizer()

    def _server_optimizer(self) -> ServerStep:
        federation = self.recipe.federation
        own, name = self.own.server_optimizer, federation.server_optimizer
        if own is None and is_object(name):
            raise missing_object(name, "server_optimizer")
        if self.recipe.unit == "example" and self.recipe.privacy.trust == "central":
            # A round is one step on the noisy mean gradient.
            training, named = self.recipe.training, own or is_reference(name)
            return (
                server_step(own or name, training.lr, training.momentum)
                if named
                else example_level.step_of(self.recipe)
            )
        return server_step(own or name, federation.server_lr, federation.server_momentum)

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

    def trainer(self, vectorized: bool, compiled: bool) -> Trainer:
        """A trainer of its own: sequential (the reference) or vectorised, perhaps compiled."""
        section = self.recipe.training
        if not vectorized:
            return SequentialTrainer(self.module(), self.layers, section.local, self.device, self.task)
        return VectorizedTrainer(
            self.module(),
            self.layers,
            section.local,
            width=section.width or self.recipe.run.block_size,
            compile=compiled,
            device=self.device,
            task=self.task,
        )

    def faster_training(self, workers: int) -> Training:
        """[training] with every "auto" of its trainer settled by a short measurement on a typical block of clients."""
        section, run, federation = self.recipe.training, self.recipe.run, self.recipe.federation
        compiling = (False, True) if section.compile == "auto" else (section.compile,)
        choices = {f"vectorised, compiled: {c}": (True, c) for c in compiling}
        if section.vectorize != "on":
            choices = {"sequential": (False, False)} | (choices if section.vectorize == "auto" else {})
        winner = next(iter(choices))
        if len(choices) > 1:
            source, keys = PartitionedSource(self.dataset, self.partition), KeyRing.from_seed(0)
            order = np.argsort(self.sizes)
            order = order[self.sizes[order] > 0]
            middle = order[len(order) // 2 :][: run.block_size]

            def tasks() -> list[ClientTask]:
                orders = ((source(int(c)), keys.torch_generator(Purpose.PROBE, int(c))) for c in middle)
                return [ClientTask(data.x, data.y, order, section.epochs) for data, order in orders]

            makers = {name: partial(self.trainer, *choice) for name, choice in choices.items()}
            clients = federation.rounds * federation.share * federation.clients
            with torch_threads(run.threads):
                blocks = max(1.0, clients / run.block_size / workers)
                winner, _ = fastest(makers, self.initial_model(), tasks, blocks=blocks)
        vectorized, compiled = choices[winner]
        return section.model_copy(update={"vectorize": "on" if vectorized else "off", "compile": compiled})

    def consent(self) -> Consent | None:
        """What clients under local trust agree to."""
        if self.recipe.privacy.trust == "central":
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
            serves: which clients it answers for.
        """
        section = self.recipe.training
        source = PartitionedSource(self.dataset, self.partition)
        options: dict[str, Any] = {"consent": self.consent(), "numerics": self.numerics}
        if self.recipe.unit == "example":
            exact = bool(section.exact_sums)
            trainer = ExampleTrainer(self.module(), self.layers, self.mechanism, self.device, self.task, exact)
            own = LocalWork(trainer, section.local, source)
            return ExampleClient(own, self.mechanism, self.layers, keys, serves, **options)
        work = LocalWork(
            self.trainer(section.vectorize == "on", section.compile is True),
            section.local,
            source,
            self.recipe.federation.stragglers,
        )
        return LayerwiseClient(work, self.mechanism, self.layers, keys, serves, **options)


def settled(recipe: Recipe) -> Recipe:
    """The recipe with device and noise backend as they are on this machine: a run's own recipe says who drew its noise.

    Raises:
        ConfigError: a device or backend that is not available here.
    """
    device = devices.resolve(recipe.training.device)
    backend = devices.resolve_noise(recipe.privacy.noise_backend, device)
    training = recipe.training.model_copy(update={"device": str(device)})
    privacy = recipe.privacy.model_copy(update={"noise_backend": backend})
    return recipe.model_copy(update={"training": training, "privacy": privacy})
