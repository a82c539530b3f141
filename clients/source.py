"""Where a client's examples come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedlgm import inputs
from fedlgm.data import DataSet, Partition
from fedlgm.inputs import Inputs


@dataclass(frozen=True)
class ClientData:
    """One client's own examples.

    Attributes:
        x: inputs [n, ...], one array or a tuple of several; n may be 0.
        y: targets [n, ...] of the run's task.
    """

    x: Inputs
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
        x = inputs.tensors(inputs.take(self.data.train_x, indices))
        return ClientData(x, torch.from_numpy(self.data.train_y[indices]))
