"""The sum of one batch's clipped gradients, without a mechanism or a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor, nn

from fedlgm.extension.loader import users_code
from fedlgm.planning.layers import LayerTable
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.scaling import of_style
from fedlgm.training.inputs import Inputs
from fedlgm.training.tasks.task import ExampleLosses


def clipped_sum(
    module: nn.Module,
    x: Inputs,
    y: Tensor,
    *,
    clip: float | Sequence[float] | np.ndarray,
    layers: LayerTable,
    task: ExampleLosses | None = None,
    style: Literal["per-layer", "flat"] = "per-layer",
) -> tuple[Tensor, Tensor]:
    """Compute the sum of the examples' clipped gradients, and the norm of each example's gradient
    in every layer.

    With `style="per-layer"`, the gradient of example i in layer j is multiplied by min(1, c_j /
    ||g_ij||). With "flat", the example's gradient over all layers is multiplied by min(1, C /
    ||g_i||). A factor below 1 is reduced by a fraction of 2^-19, so that rounding raises no
    contribution above its bound. One example's contribution has an l2 norm of at most sqrt(sum_j
    c_j^2) ("per-layer") or C ("flat"). This bound is the sensitivity of the sum to adding or
    removing one example.

    Args:
        module: any module whose inputs and outputs have the example as first dimension, and in
            which examples do not influence each other.
        x: inputs [B, ...], or a tuple of such tensors; B may be 0.
        y: targets [B, ...].
        clip: one bound or, with style "per-layer", one bound for each layer of `layers` [K].
        layers: the module's layer table.
        task: task that computes the loss of each example (`losses(outputs, y) -> [B]`); None means
            classification.
        style: "per-layer" or "flat".

    Returns:
        The sum [D] in the table's order, and the l2 norms [B, K] before clipping, in float64. In
        the sum, an example whose gradient is not finite counts as zero.

    Raises:
        ConfigError: bounds are out of range, the numbers of inputs and targets differ, the module
            has no gradients per example (BatchNorm in training mode), or the module fails on the
            batch.

    Source: Abadi et al. (CCS 2016), Algorithm 1; Lee and Kifer (PoPETs 2021) and Li et al. (ICLR
        2022) for ghost norms.

    >>> import torch
    >>> from fedlgm.planning.layers import LayerTable
    >>> model = torch.nn.Linear(2, 3)
    >>> total, norms = clipped_sum(
    ...     model, torch.randn(8, 2), torch.randint(3, (8,)), clip=0.5, layers=LayerTable.from_module(model)
    ... )
    >>> total.shape, norms.shape
    (torch.Size([9]), torch.Size([8, 1]))
    """
    scaling = of_style(style, clip, len(layers))
    with users_code("clipped_sum", module):
        result = ExampleGradients(module, layers, task).sum(x, y, scaling)
    return result.total, result.norms
