"""Clients' votes between two ways of bounding their updates (see
`fedlgm.mechanisms.voted_filling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from clients.source import ClientData
from clients.updates import ClientUpdates, LocalWork
from fedlgm.aggregation.client_release import Asked, Contributions
from fedlgm.aggregation.contributions import AnsweredUpdates, Updates, raw_updates
from fedlgm.extension.restored import Restored, fresh
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.filling import cut_row_to_level
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.queries import CutVote
from fedlgm.training import inputs
from fedlgm.training.devices import Numerics
from fedlgm.training.tasks import Task
from fedlgm.training.tasks.task import metrics_of

_BATCH = 128


def asked_for(plan: ReleasePlan) -> bool:
    """Return whether a plan asks for votes."""
    return any(noisy.query.name == CutVote.name for noisy in plan.queries)


@dataclass(frozen=True, kw_only=True)
class VotingWork(LocalWork):
    """Training and data of clients that vote if the plan asks for votes.

    Attributes:
        votes: makes the clients' votes; called once a plan asks for them.
    """

    votes: Callable[[], CutVotes]

    @override
    def contributions(self, numerics: Numerics | None = None) -> Contributions:
        return VotingUpdates(self, numerics)


class VotingUpdates(ClientUpdates):
    """Clients' bounded updates, with the clients' votes if the plan asks for votes (see
    `ClientUpdates`).
    """

    answers = frozenset({CutVote.name})

    def __init__(self, work: VotingWork, numerics: Numerics | None = None) -> None:
        super().__init__(work, numerics)
        self._votes = work.votes

    @override
    def updates(self, asked: Asked, order: KeyRing) -> Iterator[tuple[list[int], Updates | None]]:
        plan, model, source = asked.plan, asked.model, self.work.source
        groups = super().updates(asked, order)
        if not asked_for(plan):
            yield from groups
            return
        votes = self._votes()
        for clients, updates in groups:
            data = [source(client) for client in clients]
            yield clients, None if updates is None else votes.add_votes(updates, plan, model, data)


class CutVotes:
    """Answers `fedlgm.planning.queries.CutVote` by comparing the losses of the two cuts on a
    client's own data.

    Args:
        module: the model, float32; its weights change.
        layers: the model's layer table. Water-filling levels the model's layers even if this table
            merges them.
        task: task with the loss.

    Example:
        >>> from fedlgm import Guarantee, RunFacts, Sampling, mechanisms
        >>> from fedlgm.training.tasks import Classification
        >>> from fedlgm.planning.transcript import Transcript
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
        >>> mechanism, facts = mechanisms.get("voted-filling"), RunFacts(1.0, Sampling("poisson", 9, 0.5))
        >>> layers = mechanism.table(LayerTable.from_module(model))
        >>> start = torch.tensor([1.0, 0.0, 0.0])
        >>> plan = mechanism.plan(layers, facts, Transcript.start(start))
        >>> data = ClientData(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))
        >>> update = torch.tensor([[99.0, 1.0, 0.0]])  # only the small second layer lowers the loss
        >>> CutVotes(model, layers, Classification()).add_votes(update, plan, start, [data]).answers
        {'cut-vote': tensor([[0.5000]])}
    """

    def __init__(self, module: nn.Module, layers: LayerTable, task: Task) -> None:
        task = fresh(task)
        self._module, self._task, self._parts = (
            module,
            task,
            layers.as_single_layer().layers[0].parts,
        )
        self._weights, self._restored = layers.bind_(module), Restored.of(module, task)

    def add_votes(
        self, updates: Updates, plan: ReleasePlan, model: Tensor, data: Sequence[ClientData]
    ) -> AnsweredUpdates:
        """Return the updates with their clients' votes.

        Args:
            updates: raw updates [b, D].
            plan: a plan that asks for votes.
            model: the global model [D].
            data: the clients' data.
        """
        rows = raw_updates(updates)
        votes = [
            self._vote(row.cpu(), float(plan.clip[0]), model, examples)
            for row, examples in zip(rows, data, strict=True)
        ]
        return AnsweredUpdates(
            rows, {CutVote.name: torch.tensor(votes, dtype=rows.dtype, device=rows.device)[:, None]}
        )

    def _vote(self, update: Tensor, bound: float, model: Tensor, data: ClientData) -> float:
        """Return 1/2 for the cut by water-filling if its loss is lower, -1/2 for the flat cut, 0
        for an abstention. Losses that are not finite count as equal.
        """
        if self._restored is not None:
            self._restored.restore()
        cuts = (
            update * bound / max(float(update.norm()), bound),
            cut_row_to_level(update, self._parts, bound),
        )
        flat, filled = (self._loss(model + cut, data) for cut in cuts)
        return 0.5 * float((filled < flat) - (flat < filled))

    @torch.no_grad()
    def _loss(self, weights: Tensor, data: ClientData) -> float:
        self._weights.copy_(weights)
        self._module.eval()
        batches = zip(inputs.split(data.x, _BATCH), data.y.split(_BATCH), strict=True)
        return metrics_of(self._task, ((inputs.call(self._module, x), y) for x, y in batches))[
            "loss"
        ]
