"""Where a client's examples come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedlgm.data import DataSet, Partition


@dataclass(frozen=True)
class ClientData:
    """One client's own examples.

    Attributes:
        x: inputs [n, ...]; n may be 0.
        y: integer targets [n].
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


class ClientSource(Protocol):
    """Access to the clients that this process stands for."""

    def __call__(self, client: int) -> ClientData:
        """Data of client number `client`."""
        ...


@dataclass(frozen=True)
class PartitionedSource:
    """Simulated clients: a data set held once, cut up by a partition."""

    data: DataSet
    partition: Partition

    def __call__(self, client: int) -> ClientData:
        """Data of client number `client`."""
        indices = self.partition[client]
        return ClientData(torch.from_numpy(self.data.train_x[indices]), torch.from_numpy(self.data.train_y[indices]))
