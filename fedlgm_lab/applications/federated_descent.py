"""Coordinate descent as a federation: clients hold rows, and a round releases one coordinate's sum.

The model is theta with one layer per coordinate. In round r the plan releases only coordinate (r -
1) mod K. Clients add up their rows' clipped partial derivatives, and the server takes the proximal
step. Without noise the path equals the path of `coordinate_descent.descend` on all rows together,
up to the factor 1 - 2^-16 by which sums are scaled down. The unit of privacy is a row: every row's
derivatives are clipped before a client adds them up, so a client's sum needs no further bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation.contributions import BoundedUpdates
from fedlgm.mechanisms.mechanism import Mechanism
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import SAFETY, LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Unit
from fedlgm.training import inputs
from fedlgm.training.base import ClientTask
from fedlgm_lab.applications.coordinate_descent import DescentPlan
from fedlgm_lab.applications.objectives import Objective
from fedlgm_lab.applications.sums import sum_rows


def coordinate_table(coordinates: int) -> LayerTable:
    """Make a table with one layer of size 1 for each coordinate of theta."""
    return LayerTable.from_sizes({f"theta[{i}]": 1 for i in range(coordinates)})


class CoordinateSums:
    """Trainer whose update holds, for every coordinate, the sum of the clipped partial derivatives
    of a client's rows at the current theta.

    All K sums cost about as much as one pass over the rows; the round's plan selects the sum that
    leaves the client.

    Args:
        objective: the loss.
        plan: the descent's plan, which gives the clipping bounds C_i.
    """

    def __init__(self, objective: Objective, plan: DescentPlan) -> None:
        self._objective, self._clip = objective, plan.clip

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[BoundedUpdates]:
        """Yield the sums, float64 [1, K], of each task (x: rows [n, K], y: targets [n]);
        derivatives that are not finite count as zero.
        """
        theta = model.double().numpy()
        for task in tasks:
            x, y = inputs.first(task.x).double().numpy(), task.y.double().numpy()
            with np.errstate(invalid="ignore", over="ignore"):
                derivatives = self._objective.margin_gradient(x @ theta, y)[:, None] * x
            derivatives = np.nan_to_num(derivatives, nan=0.0, posinf=0.0, neginf=0.0)
            total = sum_rows(np.clip(derivatives, -self._clip, self._clip))
            # The sum is scaled down slightly, so that rounding errors over millions of rows cannot
            # carry one row's share above its bound.
            yield BoundedUpdates(torch.from_numpy(SAFETY * total)[None], tuple(self._clip.tolist()))


@dataclass(frozen=True)
class CoordinateRelease(Mechanism):
    """Mechanism that releases the coordinates of a `DescentPlan` one after another.

    Attributes:
        descent: the plan of bounds, noise and guarantee. Its number of passes must be the run's
            number of rounds divided by K.
    """

    unit: ClassVar[Unit] = "example"  # a row

    descent: DescentPlan = None  # type: ignore[assignment]

    def costs(self, layers: LayerTable, rounds: int) -> np.ndarray:
        """Return (clip / noise)^2 of each round's coordinate, which is its cost for facts with
        noise multiplier 1 (see `Mechanism.costs`).
        """
        return ((self.descent.clip / self.descent.noise) ** 2)[np.arange(rounds) % len(layers)]

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Plan the release of the next coordinate; no other layer is released."""
        turn = np.arange(len(layers)) == transcript.rounds % len(layers)
        sigma = np.where(turn, self.descent.noise, np.inf)
        return ReleasePlan(
            layers,
            self.descent.clip,
            sigma,
            facts,
            self.descent.guarantee,
            family=self.descent.family,
            released=turn,
            bounded_by="trainer",
        )


class ProximalStep:
    """Server step: theta_i <- prox(theta_i - tau_i sum_i / N), for the coordinate of this round.

    Args:
        objective: supplies the proximal operator.
        plan: learning rates and the public number of rows N.
        clients: public denominator by which the strategy has divided the sum.
    """

    def __init__(self, objective: Objective, plan: DescentPlan, clients: float) -> None:
        self._objective, self._plan, self._clients, self._rounds = objective, plan, clients, 0

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Compute the next theta [K] from the current theta and the released mean [K], of which
        only one coordinate is not zero.
        """
        i = self._rounds % len(model)
        self._rounds += 1
        rate = float(self._plan.rates[i])
        total = float(mean_update[i]) * self._clients
        theta = model.clone()
        theta[i] = self._objective.prox(float(model[i]) - rate * total / self._plan.rows, rate)
        return theta
