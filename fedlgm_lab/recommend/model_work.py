"""The amount of computation for advice, limited by a number of operations, so that the advice is
the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import inputs
from fedlgm_lab.recommend.units import gradient_of
from simulations.config.assembly import Assembly

OPERATIONS = 3e11
"""Floating-point operations of all passes together, which take one core about twenty seconds."""
PASSES = 120_000
"""Largest number of passes over an example for small models, for which arithmetic does not limit
the speed."""
STEPS = 512
"""Largest number of steps of a warm-up."""
LEAST_PASSES = 1000
"""Least number of passes over an example with which a warm-up gets beyond chance."""


@dataclass(frozen=True)
class Work:
    """Amount of computation that a model's size permits.

    Attributes:
        steps: number of steps of the warm-up.
        batch: number of examples of a step.
        stage: number of passes over single examples that compute a stage's contributions.
        held_out: number of examples on which losses are measured.
        probes: number of random vectors from which a Hessian's trace is estimated.
    """

    steps: int
    batch: int
    stage: int
    held_out: int
    probes: int

    @classmethod
    def of(cls, assembly: Assembly) -> Work:
        """Choose the amount of computation for a recipe's model.

        Raises:
            ConfigError: the model is so large that there are too few passes for a warm-up.
        """
        dataset, model = assembly.data.dataset, assembly.recipe.model.name
        each = _operations(assembly)
        passes = min(PASSES, int(OPERATIONS / each))
        if passes < LEAST_PASSES:
            raise ConfigError(
                f"model: {model} takes {each:.2g} operations for one example and step, so a minute "
                f"of one core makes about {passes} such passes, and advice needs at least "
                f"{LEAST_PASSES}: ask for a smaller model of the same kind, such as --set "
                "model.name=resnet20, or, if clients are the unit, let them choose: "
                "mechanism.name = 'voted-filling'"
            )
        batch = min(assembly.recipe.training.batch_size, len(dataset.train_y), 128)
        steps = max(16, min(STEPS, passes // (3 * batch)))
        held_out = max(32, min(len(dataset.test_y), 1024, passes // 128))
        probes = max(2, min(16, passes // (24 * held_out)))
        return cls(steps, batch, max(64, passes // 9), held_out, probes)

    def points(self, size: int) -> list[int]:
        """List the steps after which the loss is measured: each step is 1.2 times the step before,
        or twice that step for large models.
        """
        ratio = 1.2 if size < 1_000_000 else 2.0
        points = {self.steps}
        while (last := min(points)) > 1:
            points.add(int(last / ratio))
        return sorted(points)

    def batches(self, examples: int, first: int, last: int) -> list[Tensor]:
        """Choose the rows for the warm-up's steps from `first` up to `last`, in shuffled passes
        over the examples.
        """
        per_pass = max(1, examples // self.batch)
        orders = [
            np.random.default_rng(p).permutation(examples)
            for p in range(math.ceil(last / per_pass))
        ]
        batches = [
            order[i * self.batch : (i + 1) * self.batch]
            for order in orders
            for i in range(per_pass)
        ]
        return [torch.from_numpy(rows) for rows in batches[first:last]]


def _operations(assembly: Assembly) -> float:
    """Count the operations of one forward and backward pass over an example."""
    module, dataset = assembly.model.module(), assembly.data.dataset
    layers = LayerTable.from_module(module)
    rows = slice(2)
    x, y = (
        inputs.tensors(inputs.take(dataset.train_x, rows)),
        torch.from_numpy(dataset.train_y[rows]),
    )
    module.train()
    counter = FlopCounterMode(display=False)
    with counter:
        gradient_of(module, layers, assembly.data.task, x, y)
    tokens = inputs.first(dataset.train_x)
    length = tokens.shape[1] if np.issubdtype(tokens.dtype, np.integer) and tokens.ndim > 1 else 1
    return max(counter.get_total_flops() / len(y), 6.0 * layers.size * length)
