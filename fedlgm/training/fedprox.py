"""FedProx: local training with a proximal term, which pulls the local model towards the global
model (Li et al. 2020, arXiv 1812.06127, equation 2).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.training.sequential import SequentialTrainer
from fedlgm.training.vectorized import VectorizedTrainer


class _Proximal:
    """Adds the gradient of mu / 2 |w - w_0|^2 to the gradient of the loss, before clipping to
    `gradient_clip`; w_0 is the global model.
    """

    def __init__(self, *arguments: Any, mu: float = 0.01, **options: Any) -> None:
        if not 0 <= mu < float("inf"):
            raise ConfigError(f"trainer.mu = {mu} must be a finite number of at least 0")
        super().__init__(*arguments, **options)
        self._mu = mu

    def adjust_(self, gradient: Tensor, weights: Tensor, model: Tensor) -> None:
        gradient.add_(weights, alpha=self._mu).sub_(model, alpha=self._mu)


class FedProx(_Proximal, SequentialTrainer):
    """`SequentialTrainer` with the proximal term.

    The privacy guarantee is the same as with plain training, because every update is bounded after
    training.

    Args:
        arguments: see `SequentialTrainer`.
        mu: factor of the proximal term, at least 0; with 0, training is plain.
        options: see `SequentialTrainer`.

    Raises:
        ConfigError: `mu` is negative or not finite.

    Example:
        >>> import torch
        >>> from fedlgm import LayerTable
        >>> from fedlgm.training import ClientTask, LocalTraining
        >>> module, settings = torch.nn.Linear(2, 2), LocalTraining(lr=0.1, epochs=5)
        >>> layers = LayerTable.from_module(module)
        >>> model, x, y = layers.flatten(module), torch.eye(2), torch.tensor([0, 1])
        >>> def length(trainer):
        ...     return float(next(trainer.updates(model, [ClientTask(x, y, torch.Generator(), 5)])).norm())
        >>> length(FedProx(module, layers, settings, mu=5.0)) < length(FedProx(module, layers, settings, mu=0.0))
        True
    """


class VectorizedFedProx(_Proximal, VectorizedTrainer):
    """`VectorizedTrainer` with the proximal term; see `FedProx`."""
