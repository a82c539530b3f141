"""Description of the noise that is added to a sum, for both backends, and the type in which sums
are stored.
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
        stream: number of the party that adds the noise.
    """

    scale: Tensor
    family: Family
    key: tuple[int, int]
    grid: bool = True
    stream: int = SERVER_STREAM


def widest(device: torch.device) -> torch.dtype:
    """Return the type of sums on a device: float64, or float32 on Metal, which lacks float64."""
    return torch.float32 if device.type == "mps" else torch.float64
