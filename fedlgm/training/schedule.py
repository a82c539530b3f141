"""The examples that each client in a batch of clients uses in each step of vectorised training."""

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
    """The batches of examples of unequal clients, padded to one shape: `rows` clients with `size`
    examples each in every step.

    The shape must not depend on the clients. PyTorch selects its kernels by shape, so a client's
    rounding errors would depend on other clients, and would grow over the steps until one client
    changes another client's contribution. No clip bound would cover this change.

    All examples are copied to the device once, without padding, and every step selects its examples
    there. The steps never wait for the device.

    Args:
        tasks: at most `rows` clients.
        orders: order of each client's examples in every epoch, [epochs, n].
        rows: number of clients in the padded batch. Rows without a task use an example of the first
            client, which is masked.
        size: number of examples in a step.
        device: device of the steps.

    Attributes:
        steps: largest number of steps of a client.
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
        """Return the inputs and targets [rows, size, ...] and the mask [rows, size] of one step."""
        index = self._index[step]
        return inputs.take(self._x, index), self._y[index], self._mask[step]

    def finishing_rows(self, step: int) -> Tensor:
        """Return the rows for which this step is the last."""
        return self._order[self._ends[step] : self._ends[step + 1]]


def _weight_type(x: Inputs) -> torch.dtype:
    """Choose the dtype of the examples' weights, which is the dtype of the inputs, or float32 if
    the inputs are not floating-point numbers.
    """
    dtype: torch.dtype = inputs.first(x).dtype
    return dtype if dtype.is_floating_point else torch.float32
