"""The examples that every client of a vectorised batch uses in every step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fedlgm.training import inputs
from fedlgm.training.base import ClientTask
from fedlgm.training.inputs import Inputs


class Schedule:
    """Batches of unequal clients, padded to one shape: `rows` clients of `size` examples in every
    step.

    The shape must not depend on the clients in the batch. torch selects its kernels by shape, and
    rounding that depends on other clients would grow over the steps until one client changes
    another client's contribution. No clip bound covers this change.

    All examples are copied to the device once, without padding, and every step selects its examples
    there. Nothing waits for the device.

    Args:
        tasks: at most `rows` clients.
        orders: for each client, the order of its examples in every epoch, [epochs, n].
        rows: number of clients in the padded batch. Rows without a task use the first client's
            examples, which are masked.
        size: number of examples in a step.
        device: device of the steps.

    Attributes:
        steps: number of steps of the client with the most steps.
    """

    def __init__(
        self,
        tasks: list[ClientTask],
        orders: list[Tensor],
        rows: int,
        size: int,
        device: torch.device,
    ) -> None:
        batches, weights = [], []
        for order in orders:
            padding = (0, -order.shape[1] % size)
            batches.append(pad(order, padding).view(-1, size))
            weights.append(
                pad(torch.ones(order.shape, dtype=_weight_type(tasks[0].x)), padding).view(-1, size)
            )
        first = torch.tensor([0, *(len(task.y) for task in tasks[:-1])]).cumsum(0)
        absent = (0, 0, 0, rows - len(tasks))
        # Padding repeats the client's first example.
        self._index = pad(pad_sequence(batches) + first[:, None], absent).to(device)
        self._mask = pad(pad_sequence(weights), absent).to(device)
        steps = np.array([len(batch) for batch in batches])
        self._x = inputs.to(inputs.concatenate([task.x for task in tasks]), device)
        self._y = torch.cat([task.y for task in tasks]).to(device)
        self.steps = len(self._index)
        self._order = torch.from_numpy(np.argsort(steps, kind="stable")).to(device)
        self._ends = np.searchsorted(
            np.sort(steps), np.arange(self.steps + 1), side="right"
        ).tolist()

    def batch(self, step: int) -> tuple[Inputs, Tensor, Tensor]:
        """Inputs and targets [rows, size, ...] and mask [rows, size] of one step."""
        index = self._index[step]
        return inputs.take(self._x, index), self._y[index], self._mask[step]

    def finishing_rows(self, step: int) -> Tensor:
        """Rows for which this is the last step."""
        return self._order[self._ends[step] : self._ends[step + 1]]


def _weight_type(x: Inputs) -> torch.dtype:
    """Type of the weights of examples: the type of the inputs, or float32 for inputs that are not
    real numbers.
    """
    dtype: torch.dtype = inputs.first(x).dtype
    return dtype if dtype.is_floating_point else torch.float32
