"""The unit that a node's release protects, which is all of the node's data or a single example,
with one class per unit.

A plan states which party bounds the contributions, and this determines the unit. The guarantee that
a plan states is only the server's claim, and this module does not read it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from clients.cut_vote import CutVotes, VotingUpdates, VotingWork
from clients.example_level import ExampleSteps, ExampleWork
from clients.own_plans import answer_first
from clients.source import ClientData, ClientSource
from fedlgm.aggregation.client_release import Asked, Contributions
from fedlgm.aggregation.contributions import BoundedUpdates, Updates
from fedlgm.mechanisms.mechanism import BoundsExamples
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.plan import ReleasePlan
from fedlgm.training import ClientTask, SequentialTrainer, inputs
from fedlgm.training.devices import Numerics
from fedlgm.training.example_level.trainer import Batch, ExampleTrainer
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.service.costs import SingleExamplesCost, WholeDataCost
from fedlgm_nodes.service.workshop import Job

_log = logging.getLogger("fedlgm.node")


class WholeData(WholeDataCost):
    """Protects all of the node's data, by a bound on its whole update."""

    def check(self, job: Job, plan: ReleasePlan) -> None:
        """Refuse a work that does not bound the contribution of this unit as the plan states.

        Raises:
            Refusal: the reason.
        """
        if job.work.exact_sums:
            raise Refusal(
                "work", "exact_sums belongs to example-level steps; this plan bounds whole updates"
            )
        # a plan with millions of parts would exhaust this node's memory
        if plan.fills not in ((), job.layers.layers[0].parts):
            raise Refusal("plan", "its levelled parts are not the layers of the requested model")

    def trainer(self, job: Job, module: torch.nn.Module, exact: bool) -> SequentialTrainer:
        """Make the trainer of a work, which uses `module` as its model. If `exact`, gradients of
        example-level steps are summed in float64.
        """
        return SequentialTrainer(module, job.layers, job.settings, task=job.task)

    def try_on(
        self,
        trainer: SequentialTrainer,
        model: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        plan: ReleasePlan,
    ) -> None:
        """Train on one artificial example, to see whether training fails."""
        order = KeyRing.from_seed(0).torch_generator(Purpose.TRAIN, 0, 0)
        next(iter(trainer.updates(model, [ClientTask(x, y, order, 1)])))

    def examples(
        self, data: ClientData, targets: Callable[[torch.Tensor], torch.Tensor], apart: bool = False
    ) -> ClientData:
        """The node's data with the targets of a work's task. If this fails, the node counts as
        having no data (see `_NodeUpdates`).

        Args:
            data: the node's examples.
            targets: function that turns the targets of several examples into targets of the task.
            apart: whether each example's target must be made without the other targets. This
                matters only if single examples are protected.
        """
        return ClientData(data.x, targets(data.y))

    def contributions(
        self,
        job: Job,
        trainer: Any,
        source: ClientSource,
        votes: Callable[[], CutVotes],
        numerics: Numerics,
    ) -> Contributions:
        """The node's contribution, for `client_release`. It is empty if there are no data or if
        training on them fails.

        Args:
            job: the work's job.
            trainer: from `trainer`.
            source: the node's data.
            votes: see `VotingWork.votes`.
            numerics: threads, device and noise backend.
        """
        updates = _NodeUpdates(VotingWork(trainer, job.settings, source, votes=votes), numerics)
        updates.planner = answer_first(job.mechanism)
        return updates


