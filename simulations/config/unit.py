"""The unit of protection, with one class per unit for the rules that depend on privacy.unit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from clients import ClientSource, LocalWork
from fedlgm.data import Partition
from fedlgm.extension.loader import package_of
from fedlgm.extension.trial import Examples
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.method import Method
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.trust import NoisedBy
from fedlgm.privacy.guarantee import Relation, SharedUnit, Unit
from fedlgm.training import Trainer
from fedlgm.training.inputs import Inputs
from fedlgm.training.kinds import TrainerKind
from fedlgm.training.tasks import Task
from simulations.config.named_sections import Data, MechanismSection, Model, TrainerSection
from simulations.config.sections import Federation, Privacy, Run, Training
from strategies.server_optimizer import ResumableStep, server_step

_PREPARES = "conditional on the task preparing every example from that example alone (tested on halves of the data)"
_SAME_EXAMPLES = {"pixels", "image_size", "channels", "inputs"}
"""Keys of [data] that change only how an example is read. They change neither the set of examples
nor the clients that hold them."""


class Settings(Protocol):
    """A recipe, `simulations.config.recipe.Recipe`, as the rules of a unit read it."""

    data: Data
    """The data and their division among the clients."""
    model: Model
    """The model."""
    trainer: TrainerSection | None
    """The kind of training."""
    federation: Federation
    """Clients, rounds and the sampling of clients."""
    training: Training
    """The clients' training."""
    mechanism: MechanismSection
    """The mechanism."""
    privacy: Privacy
    """Unit, trust and budget."""
    run: Run
    """Settings without effect on the privacy figures."""

    @property
    def unit(self) -> Unit:
        """The unit whose data a neighbour changes."""

    @property
    def noised_by(self) -> NoisedBy:
        """The party that adds the noise."""

    @property
    def shares(self) -> Shares | None:
        """The shares of the noise."""

    @property
    def protects(self) -> UnitKind:
        """The rules of the unit of protection."""

    @property
    def sampling(self) -> Sampling:
        """Sampling of the participants."""

    @property
    def noise(self) -> Any:
        """Correlation of the noise over the rounds; None for independent noise."""

    @property
    def relation(self) -> Relation:
        """The neighbouring relation."""


class DataParts(Protocol):
    """The data of a run, `simulations.config.run_data.RunData`, as a unit uses them."""

    @property
    def task(self) -> Task:
        """The model's task."""

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client, [clients]."""

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one input."""

    def public_examples(self, rows: slice | np.ndarray = ...) -> Examples:
        """Test examples, which are public: inputs and targets of these rows."""


class ModelParts(Protocol):
    """The model of a run, `simulations.config.run_model.RunModel`, as a unit uses it."""

    @property
    def recipe(self) -> Settings:
        """The recipe."""

    @property
    def data(self) -> DataParts:
        """The data."""

    @property
    def device(self) -> torch.device:
        """Device on which clients train."""

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism."""

    @property
    def layers(self) -> LayerTable:
        """The model's layers as the mechanism sees them."""

    @property
    def trainer_kind(self) -> TrainerKind:
        """The clients' kind of training."""

    def module(self) -> nn.Module:
        """A fresh initial model."""

    def initial(self) -> Tensor:
        """The initial global model [D]."""

    def trainer(self, vectorized: bool | None = None, compiled: bool | None = None) -> Trainer:
        """A new trainer."""

    def native(self, device: torch.device) -> Trainer:
        """The compiled kernel's trainer."""


