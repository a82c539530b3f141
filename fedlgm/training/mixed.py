"""Training in mixed precision. The model computes in bfloat16, but weights and updates stay in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlgm.planning.layers import LayerTable
from fedlgm.training.inputs import Inputs
from fedlgm.training.sequential import Autograd, SequentialTrainer


class MixedPrecisionTrainer(SequentialTrainer):
    """`SequentialTrainer` with forward and backward passes under bfloat16 autocast. The loss is
    float32.

    bfloat16 has the range of float32, so losses need no scaling. The update is in float32 and is
    bounded like any other update, so the precision changes no guarantee.

    Args:
        module: see `SequentialTrainer`.
        layers: see `SequentialTrainer`.
        options: see `SequentialTrainer`.

    Example:
        >>> from fedlgm.training import ClientTask, LocalTraining
        >>> module = torch.nn.Linear(2, 2)
        >>> layers, x, y = LayerTable.from_module(module), torch.eye(2), torch.tensor([0, 1])
        >>> trainer = MixedPrecisionTrainer(module, layers, LocalTraining(lr=0.1))
        >>> next(trainer.updates(layers.flatten(module), [ClientTask(x, y, torch.Generator(), 1)])).dtype
        torch.float32
    """

    def __init__(
        self, module: torch.nn.Module, layers: LayerTable, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(module, layers, *arguments, **options)
        self._autograd = _Mixed(self._module, layers.unflatten(self._gradient), self._task)
        self._stack, self._unsettled = None, False  # no kernel computes in bfloat16


class _Mixed(Autograd):
    def _outputs(self, x: Inputs) -> Tensor:
        with torch.autocast(self._parameters[0].device.type, dtype=torch.bfloat16):
            return super()._outputs(x).float()