class SingleExamples(SingleExamplesCost):
    """Protects single examples. The node bounds each example's gradient in every step and adds
    noise to their sum.
    """

    def check(self, job: Job, plan: ReleasePlan) -> None:
        """See `WholeData.check`.

        Raises:
            Refusal: the mechanism bounds whole clients, fails, or applies larger bounds than the
                plan states.
        """
        if not isinstance(job.mechanism, BoundsExamples):
            raise Refusal(
                "work", f"{job.mechanism.name} bounds whole clients, and the plan bounds examples"
            )
        try:
            bounds = job.mechanism.scaling(plan).bounds(len(plan.layers))
        except (
            Exception
        ) as error:  # the error follows from the server's names and options, not from the data
            raise Refusal("work", f"example-level training: {error}"[:300]) from error
        if not (bounds <= plan.clip * (1 + 1e-9)).all():
            raise Refusal("plan", "the plan states smaller bounds than its mechanism applies")

    def trainer(self, job: Job, module: torch.nn.Module, exact: bool) -> ExampleTrainer:
        """See `WholeData.trainer`."""
        return NodeExamples(module, job.layers, job.mechanism, task=job.task, exact_sums=exact)

    def try_on(
        self,
        trainer: ExampleTrainer,
        model: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        plan: ReleasePlan,
    ) -> None:
        """See `WholeData.try_on`."""
        trainer.weights.copy_(model)
        ExampleTrainer.sums(trainer, [(x, y, torch.zeros(1, dtype=torch.int64))], plan)

    def examples(
        self, data: ClientData, targets: Callable[[torch.Tensor], torch.Tensor], apart: bool = False
    ) -> ClientData:
        """See `WholeData.examples`. Examples whose targets the task refuses are left out."""
        if not apart:
            with contextlib.suppress(Exception):
                return ClientData(data.x, targets(data.y))
        like = targets(torch.zeros_like(data.y[:1]))
        taken: dict[int, torch.Tensor] = {}
        problem: Exception | None = None
        for row in range(len(data)):
            try:
                target = targets(data.y[row : row + 1])
                if (target.shape, target.dtype) == (like.shape, like.dtype):
                    taken[row] = target
            except Exception as error:
                problem = error
        if problem is not None:
            _log.error(
                "the task does not take all targets of this node: examples with other targets are "
                "left out",
                exc_info=problem,
            )
        return ClientData(inputs.take(data.x, list(taken)), torch.cat([like[:0], *taken.values()]))

    def contributions(
        self,
        job: Job,
        trainer: Any,
        source: ClientSource,
        votes: Callable[[], CutVotes],
        numerics: Numerics,
    ) -> Contributions:
        """See `WholeData.contributions`."""
        return ExampleSteps(ExampleWork(trainer, job.settings, source), numerics)


NodeUnit = WholeData | SingleExamples

BY_BOUND: dict[str, NodeUnit] = {"aggregator": WholeData(), "trainer": SingleExamples()}
"""The unit of a plan, by the party that bounds the contributions. The policy admits only plans with
these parties.
"""


class NodeExamples(ExampleTrainer):
    """Trainer for a node's examples. If a batch fails, its examples are bounded one by one, and
    examples that fail count as zero.

    A failure depends on this node's data (see `_NodeUpdates`). If the whole batch were left out,
    single examples would not be protected, because one example could change the sum by the
    contributions of all other examples in its batch.
    """

    @override
    def sums(
        self,
        batches: Sequence[Batch],
        plan: ReleasePlan,
        models: Sequence[torch.Tensor] | None = None,
    ) -> BoundedUpdates:
        (batch,) = batches  # a node has one client
        try:
            return super().sums([batch], plan, models)
        except Exception:
            _log.exception(
                "a step on this node's data failed: examples that fail alone count as zero"
            )
        x, y, rows = batch
        nothing = torch.zeros(0, dtype=torch.int64)
        total = super().sums([(inputs.take(x, slice(0)), y[:0], nothing)], plan, models)
        for row in rows.tolist():
            with contextlib.suppress(Exception):
                example = (
                    inputs.take(x, slice(row, row + 1)),
                    y[row : row + 1],
                    torch.zeros(1, dtype=torch.int64),
                )
                total = _add_updates(total, super().sums([example], plan, models))
        return total


def _add_updates(total: BoundedUpdates, other: BoundedUpdates) -> BoundedUpdates:
    """The sum of two batches' contributions under one plan."""
    answers = (
        replace(a, values=a.values + b.values)
        for a, b in zip(total.answers, other.answers, strict=True)
    )
    return replace(total, values=total.values + other.values, answers=tuple(answers))


class _NodeUpdates(VotingUpdates):
    """A node's whole update. If training fails, the node counts as having no data.

    The trainer has already trained on an artificial example, so a failure depends on this node's
    data. An error in place of an answer would reveal the failure without noise. The operator finds
    the error in the node's log.
    """

    @override
    def updates(self, asked: Asked, order: KeyRing) -> Iterator[tuple[list[int], Updates | None]]:
        try:
            updates = list(super().updates(asked, order))
        except Exception:
            _log.exception("training on this node's data failed: the release holds only noise")
            updates = [(asked.clients, None)]
        yield from updates
