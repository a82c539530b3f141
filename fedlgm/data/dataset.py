"""A labelled image set held in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DataSet:
    """Training and test samples as contiguous arrays, shared by every user in the process: read, never write.

    Attributes:
        name: name under which `fedlgm.data.load` knows the set.
        train_x: inputs, float32 [n, C, H, W], scaled by constants that do not depend on the data.
        train_y: labels, int64 [n], in [0, classes).
        test_x: inputs, float32 [m, C, H, W].
        test_y: labels, int64 [m].
        classes: number of classes of the task (some may be absent from the samples).
        train_user: for sets with natural clients, the user of each training sample, int64 [n], in [0, users).
    """

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int
    train_user: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of one input."""
        channels, height, width = self.train_x.shape[1:]
        return int(channels), int(height), int(width)

    @property
    def nbytes(self) -> int:
        """Bytes held by all arrays."""
        arrays = (self.train_x, self.train_y, self.test_x, self.test_y, self.train_user)
        return sum(array.nbytes for array in arrays if array is not None)