class UnitKind:
    """One unit of protection.

    Attributes:
        verb: verb for the unit's mechanisms in messages.
        flat: the mechanism with the same noise in every coordinate.
        mechanisms: unit that its mechanisms protect.
        redraws: whether a repeated round may draw different participants.
        of: the unit if each unit has several clients, see `Sampling.of`; None otherwise.
        side_by_side: whether several clients can be trained at once.
        keys: keys of a recipe, "section.key", that recipes for this unit may set. Recipes for units
            without such a key must leave it out.
    """

    verb: str
    flat: str
    mechanisms: Unit = "client"
    redraws = True
    of: SharedUnit | None = None
    side_by_side = True
    keys: tuple[str, ...] = ()

    def check(self, recipe: Settings) -> None:
        """Refuse settings that do not fit together. If the recipe gives the number of units, also
        warn of a delta that permits the release of one unit's data.

        Raises:
            ConfigError: the message names the first such setting by its key, and the remedy.
        """
        raise NotImplementedError

    def relation(self, recipe: Settings) -> Relation:
        """The neighbouring relation that follows from the settings."""
        raise NotImplementedError

    def division(self, recipe: Settings) -> str:
        """The assignment of examples to units; runs with different assignments have no unit in
        common.
        """
        return json.dumps(
            [recipe.data.model_dump(mode="json", exclude=_SAME_EXAMPLES), recipe.federation.clients]
        )

    def sampling_and_steps(
        self, recipe: Settings, examples: int
    ) -> tuple[Sampling, LocalSteps | None]:
        """The sampled unit of a round, and the clients' own noisy steps.

        Args:
            recipe: the recipe.
            examples: number N of training examples of all clients together, if `counts_examples`.

        Raises:
            ConfigError: the batch is larger than the data.
        """
        raise NotImplementedError

    def counts_examples(self, recipe: Settings) -> bool:
        """Whether the number of all clients' examples is a public fact of the run."""
        return False

    def calibrate(self, mechanism: Mechanism, layers: LayerTable, facts: RunFacts) -> Method:
        """The mechanism with its noise calibrated to the budget (`Method.calibrate`)."""
        return Method.calibrate(mechanism, layers, facts)

    def server_step(self, recipe: Settings, own: Any) -> ResumableStep:
        """The server's step.

        Args:
            recipe: the recipe.
            own: a user's optimizer or None.
        """
        federation = recipe.federation
        return server_step(
            own or federation.server_optimizer, federation.server_lr, federation.server_momentum
        )

    def conditions(self, model: ModelParts) -> tuple[str, ...]:
        """Assumptions of a run's guarantee about users' parts (`RunFacts.assumes`)."""
        return () if package_of(type(model.data.task).prepare) == "fedlgm" else (_PREPARES,)

    def check_data(self, model: ModelParts, module: nn.Module) -> None:
        """Refuse a model and data that do not fit together, before anything runs."""

    def work(self, model: ModelParts, source: ClientSource) -> LocalWork:
        """The clients' training and data, whose contributions protect this unit."""
        raise NotImplementedError

    def try_training(
        self, model: ModelParts, task: Task, x: Inputs, y: Tensor, owner: type
    ) -> None:
        """Refuse a user's model or task that cannot be trained on a few public examples.

        Args:
            model: the run's model.
            task: the task, before it has seen examples.
            x: inputs of the examples [n, ...].
            y: their targets [n, ...].
            owner: the user's class on trial; a message names its line.

        Raises:
            ConfigError: the message names the problem.
        """
        raise NotImplementedError

    def try_kernel(
        self, model: ModelParts, x: Inputs, y: Tensor, first_plan: Callable[[], ReleasePlan]
    ) -> None:
        """Train a few public examples with the compiled kernel.

        Args:
            model: the run's model.
            x: inputs of the examples [n, ...].
            y: their targets [n, ...].
            first_plan: function that makes the first round's plan.

        Raises:
            ConfigError, DataError: the kernel cannot train this run, or should not; the message
                gives the reason.
        """
        raise NotImplementedError

    def efforts(self, recipe: Settings, sizes: np.ndarray) -> np.ndarray:
        """Number of examples of each participant of the sampling, [population], from the numbers of
        the clients, [clients].
        """
        return sizes

    def examples(self, recipe: Settings, partition: Partition) -> list[np.ndarray]:
        """Rows of each unit's examples; no row is in two units."""
        return list(partition)

    def check_nodes(self, allocated: bool = False) -> None:
        """Refuse settings that only simulated clients support.

        Args:
            allocated: whether units take part in secretly allocated rounds.

        Raises:
            ConfigError: real nodes cannot protect this unit; the message gives the reason.
        """

    def words(self, cohorts: Sampling, facts: RunFacts) -> str:
        """The units in a release and the probability of each unit, in words.

        Args:
            cohorts: the choice of a round's clients.
            facts: the run's facts. Their sampling may be the sampling of a step's examples.
        """
        if cohorts.block is not None:
            return (
                f"{cohorts.population} clients, each in {cohorts.participations} of {cohorts.block} "
                f"rounds, {facts.relation}"
            )
        return (
            f"{cohorts.scheme} {cohorts.rate:g} of {cohorts.population} clients, {facts.relation}"
        )
