"""The noise that a sum receives, as plain data for both backends, and the type in which sums are
stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlgm.aggregation.kernels.philox import SERVER_STREAM
from fedlgm.noise.draws import Family


@dataclass(frozen=True)
class Noise:
    """Noise for one sum.

    Attributes:
        scale: std (Gaussian) or b (Laplace) for each layer, [K] float32 on the sum's device; 0 adds
            nothing.
        family: "gaussian" or "laplace".
        key: Philox key, two 32-bit words.
        grid: whether value + noise is rounded to the layer's grid.
        stream: number of the noising party.
    """

    scale: Tensor
    family: Family
    key: tuple[int, int]
    grid: bool = True
    stream: int = SERVER_STREAM


def widest(device: torch.device) -> torch.dtype:
    """The type for sums on a device: float64, or float32 on Metal, which has no wider type."""
    return torch.float32 if device.type == "mps" else torch.float64
