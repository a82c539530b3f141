"""The steps of example-level training: drawing Poisson batches, summing bounded gradients, and
taking local steps to which each client adds noise.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.aggregation.contributions import BoundedUpdates
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms.mechanism import BoundsExamples, Mechanism
from fedlgm.mechanisms.private_plans import UsesPrivateSums
from fedlgm.noise.draws import NoiseBackend
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.noise.release import local_releases
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.facts import LocalTraining
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.upload_caps import within_caps
from fedlgm.training import FlatOptimizer, inputs, tasks
from fedlgm.training.example_level.bounding import bounded_updates
from fedlgm.training.example_level.engine import ExampleGradients, SumsExamples
from fedlgm.training.example_level.native import NativeExampleGradients
from fedlgm.training.example_level.scaling import FlatClip, one_by_one
from fedlgm.training.example_level.trial import TRIED, moderate, try_examples, try_step
from fedlgm.training.inputs import Inputs
from fedlgm.training.models.requirements import require_drawing_nothing, require_stateless
from fedlgm.training.tasks.task import ExampleLosses

Batch = tuple[Inputs, Tensor, Tensor]
"""Inputs [n, ...] and targets [n, ...] of a data set, and the row numbers of one of its batches,
int64 [b].
"""


class ExampleTrainer:
    """Bounds and sums examples' gradients according to a mechanism's plan. All sums use one model,
    which stays in memory.

    Clipping bounds an example's effect only if examples do not influence each other. If the engine
    cannot separate the rows of a batch by construction
    (`fedlgm.training.example_level.separation`), the plan must state in `facts.assumes` that the
    rows are assumed to be independent. Before its first sum, the trainer tests the model and the
    task on a few of the examples (`fedlgm.training.example_level.trial`); for a model that needs
    such an assumption, it repeats the test before some later sums.

    Args:
        module: float32 model that keeps no state between batches and draws no random numbers. The
            trainer changes its weights.
        layers: `mechanism.table(...)` of the module's layers.
        mechanism: a mechanism of unit "example".
        device: device on which the gradients are computed.
        task: the task, which gives the loss of each example; None means classification.
        exact_sums: see `ExampleGradients`.
        native: whether the compiled kernel computes the sums (see `NativeExampleGradients`); the
            kernel supports only plain stacks of layers.

    Raises:
        ConfigError: the mechanism bounds whole clients; the module keeps state, draws random
            numbers or has no per-example gradients; or `native` is set and this machine has no
            kernel.

    Example:
        >>> from fedlgm import RunFacts, Sampling, Transcript, mechanisms
        >>> mechanism, model = mechanisms.get("dp-sgd", bound=0.1), nn.Linear(2, 3)
        >>> trainer = ExampleTrainer(model, mechanism.table(LayerTable.from_module(model)), mechanism)
        >>> facts = RunFacts(1.0, Sampling("poisson", 8, 0.5))
        >>> plan = mechanism.plan(trainer.layers, facts, Transcript.start(trainer.weights))
        >>> batch = trainer.sum(torch.randn(8, 2), torch.zeros(8, dtype=torch.int64), torch.tensor([1, 4, 6]), plan)
        >>> float(batch.values.norm()) <= 3 * 0.1, batch.bounds
        (True, (0.1,))
    """

    def __init__(
        self,
        module: nn.Module,
        layers: LayerTable,
        mechanism: Mechanism,
        device: torch.device | str = "cpu",
        task: ExampleLosses | None = None,
        exact_sums: bool = False,
        native: bool = False,
    ) -> None:
        if not isinstance(mechanism, BoundsExamples):
            raise ConfigError(
                f"{mechanism.name} bounds whole clients: example-level training needs one that "
                "bounds examples"
            )
        require_stateless(module)
        require_drawing_nothing(module)
        self.device, self.layers, self._mechanism = torch.device(device), layers, mechanism
        self._module = module.to(self.device)
        self.weights = layers.bind_(self._module.train())
        self._task: ExampleLosses = task if task is not None else tasks.get()
        self._gradients: SumsExamples
        if native:
            self._gradients = NativeExampleGradients(self._module, layers, self._task, self.weights)
        else:
            self._gradients = ExampleGradients(
                self._module, layers, self._task, exact_sums=exact_sums
            )
        self._tried = self._sums = 0
        self._scaled: tuple[ReleasePlan, Scaling] | None = None  # the last plan and its scaling
        # a separate generator, so that a run's draws do not depend on trials
        self._random = random.Random()

    def sum(self, x: Inputs, y: Tensor, rows: Tensor, plan: ReleasePlan) -> BoundedUpdates:
        """Compute a batch's contribution [1, D] to the step's sum at the current `weights`. The
        contribution is the negative sum of the examples' bounded gradients.

        Adding or removing one example changes the contribution by at most the plan's bounds in l2
        norm, and changes the answers to auxiliary queries by at most the bounds of these queries.

        Args:
            x: inputs [n, ...].
            y: targets [n, ...].
            rows: row numbers of the batch's examples, int64 [b]; may be empty.
            plan: the step's plan.

        Raises:
            ConfigError: a trial finds that an example's gradient depends on other examples.
            PrivacyError: the plan's guarantee omits an assumption about the model that `condition`
                states.
        """
        return self.sums([(x, y, rows)], plan)

    def sums(
        self, batches: Sequence[Batch], plan: ReleasePlan, models: Sequence[Tensor] | None = None
    ) -> BoundedUpdates:
        """Compute the contributions of several batches [b, D]; `sum` explains what a contribution
        is.

        Because `sum` calls this method, a subclass needs to override only `sums`.

        Args:
            batches: the batches.
            plan: the step's plan.
            models: for each batch, the weights [D] at which its sum is computed; by default, the
                current `weights` for all batches.
        """
        if self._scaled is None or self._scaled[0] is not plan:
            self._scaled = plan, one_by_one(self._mechanism.scaling(plan))
            self._require_stated(plan, batches)
        scaling = self._scaled[1]
        return bounded_updates(
            self._gradients.sums(self._load_batches(batches, models), scaling), scaling, plan
        )

    def condition(self, x: Inputs) -> str:
        """Assumptions about the model and the task under which a guarantee holds
        (`RunFacts.assumes`); empty if the guarantee needs no assumptions.

        Args:
            x: inputs of at least one example [n, ...]; their values do not matter.
        """
        return self._gradients.condition(inputs.to(inputs.take(x, slice(1)), self.device))

    def _require_stated(self, plan: ReleasePlan, batches: Sequence[Batch]) -> None:
        """Refuse a plan with a privacy guarantee if the guarantee omits the model's condition."""
        x = next((x for x, y, _ in batches if len(y)), None)
        condition = self.condition(x) if x is not None and plan.protected else ""
        # Only the text before ": " is compared, because the reasons after it contain locations in
        # the code.
        heads = [part.partition(": ")[0] for part in condition.split("; ")]
        if any(head not in plan.facts.assumes for head in heads):
            raise PrivacyError(
                "the plan's guarantee omits a condition of the model: state it in RunFacts(..., "
                f"assumes=...), which for this model is trainer.condition(x) = {condition!r}"
            )

    def _load_batches(
        self, batches: Sequence[Batch], models: Sequence[Tensor] | None
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield the examples of each batch. When a batch is yielded, the module has the weights
        that belong to this batch.
        """
        for place, (x, y, rows) in enumerate(batches):
            if models is not None:
                self.weights.copy_(models[place])
            self._try(x, y)
            yield self._batch(x, y, rows)

    def figures(self, x: Inputs, y: Tensor, rows: Tensor) -> np.ndarray:
        """Compute the `private_figures` of a batch. The arguments have the same meaning as in
        `sum`.
        """
        return private_figures(
            self._gradients, self._mechanism, self.layers, *self._batch(x, y, rows)
        )

    def _try(self, x: Inputs, y: Tensor) -> None:
        """Test the model and the task before the first sum. If a guarantee for the model needs
        assumptions (`condition`), repeat the test before the n-th sum with probability 1/n.
        """
        self._sums += 1
        examples = y.shape[0]  # `len(y)` would take as long as the arithmetic on a small tensor
        if self._tried < min(examples, 2):  # with one example the trial cannot show an influence
            self._tried = min(examples, TRIED)
            rows = torch.linspace(
                0, examples - 1, self._tried
            ).long()  # spread over all data, because data may be sorted by class
            few = self._few(x, y, rows)
            try_examples(self._module, self.layers, self._task, *few, type(self._module))
        elif examples > 1 and self._random.random() < 1 / self._sums and self.condition(x):
            rows = torch.tensor(self._random.sample(range(examples), min(examples, TRIED)))
            try_step(self._module, self.layers, self._task, *self._few(x, y, rows))

    def _few(self, x: Inputs, y: Tensor, rows: Tensor) -> tuple[Inputs, Tensor]:
        x, y = self._batch(x, y, rows)
        return inputs.each(moderate, x), moderate(y)

    def _batch(self, x: Inputs, y: Tensor, rows: Tensor) -> tuple[Inputs, Tensor]:
        taken = inputs.each(lambda part: part.index_select(0, rows).to(self.device), x)
        return taken, y.index_select(0, rows).to(self.device)


def private_figures(
    gradients: SumsExamples, mechanism: Mechanism, layers: LayerTable, x: Inputs, y: Tensor
) -> np.ndarray:
    """Compute the figures that a published variant needs for its plan, float64 [rows, K]. The
    variant is NOT PRIVATE, because its plan depends on figures without noise.

    SENSITIVE: no noise protects these figures. They are the layer norms of the examples' gradients
    before clipping [n, K], without rows that are not finite, or the figures that a mechanism of
    type `UsesPrivateSums` computes.

    Args:
        gradients: the model's per-example gradients.
        mechanism: the published variant.
        layers: the mechanism's layer table.
        x: inputs [n, ...].
        y: targets [n, ...].
    """
    looks = mechanism.looks(len(layers)) if isinstance(mechanism, UsesPrivateSums) else ()
    if isinstance(mechanism, UsesPrivateSums) and looks:
        return mechanism.figures(
            layers, [gradients.sum(x, y, scaling).total for scaling in looks], len(y)
        )
    norms = gradients.sum(x, y, FlatClip(1.0)).norms
    return np.asarray(norms[norms.isfinite().all(dim=1)].cpu().numpy())


def poisson_rows(keys: KeyRing, examples: int, rate: float, *path: int) -> Tensor:
    """Draw a Poisson batch, which contains every example independently with probability `rate`. The
    result is the examples' row numbers, int64 [b].

    Example:
        >>> poisson_rows(KeyRing.from_seed(1), 5, 1.0, 1, 0).tolist()
        [0, 1, 2, 3, 4]

    Args:
        keys: key ring from which batches are drawn.
        examples: number of examples.
        rate: sampling rate q.
        path: numbers that identify the batch: (round, client) or (round, client, step).
    """
    drawn = keys.numpy_generator(Purpose.TRAIN, *path).random(examples) < rate
    return torch.from_numpy(drawn.nonzero()[0])


def batch_keys(keys: KeyRing, digest: bytes) -> KeyRing:
    """Return the key ring from which batches of the data with this digest are drawn.

    If `keys` is secret, a ring that depends on the data is derived from it. A step that is repeated
    with different data is another release, and sampling amplifies the privacy of that release only
    if its batch is drawn independently. A ring from a public seed is returned unchanged.

    Example:
        >>> seeded, secret = KeyRing.from_seed(1), KeyRing.from_seed(None)
        >>> batch_keys(seeded, b"digest") == seeded, batch_keys(secret, b"digest") == secret
        (True, False)
    """
    return keys.derive(b"batches", digest) if keys.secret else keys


def digest_of(x: Inputs, y: Tensor) -> bytes:
    """Hash a client's examples.

    Example:
        >>> x, y = torch.zeros(3, 2), torch.tensor([0, 1, 1])
        >>> digest_of(x, y) == digest_of(x.clone(), y), digest_of(x, y) == digest_of(x, 1 - y)
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (*inputs.parts(x), y):
        digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
        digest.update(np.ascontiguousarray(part.cpu().numpy()).data)
    return digest.digest()


class Examples(NamedTuple):
    """A client's examples.

    Example:
        >>> Examples(3, torch.zeros(5, 2), torch.zeros(5), b"digest").y.shape
        torch.Size([5])

    Attributes:
        client: the client's number.
        x: inputs [n, ...].
        y: targets [n, ...].
        digest: `digest_of` these examples.
    """

    client: int
    x: Inputs
    y: Tensor
    digest: bytes


def local_steps(
    trainer: ExampleTrainer,
    settings: LocalTraining,
    model: Tensor,
    examples: Sequence[Examples],
    plan: ReleasePlan,
    keys: KeyRing,
    round: int,
    backend: NoiseBackend = "cpu",
) -> list[tuple[Tensor, str]]:
    """Compute the noisy updates of several clients in one round. In each local step, every client
    samples a Poisson batch, bounds the gradients of its examples, adds noise to their sum, and
    takes an optimizer step on its copy of the model.

    A client's result depends on its data only through the noisy sums of that client's steps. The
    result therefore protects each of the client's examples, under adding or removing one example,
    at the cost `plan.event`. A client without data takes the same number of steps.
    `clients.example_level.ExampleSteps` calls this function; docs/how-to/example-level.md shows a
    run.

    All clients take a step before any client takes the next step, and each client's result is the
    same as if it were computed alone. A step consists of many small operations, and an operation
    takes half the time if it is executed for all clients in direct succession.

    Args:
        trainer: a trainer whose layer table has the plan's layers.
        settings: optimizer, learning rate, momentum and weight decay of the steps.
        model: the global model [D].
        examples: the clients' examples.
        plan: the round's plan, with `facts.steps`.
        keys: key ring of the clients, derived from everything that determines the releases, apart
            from the data.
        round: round number.
        backend: see `release`.

    Returns:
        For each client, a pair: the protected update, float64 [plan.size], within the public caps
        of `upload_caps` (the change of the released layers, then the mean answer to each auxiliary
        query); and the name of the noise in the update, for the client's record of releases.

    Raises:
        ConfigError: the plan has no local steps.
    """
    steps = plan.facts.steps
    if steps is None:
        raise ConfigError("local steps need a plan whose facts include them (facts.steps)")
    model, numbers = model.to(trainer.device), range(1, steps.count + 1)
    clients = [data.client for data in examples]
    weights = model.repeat(len(examples), 1).unbind()
    optimizers = [FlatOptimizer.of(settings, row) for row in weights]
    own_rings = [keys.derive(b"batches", data.digest) for data in examples]
    drawn = [
        [
            poisson_rows(ring, data.y.shape[0], steps.rate, round, data.client, step)
            for step in numbers
        ]
        for data, ring in zip(examples, own_rings, strict=True)
    ]
    released = sum(int(plan.layers.sizes[j]) for j in plan.indices)
    answers = torch.zeros(len(examples), plan.size - released, dtype=torch.float64)
    names = [hashlib.sha256() for _ in examples]
    for step in numbers:
        ring = keys.derive(b"step", step.to_bytes(4, "little"))
        batches = [
            (data.x, data.y, rows[step - 1]) for data, rows in zip(examples, drawn, strict=True)
        ]
        bounded = trainer.sums(batches, plan, weights)
        noisy, named = local_releases(bounded, plan, ring, round, clients, backend, trainer.device)
        against = noisy.div_(-steps.batch)  # the negative means, in place
        for optimizer, gradient in zip(
            optimizers, plan.expand(against).to(model).unbind(), strict=True
        ):
            optimizer.step(gradient)
        if answers.shape[1]:
            answers -= against[:, released:].cpu().double() / steps.count
        for hashed, name in zip(names, named, strict=True):
            hashed.update(name.encode())
    changes = []
    for at, own_answers, hashed in zip(weights, answers, names, strict=True):
        change = (at - model).cpu().double()
        if not plan.complete or answers.shape[1]:
            views = plan.layers.split(change)
            change = torch.cat([*(views[j] for j in plan.indices), own_answers])
        changes.append((within_caps(change, plan), hashed.hexdigest()[:32]))
    return changes
