"""Training and test examples held in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlgm import inputs
from fedlgm.data.partition import Partition
from fedlgm.errors import DataError
from fedlgm.inputs import Arrays

_KEYS = ("train", "test", "clients", "users", "classes", "name")


@dataclass(frozen=True)
class DataSet:
    """Training and test examples as contiguous arrays, shared by every user in the process: read, never write.

    Bundled image sets hold float32 [n, C, H, W], scaled by constants that do not depend on the data, and classes.

    Attributes:
        name: name under which `fedlgm.data.load` knows the set.
        train_x: inputs [n, ...], float32 or int64 (tokens); a tuple of such arrays for a model of several inputs.
        train_y: targets [n, ...] of any type that the run's task takes.
        test_x: inputs [m, ...], as the training inputs.
        test_y: targets [m, ...].
        classes: number of classes, or of tokens in the vocabulary (some may be absent from the examples); None for
            other targets.
        train_user: for sets with natural clients, the user of each training example, int64 [n], in [0, users).
        clients: the set's own division among clients, where it has one; users are then ignored.
    """

    name: str
    train_x: Arrays
    train_y: np.ndarray
    test_x: Arrays
    test_y: np.ndarray
    classes: int | None = None
    train_user: np.ndarray | None = None
    clients: Partition | None = None

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[Any],
        test: Sequence[Any],
        *,
        clients: Sequence[Any] | None = None,
        users: Any = None,
        classes: int | None = None,
        name: str = "own",
    ) -> DataSet:
        """A set of a user's own arrays, checked. Floats become float32, integers int64.

        Args:
            train: (inputs [n, ...], targets [n, ...]), anything that NumPy makes arrays of; a tuple of arrays as inputs
                is for a model of several inputs.
            test: (inputs [m, ...], targets [m, ...]), m >= 1, public: they are evaluated without protection.
            clients: for each client the indices of its training examples; some may be empty. Examples that no client
                holds are not used.
            users: instead of `clients`, the user of each training example [n], numbers or names.
            classes: number of classes (tokens). None takes the test targets' largest plus one, so that the number does
                not depend on private examples.
            name: for reports.

        Raises:
            DataError: arrays of unequal lengths, of other shapes in test than in training, without numbers, with NaN or
                infinity; an index that is out of range or given to two clients.

        >>> x, y = np.zeros((6, 3)), np.arange(6) % 2
        >>> own = DataSet.from_arrays((x, y), (x, y), clients=[[0, 1, 2], [3, 4, 5]])
        >>> own.shape, own.classes, len(own.clients)
        ((3,), 2, 2)
        """
        train_x, train_y = _pair(train, "training")
        test_x, test_y = _pair(test, "test")
        if len(test_y) == 0:
            raise DataError("test: there must be at least one test example")
        alike = tuple(inputs.each(_kind, (train_x, train_y))) == tuple(inputs.each(_kind, (test_x, test_y)))
        if not alike:
            raise DataError(
                f"test: its arrays {_describe(test_x, test_y)} are not like the training set's "
                f"{_describe(train_x, train_y)}: only their lengths may differ"
            )
        if clients is not None and users is not None:
            raise DataError("clients and users: give at most one of them")
        if classes is None and np.issubdtype(test_y.dtype, np.integer):
            classes = int(test_y.max()) + 1
        user = None if users is None else _users(users, len(train_y))
        own = None if clients is None else Partition.from_clients(clients, len(train_y))
        return cls(name, train_x, train_y, test_x, test_y, classes, user, own)

    @classmethod
    def from_mapping(cls, arrays: Mapping[str, Any]) -> DataSet:
        """A set of {"train": (x, y), "test": (x, y), ...}; further keys are options of `from_arrays`, see there.

        Raises:
            DataError: a key is missing or unknown, or see `from_arrays`.
        """
        unknown = [key for key in arrays if key not in _KEYS]
        missing = [key for key in ("train", "test") if key not in arrays]
        if unknown or missing:
            problem = f"unknown key {unknown[0]!r}" if unknown else f"key {missing[0]!r} is missing"
            raise DataError(f"data: {problem}; its keys: {', '.join(_KEYS)}")
        options = {key: value for key, value in arrays.items() if key not in ("train", "test")}
        return cls.from_arrays(arrays["train"], arrays["test"], **options)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of one input, such as (C, H, W); with several inputs a tuple of their shapes."""
        return tuple(inputs.each(lambda part: tuple(int(size) for size in part.shape[1:]), self.train_x))

    def parts(self) -> dict[str, np.ndarray]:
        """Inputs and targets by name, "train_x" or "train_x.0", "train_x.1" and so on, to be shipped one by one."""
        named: dict[str, np.ndarray] = {"train_y": self.train_y, "test_y": self.test_y}
        for name, x in (("train_x", self.train_x), ("test_x", self.test_x)):
            named |= {f"{name}.{i}": part for i, part in enumerate(x)} if isinstance(x, tuple) else {name: x}
        return named

    @classmethod
    def from_parts(cls, name: str, parts: Mapping[str, np.ndarray], classes: int | None) -> DataSet:
        """The set of `parts`, without users or clients."""

        def joined(key: str) -> Arrays:
            count = sum(part.startswith(f"{key}.") for part in parts)
            return tuple(parts[f"{key}.{i}"] for i in range(count)) if count else parts[key]

        return cls(name, joined("train_x"), parts["train_y"], joined("test_x"), parts["test_y"], classes)

    @property
    def nbytes(self) -> int:
        """Bytes held by all arrays."""
        arrays = [self.train_y, self.test_y]
        for x in (self.train_x, self.test_x):
            arrays += x if isinstance(x, tuple) else (x,)
        if self.train_user is not None:
            arrays.append(self.train_user)
        return sum(array.nbytes for array in arrays)


