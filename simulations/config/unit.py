"""The unit of protection, with one class per unit for the rules that depend on privacy.unit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from clients import ClientSource, LocalWork
from fedlgm.data import Partition
from fedlgm.extension.loader import package_of
from fedlgm.mechanisms import Mechanism
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.privacy.guarantee import Relation, SharedUnit, Unit
from fedlgm.training.inputs import Inputs
from fedlgm.training.tasks import Task
from strategies.server_optimizer import ResumableStep, server_step

if TYPE_CHECKING:
    from simulations.config.assembly import Assembly
    from simulations.config.recipe import Recipe

_PREPARES = "conditional on the task preparing every example from that example alone (tested on halves of the data)"
_SAME_EXAMPLES = {"pixels", "image_size", "channels", "inputs"}
"""Keys of [data] that change how an example is read, and not which examples there are or who holds
them."""


class UnitKind:
    """One unit of protection.

    Attributes:
        verb: verb for the unit's mechanisms in messages.
        flat: the mechanism with the same noise in every coordinate.
        mechanisms: unit for which its mechanisms are made.
        redraws: whether a repeated round may draw different participants.
        of: the unit if each has several clients, see `Sampling.of`; None otherwise.
        side_by_side: whether several clients can be trained at once.
        keys: keys of a recipe, "section.key", that are unset unless the unit has them.
    """

    verb: str
    flat: str
    mechanisms: Unit = "client"
    redraws = True
    of: SharedUnit | None = None
    side_by_side = True
    keys: tuple[str, ...] = ()

    def check(self, recipe: Recipe) -> None:
        """Refuse settings that do not fit together.

        Raises:
            ConfigError: the message names the first such setting by its key, and the remedy.
        """
        raise NotImplementedError

    def warn_of_delta(self, recipe: Recipe) -> None:
        """Warn of a delta that permits the release of one unit's data, if the recipe gives the
        number of units.
        """

    def relation(self, recipe: Recipe) -> Relation:
        """The neighbouring relation that follows from the settings."""
        raise NotImplementedError

    def division(self, recipe: Recipe) -> str:
        """The assignment of examples to units; runs with different assignments have no unit in
        common.
        """
        return json.dumps(
            [recipe.data.model_dump(mode="json", exclude=_SAME_EXAMPLES), recipe.federation.clients]
        )

    def sampled(self, recipe: Recipe, examples: int) -> tuple[Sampling, LocalSteps | None]:
        """The sampled unit of a round, and the clients' own noisy steps.

        Args:
            recipe: the recipe.
            examples: number N of training examples of all clients together, if `counts_examples`.

        Raises:
            ConfigError: the batch is larger than the data.
        """
        raise NotImplementedError

    def counts_examples(self, recipe: Recipe) -> bool:
        """Whether the number of all clients' examples is a public fact of the run."""
        return False

    def calibrated(self, mechanism: Mechanism, facts: RunFacts) -> RunFacts:
        """The facts with the noise multiplier that meets their budget.

        Raises:
            ConfigError, PrivacyError: no multiplier meets the budget, or the mechanism does not
                support the facts.
        """
        return facts.with_multiplier(mechanism.calibrate(facts))

    def server_step(self, recipe: Recipe, own: Any) -> ResumableStep:
        """The server's step.

        Args:
            recipe: the recipe.
            own: a user's optimizer or None.
        """
        federation = recipe.federation
        return server_step(
            own or federation.server_optimizer, federation.server_lr, federation.server_momentum
        )

    def conditions(self, assembly: Assembly) -> tuple[str, ...]:
        """Assumptions of a run's guarantee about users' parts (`RunFacts.assumes`)."""
        return () if package_of(type(assembly.task).prepare) == "fedlgm" else (_PREPARES,)

    def check_data(self, assembly: Assembly, module: nn.Module) -> None:
        """Refuse a model and data that do not fit together, before anything runs."""

    def work(self, assembly: Assembly, source: ClientSource) -> LocalWork:
        """The clients' training and data, whose contributions protect this unit."""
        raise NotImplementedError

    def try_training(
        self, assembly: Assembly, task: Task, x: Inputs, y: Tensor, owner: type
    ) -> None:
        """Refuse a user's model or task that cannot be trained on a few public examples.

        Args:
            assembly: the run's objects.
            task: the task, before it has seen examples.
            x: inputs of the examples [n, ...].
            y: their targets [n, ...].
            owner: the user's class on trial; a message names its line.

        Raises:
            ConfigError: the message names the problem.
        """
        raise NotImplementedError

    def try_kernel(self, assembly: Assembly, x: Inputs, y: Tensor) -> None:
        """Train a few public examples with the compiled kernel.

        Raises:
            ConfigError, DataError: the kernel cannot train this run, or should not; the message
                gives the reason.
        """
        raise NotImplementedError

    def efforts(self, recipe: Recipe, sizes: np.ndarray) -> np.ndarray:
        """Examples of each participant of the sampling, [population], from those of the clients,
        [clients].
        """
        return sizes

    def examples(self, recipe: Recipe, partition: Partition) -> list[np.ndarray]:
        """Rows of each unit's examples; no row is in two units."""
        return list(partition)

    def check_nodes(self) -> None:
        """Refuse settings that only simulated clients support.

        Raises:
            ConfigError: real nodes cannot protect this unit; the message gives the reason.
        """

    def words(self, assembly: Assembly) -> str:
        """The units in a release, and their probability."""
        cohorts = assembly.cohorts
        return f"{cohorts.scheme} {cohorts.rate:g} of {cohorts.population} clients, {assembly.facts.relation}"
