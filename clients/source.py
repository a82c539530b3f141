"""Sources of a client's examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedlgm.data import DataSet, Partition
from fedlgm.training import inputs
from fedlgm.training.inputs import Inputs


@dataclass(frozen=True)
class ClientData:
    """The examples of one client.

    Attributes:
        x: inputs [n, ...], one array or a tuple of several; n may be 0.
        y: targets [n, ...] of the run's task.

    Example:
        >>> len(ClientData(torch.zeros(5, 3), torch.zeros(5)))
        5
    """

    x: Inputs
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


class ClientSource(Protocol):
    """Access to the data of the clients that this process represents.

    Example:
        >>> def of_files(client):
        ...     return ClientData(torch.full((2, 1), float(client)), torch.tensor([0, 1]))
        >>> source: ClientSource = of_files
        >>> source(3).x.tolist()
        [[3.0], [3.0]]
    """

    def __call__(self, client: int) -> ClientData:
        """Return the data of client number `client`."""


@dataclass(frozen=True)
class PartitionedSource:
    """Simulated clients: one data set in memory, divided by a partition.

    Attributes:
        data: the data set.
        partition: training examples of each client.

    Example:
        >>> x, y = [[0.0], [1.0], [2.0]], [0, 1, 1]
        >>> data = DataSet.from_arrays((x, y), (x, y))
        >>> source = PartitionedSource(data, Partition.from_clients([[1], [0, 2]], samples=3))
        >>> source(1).x.tolist(), source(1).y.tolist()
        ([[0.0], [2.0]], [0, 1])
    """

    data: DataSet
    partition: Partition

    def __call__(self, client: int) -> ClientData:
        """Return the data of client number `client`."""
        indices = self.partition[client]
        x = inputs.tensors(self.data.examples(indices))
        return ClientData(x, torch.from_numpy(self.data.train_y[indices]))
