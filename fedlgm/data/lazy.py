"""Training inputs that are read from their source, such as a file, only when a client trains on
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import override

from fedlgm.data.pixels import Undecoded
from fedlgm.errors import DataError
from fedlgm.extension.loader import users_code


class LazyArray(Undecoded):
    """Training inputs that are read each time their rows are needed, and are not stored in memory.

    A simulation of many clients then needs memory only for the inputs of the clients that are being
    trained. Values are checked when they are read. A resumed run compares the shape of the inputs
    with the shape in the interrupted run, but does not compare the values, because this would
    require reading all of them.

    Args:
        source: an object with `shape`, `dtype` and `source[rows]` for ascending int64 row numbers.
            It must return the same values every time. Examples are a dataset of h5py, an array of
            zarr, an `np.memmap`, or your own generator of examples.

    Attributes:
        dtype: float32, or int64 for integers such as tokens.

    Raises:
        DataError: the source lacks `shape`, `dtype` or `source[rows]`, or its type is not numeric.

    Example:
        >>> class Squares:
        ...     shape, dtype = (1_000_000, 1), np.dtype(np.float32)
        ...     def __getitem__(self, rows):
        ...         return np.square(rows, dtype=np.float32)[:, None]
        >>> inputs = LazyArray(Squares())
        >>> inputs[np.array([3, 2])].tolist(), len(inputs)
        ([[9.0], [4.0]], 1000000)
    """

    def __init__(self, source: Any, _rows: np.ndarray | None = None) -> None:
        shape, dtype = getattr(source, "shape", ()), getattr(source, "dtype", None)
        if not shape or dtype is None or not hasattr(source, "__getitem__"):
            raise DataError(
                f"LazyArray({type(source).__name__}): its source needs shape [n, ...], dtype and "
                "source[rows], as datasets of h5py and np.memmap have"
            )
        if np.dtype(dtype).kind not in "biuf":
            raise DataError(f"LazyArray({type(source).__name__}): {dtype} is not a type of numbers")
        self._source, self._rows = source, _rows
        self._shape = (int(shape[0]) if _rows is None else len(_rows), *map(int, shape[1:]))
        self.dtype = np.dtype(np.int64 if np.dtype(dtype).kind in "iu" else np.float32)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def _numbers(self, rows: Any) -> np.ndarray:
        """Convert an index of this array to row numbers of the source."""
        if self._rows is not None:
            return self._rows[rows]
        if isinstance(rows, slice):
            return np.arange(len(self))[rows]
        numbers = np.asarray(rows)
        return np.flatnonzero(numbers) if numbers.dtype == bool else numbers

    @override
    def parts(self, name: str) -> dict[str, np.ndarray]:
        return {f"{name}:shape": np.array(self.shape)}

    @override
    def keep(self, rows: Any) -> LazyArray:
        return LazyArray(self._source, self._numbers(rows))

    @override
    def __getitem__(self, rows: Any) -> np.ndarray:
        """Read inputs [rows, ...].

        Raises:
            DataError: the source fails, or returns a wrong shape, something else than numbers, NaN,
                infinity, or values that int64 cannot hold although its type is an integer.
        """
        numbers, back = np.unique(self._numbers(rows), return_inverse=True)
        label = f"LazyArray({type(self._source).__name__})"
        with users_code(f"{label}: its rows cannot be read", self._source, DataError):
            read = np.asarray(self._source[numbers])
        expected = (len(numbers), *self.shape[1:])
        if read.shape != expected:
            raise DataError(f"{label}: {len(numbers)} rows have shape {read.shape}, not {expected}")
        if read.dtype.kind not in "biuf":
            raise DataError(f"{label}: the rows read are of type {read.dtype}, not numbers")
        values = read.astype(self.dtype)
        if self.dtype == np.int64 and (values != read).any():
            raise DataError(f"{label}: some of the rows read hold numbers that int64 cannot hold")
        if not np.isfinite(values).all():
            raise DataError(f"{label}: some of the {len(numbers)} rows read hold NaN or infinity")
        return np.ascontiguousarray(values[back])
