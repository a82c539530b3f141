"""Conversion of PyTorch data sets to pairs of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedlgm.data.names import refuse_masked
from fedlgm.errors import DataError
from fedlgm.extension.loader import users_code


def as_pair(part: Any) -> Any:
    """Convert a `torch.utils.data.Dataset` with items (input, ..., target) to a pair (inputs,
    targets). Other values are returned unchanged.

    Every item is read only once, so a random transform is applied only once. If an item has several
    inputs, `inputs` is a tuple of arrays.

    Raises:
        DataError: the set has no length or no items, or its items are not tuples (input, ...,
            target) whose entries have the same shapes in all items.

    Example:
        >>> x, y = as_pair(torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.arange(3)))
        >>> x.shape, y.tolist()
        ((3, 2), [0, 1, 2])
    """
    if (
        isinstance(part, DataLoader | IterableDataset)
        or not isinstance(part, Dataset)
        or hasattr(part, "with_format")
    ):
        return part
    label = f"the torch data set {type(part).__name__}"
    with users_code(label, part, DataError):
        items = [part[i] for i in range(len(part))]  # type: ignore[arg-type]
    if not items:
        raise DataError(f"{label}: it has no items")
    if not all(isinstance(item, tuple | list) and len(item) == len(items[0]) > 1 for item in items):
        raise DataError(
            f"{label}: its items must be tuples (input, target), got {type(items[0]).__name__}: "
            "give arrays (x, y)"
        )
    columns = [[_array(value) for value in column] for column in zip(*items, strict=True)]
    for number, column in enumerate(columns):
        if len(shapes := {array.shape for array in column}) > 1:
            raise DataError(
                f"{label}: entry {number} of its items has several shapes, such as "
                f"{sorted(shapes)[:2]}"
            )
    *inputs, targets = map(np.stack, columns)
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets


def _array(value: Any) -> np.ndarray:
    refuse_masked(value, "the torch data set's items")
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
