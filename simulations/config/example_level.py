"""Rules for recipes with privacy.unit = "example", the sampled unit of their runs, and the clients'
training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from typing_extensions import override

from fedlgm import privacy
from fedlgm.data import Partition
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.extension.restored import fresh
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.method import Method
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.guarantee import Relation, Unit
from fedlgm.training.inputs import Inputs
from fedlgm.training.native import Program
from fedlgm.training.tasks import Task
from fedlgm.wording import prefix_key
from simulations.config.unit import ModelParts, Settings, UnitKind
from strategies.server_optimizer import ResumableStep, ServerOptimizer, is_own, server_step

if TYPE_CHECKING:  # every run loads this module, and most runs do not need the engine of examples
    from clients import ClientSource, LocalWork
    from fedlgm.training.example_level.trainer import ExampleTrainer

_HUGE = 1e6  # noise multiplier above which epsilon no longer decreases
MOST_PARAMETERS = 50_000
"""Size of the largest model for which "auto" lets the compiled kernel bound the examples. PyTorch
is faster for larger models (docs/results/example-level.md)."""


_UNUSED: tuple[tuple[str, object, str], ...] = (
    ("training.gradient_clip", None, "the mechanism bounds every example's gradient"),
    ("training.vectorize", "off", "a client's examples are already trained together"),
    ("trainer", None, "the example-level engine trains"),
    ("training.compile", False, "the example-level engine is not compiled"),
    ("federation.stragglers", 0.0, "every client must make all steps that the accounting counts"),
    ("run.audit", False, "canaries stand for clients"),
    (
        "privacy.noise",
        "independent",
        "steps draw Poisson samples of examples, which correlated noise cannot use",
    ),
)
"""Keys that example-level training does not use, with their only possible value and the reason."""
_NO_DECAY = (
    "training.weight_decay",
    None,
    "the cap on a client's upload does not allow for decay",
)


class ExampleLevel(UnitKind):
    """The unit is one example. The trainer bounds every example's gradient."""

    verb, flat = "bounds examples", "dp-sgd"
    mechanisms: Unit = "example"
    redraws = side_by_side = False
    keys = ("training.sampling_rate", "training.steps", "training.exact_sums")

    @override
    def check(self, recipe: Settings) -> None:
        scheme = recipe.federation.sampling
        if scheme not in ("poisson", "fixed", "allocation"):
            raise ConfigError(
                f"federation.sampling = {scheme!r} separates participations of "
                "clients, not of examples: with privacy.unit = 'example' use 'poisson'"
            )
        if scheme == "allocation" and recipe.noised_by.name != "central":
            raise ConfigError(
                "federation.sampling = 'allocation' needs privacy.trust = 'central': set it, or use "
                "'poisson'"
            )
        drawn = "allocation" if scheme == "allocation" else "poisson"
        cohorts = "federation.sampling", drawn, "cohorts of a fixed size protect only clients"
        decay = () if self.counts_examples(recipe) else (_NO_DECAY,)
        for key, usual, why in (*_UNUSED, cohorts, *decay):
            value = attrgetter(key)(recipe)
            if value != usual:
                raise ConfigError(
                    f"{key} cannot be {getattr(value, 'name', value)!r} with privacy.unit = "
                    f"'example': {why}; leave it out"
                )
        if self.counts_examples(recipe):
            self._check_steps(recipe)
        elif recipe.training.sampling_rate is None:
            raise ConfigError(
                "training.sampling_rate is needed where clients noise their own steps: the public "
                "probability with which each of a client's examples is in a step's batch. It is "
                "the same for every client, because the number of a client's examples is private"
            )

    def _check_steps(self, recipe: Settings) -> None:
        """Refuse settings that do not fit a run in which each round is a step and the server adds
        the noise.
        """
        federation, training = recipe.federation, recipe.training
        if recipe.privacy.max_participations is not None:
            raise ConfigError(
                "privacy.max_participations is for privacy.trust = 'local': leave it out here"
            )
        if recipe.sampling.rate < 1 or federation.dropout:
            raise ConfigError(
                "federation.rate: with privacy.unit = 'example' and trust = 'central' every "
                "client takes part in every step, and examples are sampled within it: set rate = "
                "1, sampling = 'poisson' and no dropout"
            )
        for key in ("sampling_rate", "steps"):
            if getattr(training, key) is not None:
                raise ConfigError(
                    f"training.{key} is for clients that noise their own steps (privacy.trust = "
                    "'local'): here a round is one step, and its rate is training.batch_size over "
                    "the number of examples"
                )
        if training.epochs != 1:
            raise ConfigError(
                "training.epochs: a round is one step here: leave epochs out and set "
                "federation.rounds to the number of steps; an epoch takes (number of examples) / "
                "training.batch_size steps"
            )
        name = federation.server_optimizer
        if (name != "sgd" and not is_own(name)) or federation.server_lr != 1:
            raise ConfigError(
                "federation.server_optimizer and server_lr: a round is one step here, and "
                "[training] defines this step (optimizer, lr, momentum): leave both out"
            )

    @override
    def relation(self, recipe: Settings) -> Relation:
        return "add-remove"

    def sampling_and_steps(
        self, recipe: Settings, examples: int
    ) -> tuple[Sampling, LocalSteps | None]:
        """See `UnitKind.sampling_and_steps`. The unit is an example. It is sampled from all
        examples that the server counts, or within each client.

        Raises:
            ConfigError: a batch is larger than the training set.
        """
        training = recipe.training
        if not self.counts_examples(recipe):
            assert training.sampling_rate is not None
            count = training.steps or math.ceil(training.epochs / training.sampling_rate - 1e-9)
            return recipe.sampling, LocalSteps(
                count, training.sampling_rate, float(training.batch_size)
            )
        if recipe.federation.participations is not None:
            taken, block = recipe.federation.participations, recipe.federation.block_rounds
            return Sampling(
                "allocation", examples, taken / block, participations=taken, block=block
            ), None
        if training.batch_size > examples:
            raise ConfigError(
                f"training.batch_size = {training.batch_size} exceeds the number of training "
                f"examples, {examples}"
            )
        return Sampling("poisson", examples, training.batch_size / examples), None

    def division(self, recipe: Settings) -> str:
        """See `UnitKind.division`; an example is the same unit at every client."""
        return ""

    def counts_examples(self, recipe: Settings) -> bool:
        """Whether the server adds the noise, which makes the number of all examples a public fact."""
        return not recipe.noised_by.uploads_released

    def calibrate(self, mechanism: Mechanism, layers: LayerTable, facts: RunFacts) -> Method:
        """See `Method.calibrate`; if no noise meets the budget, the message states a number of
        steps that the budget permits.

        Raises:
            PrivacyError: no noise meets the budget in so many steps.
        """
        try:
            return super().calibrate(mechanism, layers, facts)
        except PrivacyError as error:
            raise PrivacyError(f"{error}; {_remedy(mechanism, facts)}") from error

    @override
    def examples(self, recipe: Settings, partition: Partition) -> list[np.ndarray]:
        return list(partition.order[:, None])

    def server_step(self, recipe: Settings, own: Any) -> ResumableStep:
        """If a round is a step, the server's step on the noisy mean gradient, with the settings of
        [training].

        Raises:
            ConfigError: weight decay is set for a server step of the user's own.
        """
        training, named = recipe.training, own
        if not self.counts_examples(recipe):
            return super().server_step(recipe, own)
        if is_own(recipe.federation.server_optimizer):
            named = own or recipe.federation.server_optimizer
        if named and training.weight_decay:
            raise ConfigError(
                "training.weight_decay is for training.optimizer: your own server step applies "
                "its own decay"
            )
        if named:
            return server_step(named, training.lr, training.momentum)
        name = (
            training.optimizer
            if training.optimizer == "adam" or not training.momentum
            else "momentum"
        )
        decay = training.weight_decay or 0.0
        return ServerOptimizer(name, training.lr, training.momentum, eps=1e-8, decay=decay)

    def check_data(self, model: ModelParts, module: nn.Module) -> None:
        """Refuse a model without gradients per example, and batches larger than any client's
        data.

        Raises:
            ConfigError: the model has no gradients per example, or a batch is larger than every
                client's data.
        """
        with prefix_key("model"):
            self._trainer(model, module)
        recipe, largest, examples = (
            model.recipe,
            int(model.data.sizes.max()),
            int(model.data.sizes.sum()),
        )
        if not self.counts_examples(recipe):
            examples = largest
            if recipe.training.batch_size > largest:
                raise ConfigError(
                    f"training.batch_size = {recipe.training.batch_size} is more than the "
                    f"{largest} examples of the largest client"
                )
        if recipe.federation.participations is not None:
            self._check_batch(recipe, examples)
        if recipe.privacy.delta >= 1 / examples:
            warnings.warn(
                f"privacy.delta = {recipe.privacy.delta:g} is not below 1/{examples}, one over "
                "the number of examples: such a guarantee permits the full publication of one "
                "example",
                stacklevel=2,
            )

    def _check_batch(self, recipe: Settings, examples: int) -> None:
        """Refuse a stated batch that is not the expected number of allocated examples."""
        batch = recipe.federation.share * examples
        if abs(recipe.training.batch_size - batch) > 0.5:
            raise ConfigError(
                f"training.batch_size = {recipe.training.batch_size}: a step has "
                f"{recipe.federation.participations} / {recipe.federation.block_rounds} of the "
                f"{examples} examples, {batch:.4g} of them: set training.batch_size = "
                f"{round(batch)}, or change federation.participations and block"
            )

    @override
    def check_nodes(self, allocated: bool = False) -> None:
        if allocated:
            raise ConfigError(
                "federation.sampling = 'allocation' with privacy.unit = 'example' is for "
                "simulations: a real node that starts again would draw its examples' rounds anew; "
                "use 'poisson'"
            )

    def conditions(self, model: ModelParts) -> tuple[str, ...]:
        """See `UnitKind.conditions`. The trainer states its own conditions for inputs like the
        public examples.
        """
        x, _ = model.data.public_examples(slice(1))
        return (
            *super().conditions(model),
            self._trainer(model, model.module()).condition(x),
        )

    @override
    def work(self, model: ModelParts, source: ClientSource) -> LocalWork:
        from clients import ExampleWork

        return ExampleWork(
            self._trainer(model, model.module()), model.recipe.training.local, source
        )

    def _trainer(self, model: ModelParts, module: nn.Module) -> ExampleTrainer:
        """A new trainer of this module.

        Raises:
            ConfigError: it cannot train the model; the message gives the reason.
        """
        from fedlgm.training.example_level.trainer import ExampleTrainer

        section, layers, task = model.recipe.training, model.layers, model.data.task
        exact, native = bool(section.exact_sums), section.kernel == "native"
        if native:
            Program.of(module, layers, model.data.in_shape, task)
        return ExampleTrainer(module, layers, model.mechanism, model.device, task, exact, native)

    @override
    def try_training(
        self, model: ModelParts, task: Task, x: Inputs, y: Tensor, owner: type
    ) -> None:
        from fedlgm.training.example_level.trial import try_examples

        try_examples(model.module(), model.layers, fresh(task), x, y, owner)

    @override
    def try_kernel(
        self, model: ModelParts, x: Inputs, y: Tensor, first_plan: Callable[[], ReleasePlan]
    ) -> None:
        from fedlgm.training.example_level.native import NativeExampleGradients
        from fedlgm.training.example_level.scaling import FlatClip

        if model.layers.size > MOST_PARAMETERS:
            raise ConfigError(
                f"at example level it is slower for models of more than {MOST_PARAMETERS:,} "
                "parameters"
            )
        weights = model.initial()
        gradients = NativeExampleGradients(model.module(), model.layers, model.data.task, weights)
        gradients.sum(x, y, FlatClip(1.0))

    @override
    def words(self, cohorts: Sampling, facts: RunFacts) -> str:
        sampling = facts.sampling
        if facts.steps:
            return (
                f"{cohorts.scheme} {cohorts.rate:g} of {cohorts.population} clients, each at most "
                f"{facts.releases} times; {facts.steps.count} steps per round, each on "
                f"{facts.steps.rate:g} of a client's examples, divided by {facts.steps.batch:g}, "
                f"{facts.relation}"
            )
        if sampling.block is not None:
            return (
                f"each example in {sampling.participations} of each {sampling.block} steps, "
                f"{sampling.population} examples (expected batch {sampling.expected:g}), "
                f"{facts.relation}"
            )
        return (
            f"each a step on {sampling.rate:g} of {sampling.population} examples (expected batch "
            f"{sampling.expected:g}, {facts.rounds * sampling.rate:.3g} epochs), {facts.relation}"
        )


def _remedy(mechanism: Mechanism, facts: RunFacts) -> str:
    """The largest number of rounds that the budget allows, found by halving the planned number."""
    if facts.sampling.block is not None:
        return "raise privacy.epsilon or privacy.delta, or lower federation.participations"
    rounds = facts.releases // 2
    while rounds >= 1:
        try:
            multiplier = mechanism.calibrate(replace(facts, rounds=rounds, max_participations=None))
        except PrivacyError:
            rounds //= 2
            continue
        return f"federation.rounds = {rounds} would suffice, with a noise multiplier of {multiplier:.4g}"
    _, delta = facts.budget()
    rate, kind = facts.accounted_rate, facts.accountant
    least = privacy.epsilon(
        _HUGE, delta, steps=1, sampling_rate=rate, relation=facts.relation, accountant=kind
    )
    return (
        f"no number of steps would meet the budget: the least epsilon that the {kind} accountant "
        f"shows at this delta is {least:.4g}; raise privacy.epsilon or privacy.delta"
        + (", or use privacy.accountant = 'pld'" if kind != "pld" else "")
    )
