"""Scores that compare the runs of a search, on the public test set or by a noised query on the
private data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dp_accounting import dp_event
from torch import nn
from typing_extensions import override

from fedlgm import privacy
from fedlgm.aggregation import BoundedSum
from fedlgm.checks import check_positive
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.guarantee import Guarantee, Relation
from fedlgm.training import inputs, tasks
from fedlgm.training.devices import torch_threads
from fedlgm.training.tasks import Task
from fedlgm.training.tasks.task import metrics_of
from fedlgm.wording import prefix_key
from simulations.config.assembly import Assembly
from simulations.runs.headline import is_share
from simulations.runs.rows import RunSummary

_HALF = 0.5
"""Bound of a unit's contribution, which is the unit's figure in [0, 1] minus 1/2."""
_BATCH = 1000


class Score(ABC):
    """A score of runs; larger is better.

    Attributes:
        name: the measured figure, and its data.
        noise: standard deviation of the noise in a score; 0 for public data.
    """

    name: str
    noise: float

    @abstractmethod
    def events(self) -> list[dp_event.DpEvent]:
        """Return the accounting events of one score, in addition to the event of the run."""

    @abstractmethod
    def of(self, summary: RunSummary, module: nn.Module, keys: KeyRing) -> float:
        """Compute the score of a run; the score is not finite if the run counts as worse than all
        others.

        Args:
            summary: summary of the run.
            module: model of the run.
            keys: ring of the score's noise, different for every run.
        """


class TestScore(Score):
    """The task's headline on the test set, which is public."""

    __test__ = False  # pytest must not collect this class
    noise = 0.0

    def __init__(self, task: Task) -> None:
        self.name, self._task = f"{task.headline} on the public test set", task

    def events(self) -> list[dp_event.DpEvent]:
        """Return no events, because the test set is public."""
        return []

    @override
    def of(self, summary: RunSummary, module: nn.Module, keys: KeyRing) -> float:
        value = float(summary["metrics"][self._task.headline])
        return value if self._task.better == "higher" else -value


@dataclass(frozen=True)
class PrivateScore(Score):
    """The mean over the protected units of a figure in [0, 1] on a unit's own examples, with
    Gaussian noise.

    The figure is the task's headline metric if it is a share (accuracy). Otherwise it is 1 - loss /
    (loss of the initial model on the test set, which is public), cut to [0, 1]. The sum over units
    of figure - 1/2 is released with noise.

    **Privacy.** A unit's term lies in [-1/2, 1/2] and depends only on its own examples and the
    model, because every unit has a separate forward pass. So the sum changes by at most 1/2 if a
    unit is added, removed or made zero, and by at most 1 if it is replaced. For any given model,
    the score is therefore a Gaussian mechanism. A run with its score is the adaptive composition of
    the run and the score. Its output (model, score) is ordered by the score. This composition is
    the base mechanism that Papernot and Steinke (2022, Theorems 2 and 6) repeat. Their r(a) is the
    sum of the run's and the score's Renyi divergences, and the score of the published run may be
    published too.

    Attributes:
        task: the task.
        rows: rows of every unit's examples.
        x, y: the private examples.
        ceiling: loss at which the figure is 0; None if the headline metric is a share.
        plan: bound, noise and event of one score.
        name, noise: see `Score`.
    """

    task: Task
    rows: Sequence[np.ndarray]
    x: inputs.Inputs
    y: torch.Tensor
    ceiling: float | None
    plan: ReleasePlan
    name: str
    noise: float

    @classmethod
    def calibrated(cls, assembly: Assembly, epsilon: float) -> PrivateScore:
        """Make a score that costs `epsilon` at the recipe's delta.

        Raises:
            ConfigError: the epsilon is outside its range, or the initial model has no finite loss.
        """
        with prefix_key("score_epsilon"):
            check_positive(epsilon=epsilon)
        facts, recipe, dataset = assembly.privacy.facts, assembly.recipe, assembly.data.dataset
        delta = recipe.privacy.delta
        if facts.overlap > 1:
            raise ConfigError(
                "score_epsilon: the score is charged for one client, and federation.overlap is for "
                "people with data at several clients: score on public test rows"
            )
        relation: Relation = "replace-one" if facts.relation == "replace-one" else "add-remove"
        z = privacy.calibrate(epsilon, delta, steps=1, relation=relation)
        units = Sampling("poisson", facts.sampling.population, 1.0, of=facts.sampling.of)
        words = Guarantee(
            "proven",
            "a unit's figure is bounded before noise is added to the sum",
            unit=recipe.unit,
        )
        once = RunFacts(z, units, relation, epsilon=epsilon, delta=delta)
        plan = ReleasePlan(LayerTable.from_sizes({"score": 1}), [_HALF], [z * _HALF], once, words)  # type: ignore[arg-type]
        ceiling = None
        if not (is_share(assembly.data.task.headline) and assembly.data.task.better == "higher"):
            tested = inputs.tensors(dataset.test_x), torch.from_numpy(dataset.test_y)
            ceiling = tasks.evaluate(assembly.data.task, assembly.model.module(), *tested)["loss"]
            if not 0 < ceiling < math.inf:
                raise ConfigError(
                    "score_epsilon: the initial model's loss must be positive and finite, but it "
                    f"is {ceiling}"
                )
        rows = recipe.protects.examples(recipe, assembly.data.partition)
        x, y = inputs.tensors(dataset.train_x), torch.from_numpy(dataset.train_y)
        what = assembly.data.task.headline if ceiling is None else "1 - loss / initial loss"
        name = f"{what} on the private training examples, mean over {recipe.unit}s"
        return cls(
            assembly.data.task, rows, x, y, ceiling, plan, name, z * _HALF / plan.denominator
        )

    def events(self) -> list[dp_event.DpEvent]:
        """Return the event of one Gaussian release."""
        return [self.plan.event]

    def of(self, summary: RunSummary, module: nn.Module, keys: KeyRing) -> float:
        """Compute the noised score of a run, which the search has charged before its first run."""
        total = BoundedSum.empty(self.plan)
        total.add(self.contributions(module))
        return _HALF + float(release(total.total, self.plan, keys, round=1)) / self.plan.denominator

    @torch.no_grad()
    def contributions(self, module: nn.Module) -> torch.Tensor:
        """Compute the units' terms [n, 1] in [-1/2, 1/2]; a unit without examples has no term."""
        module.eval()
        with torch_threads(1):
            return torch.tensor(
                [[self._term(module, torch.from_numpy(rows))] for rows in self.rows if len(rows)]
            )

    def _term(self, module: nn.Module, rows: torch.Tensor) -> float:
        parts = ((inputs.take(self.x, part), self.y[part]) for part in rows.long().split(_BATCH))
        figures = metrics_of(self.task, ((inputs.call(module, x), y) for x, y in parts))
        figure = (
            figures[self.task.headline]
            if self.ceiling is None
            else 1 - figures["loss"] / self.ceiling
        )
        return min(max(figure, 0.0), 1.0) - _HALF if math.isfinite(figure) else -_HALF