def _pair(pair: Sequence[Any], part: str) -> tuple[Arrays, np.ndarray]:
    """Inputs and targets as arrays, checked."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{part} data must be a pair (inputs, targets), got {type(pair).__name__}")
    x, y = pair
    arrays: Arrays
    if isinstance(x, tuple):
        arrays = tuple(as_numbers(one, f"{part} input {i}") for i, one in enumerate(x))
    else:
        arrays = as_numbers(x, f"{part} inputs")
    targets = as_numbers(y, f"{part} targets")
    lengths = [len(one) for one in (arrays if isinstance(arrays, tuple) else (arrays,))]
    if any(length != len(targets) for length in lengths):
        counts = ", ".join(map(str, lengths))
        raise DataError(f"{part} data: {counts} inputs but {len(targets)} targets; every input needs one target")
    return arrays, targets


def as_numbers(values: Any, what: str) -> np.ndarray:
    """An array as data sets hold it: floats as float32, integers as int64.

    Args:
        values: anything that NumPy makes an array [n, ...] of.
        what: what it is, for the message.

    Raises:
        DataError: no numbers, complex ones, NaN or infinity.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"{what}: no array of numbers: {error}") from error
    if array.ndim == 0 or not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise DataError(f"{what} must be an array of numbers [n, ...], got {array.dtype} of shape {array.shape}")
    if np.issubdtype(array.dtype, np.complexfloating):
        raise DataError(f"{what} are complex: give their real and imaginary parts as two channels")
    if np.issubdtype(array.dtype, np.floating):
        finite = np.isfinite(array)
        if not finite.all():
            where = np.argwhere(~finite)
            raise DataError(
                f"{what}: {len(where)} values are NaN or infinite, the first at index {tuple(where[0].tolist())}"
            )
    kind = np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32
    return np.ascontiguousarray(array, dtype=kind)


def _users(users: Any, count: int) -> np.ndarray:
    ids = np.asarray(users)
    if ids.shape != (count,):
        raise DataError(f"users must name the user of each of the {count} training examples, got shape {ids.shape}")
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


def _kind(array: Any) -> Any:
    return inputs.each(lambda one: (one.dtype, one.shape[1:]), array)


def _describe(x: Arrays, y: np.ndarray) -> str:
    parts = [*(x if isinstance(x, tuple) else (x,)), y]
    return ", ".join(f"{part.dtype} {part.shape}" for part in parts)
