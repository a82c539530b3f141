"""Scores rules at a model by the ratio of progress to noise.

A round moves the model by eta (m + e), where m is the mean of the bounded contributions and e is
noise of standard deviation sigma_l / (q N) in layer l. To second order the loss changes by eta g.m
+ eta^2 / 2 (m'Hm + sum_l trace(H_l) (sigma_l / (q N))^2). If noise outweighs the term m'Hm, the
best eta gains (g.m)^2 / (2 sum_l trace(H_l) (sigma_l / (q N))^2). Up to the factor 1/2, this gain
is the score of a rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.training import inputs
from fedlgm_lab.recommend.units import gradient_of
from simulations.config.assembly import Assembly

_STEP = 1e-3
"""Length per coordinate of the step in the finite differences for second derivatives."""
_LEAST = 1e-3
"""Least curvature of a layer as a share of the mean over the layers, because estimates may be
negative."""


@dataclass(frozen=True)
class Curvature:
    """The loss on held-out public examples around a model.

    Attributes:
        metrics: metrics of the task.
        gradient: gradient of the loss, [D].
        traces: estimate of trace(H_l) for each layer, at least a thousandth of the mean magnitude
            over the layers; float64 [K].
    """

    metrics: dict[str, float]
    gradient: Tensor
    traces: np.ndarray


class Landscape:
    """Gradients and curvature of the public loss.

    Args:
        assembly: the recipe's objects over the public examples.
        layers: the model's layers.
        examples: largest number of held-out examples.
        probes: number of random vectors in Hutchinson's estimate.
    """

    def __init__(self, assembly: Assembly, layers: LayerTable, examples: int, probes: int) -> None:
        self._task, self._layers, self._probes = assembly.data.task, layers, probes
        self._module = assembly.model.module()
        self._weights = layers.bind_(self._module)
        rows = slice(examples)
        self._x = inputs.tensors(inputs.take(assembly.data.dataset.test_x, rows))
        self._y = torch.from_numpy(assembly.data.dataset.test_y[rows])

    def metrics(self, model: Tensor) -> dict[str, float]:
        """Measure the task's metrics of a model [D]."""
        from fedlgm.training.tasks.evaluation import evaluate

        self._weights.copy_(model)
        return evaluate(self._task, self._module, self._x, self._y)

    def at(self, model: Tensor) -> Curvature:
        """Estimate gradient and curvature at a model [D].

        trace(H_l) is the mean of v_l.(Hv)_l over random signs v (Hutchinson 1989). Hv is a central
        difference of gradients, so models need no second derivatives.
        """
        metrics, gradient = self.metrics(model), self._gradient(model)
        generator, sums = torch.Generator().manual_seed(0), np.zeros(len(self._layers))
        for _ in range(self._probes):
            signs = torch.randint(0, 2, (self._layers.size,), generator=generator).float() * 2 - 1
            difference = self._gradient(model + _STEP * signs) - self._gradient(
                model - _STEP * signs
            )
            products = (signs * difference / (2 * _STEP)).double()
            sums += [float(part.sum()) for part in self._layers.split(products)]
        traces = sums / self._probes
        return Curvature(metrics, gradient, np.maximum(traces, _LEAST * np.abs(traces).mean()))

    def _gradient(self, model: Tensor) -> Tensor:
        self._weights.copy_(model)
        self._module.eval()
        total, count = torch.zeros(self._layers.size), len(self._y)
        for x, y in zip(inputs.split(self._x, 256), self._y.split(256), strict=True):
            total += gradient_of(self._module, self._layers, self._task, x, y) * (len(y) / count)
        return total


def score(found: Curvature, mean: Tensor, plan: ReleasePlan) -> float:
    """Compute the ratio of (progress)^2 to the loss that noise costs, up to factors that all rules
    share; 0 without progress.

    Args:
        found: the loss around the model.
        mean: mean bounded change of the model [D].
        plan: the plan of the noise.
    """
    progress = max(0.0, -float(found.gradient.double() @ mean.double()))
    sigma = np.where(plan.released, plan.sigma, 0.0)
    deviations = np.broadcast_to(sigma, found.traces.shape) if len(sigma) == 1 else sigma
    return progress**2 / float((found.traces * deviations**2).sum()) if deviations.any() else 0.0
