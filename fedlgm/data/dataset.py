"""Data sets: training and test examples, as arrays that are in memory or are read when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedlgm.data import tables
from fedlgm.data.names import class_numbers, refuse_masked
from fedlgm.data.partition import Partition
from fedlgm.data.pixels import Pixels, Undecoded
from fedlgm.data.spent import Spent
from fedlgm.data.torch_sets import as_pair
from fedlgm.data.users import user_numbers
from fedlgm.errors import DataError
from fedlgm.training import inputs
from fedlgm.training.inputs import Arrays

_BYTES = "bytes of "
_KEYS = ("train", "test", "clients", "users", "sites", "classes", "labels", "name")


@dataclass(frozen=True)
class DataSet:
    """Training and test examples as contiguous arrays, which all code in a process shares and must
    not change.

    The inputs of bundled image sets are float32 [n, C, H, W], scaled by constants that do not
    depend on the data; their targets are classes. Images that are stored as bytes stay bytes in
    memory (`Pixels`) until `train_x` or `test_x` is accessed; `examples` decodes only the given
    rows. Likewise, a `LazyArray` is read completely on the first access to `train_x`, and
    `examples` reads only the given rows.

    Attributes:
        name: the name with which `fedlgm.data.load` loads the set; for a user's set, its name in
            reports.
        train_x: inputs [n, ...], float32 or int64 (tokens); a tuple of such arrays for a model with
            several inputs.
        train_y: targets [n, ...] of any type that the run's task takes.
        test_x: inputs [m, ...], like the training inputs.
        test_y: targets [m, ...].
        classes: number of classes, or number of tokens in the vocabulary (some may not occur in the
            examples); None for other targets.
        train_user: for sets with natural clients, the user of each training example, int64 [n], in
            [0, users).
        clients: a division of the training examples among clients, if such a division comes with
            the set; `train_user` is then ignored.
        spent: the privacy cost of noisy statistics of the examples that were used to change the
            arrays, such as the means and deviations with which the inputs were standardised.
        labels: the name of each class, if the classes have names.
        columns: for tables, the descriptions of the columns of the inputs, in the order of the
            columns.
        sites: the names of the users in the order of their numbers, if the users are sites with
            public names.
    """

    name: str
    train_x: Arrays
    train_y: np.ndarray
    test_x: Arrays
    test_y: np.ndarray
    classes: int | None = None
    train_user: np.ndarray | None = None
    clients: Partition | None = None
    spent: Spent | None = None
    labels: tuple[str, ...] | None = None
    columns: tuple[tables.Column, ...] | None = None
    sites: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("train_x", "test_x"):
            if isinstance(self.__dict__[name], Undecoded):
                self.__dict__[_BYTES + name] = self.__dict__.pop(name)
            if self.columns is not None:
                tables.check_columns(
                    self.columns, self.held(name), "training" if name == "train_x" else "test"
                )

    if not TYPE_CHECKING:  # type checkers would otherwise allow any name

        def __getattr__(self, name: str) -> np.ndarray:
            """Return `train_x` or `test_x` if it is stored as bytes or is lazy: decode or read it
            on the first access, and store the result.
            """
            if _BYTES + name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self.__dict__[name] = self.__dict__[_BYTES + name][:]
            return self.__dict__[name]

    def held(self, name: str) -> Arrays | Undecoded:
        """Return `train_x` or `test_x` in the form in which it is stored, without decoding or
        reading it.
        """
        value: Arrays | Undecoded = self.__dict__[
            _BYTES + name if _BYTES + name in self.__dict__ else name
        ]
        return value

    def examples(self, rows: Any) -> Arrays:
        """Return `train_x[rows]`; only these rows are decoded or read."""
        return inputs.take(self.__dict__.get("train_x", self.held("train_x")), rows)

    def keep(self, rows: np.ndarray, name: str | None = None) -> DataSet:
        """Return a set with only the given training examples. The users are renumbered from 0, and
        the set's division among clients is dropped.

        Args:
            rows: indices of training examples.
            name: name of the new set.

        Example:
            >>> x, y = np.zeros((6, 3)), np.arange(6) % 2
            >>> DataSet.from_arrays((x, y), (x, y)).keep(np.array([0, 3, 4])).train_y.tolist()
            [0, 1, 0]
        """
        held, users = self.held("train_x"), self.train_user
        x: Any = held.keep(rows) if isinstance(held, Undecoded) else inputs.take(held, rows)
        test_x: Any = self.held("test_x")
        return replace(
            self,
            name=self.name if name is None else name,
            train_x=x,
            train_y=self.train_y[rows],
            test_x=test_x,
            train_user=None if users is None else np.unique(users[rows], return_inverse=True)[1],
            clients=None,
            sites=None,
        )

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[Any],
        test: Sequence[Any],
        *,
        clients: Sequence[Any] | None = None,
        users: Any = None,
        sites: bool = False,
        classes: int | None = None,
        labels: Sequence[str] | None = None,
        columns: tuple[tables.Column, ...] | None = None,
        name: str = "own",
    ) -> DataSet:
        """Check a user's arrays and make a set of them. Floats become float32, integers int64, and
        names of classes among the targets become numbers.

        Args:
            train: a pair (inputs [n, ...], targets [n, ...]) of array-likes. For a model with
                several inputs, the inputs are a tuple of arrays. A `LazyArray` is read only when
                its rows are needed. Instead of a pair, a `torch.utils.data.Dataset` is read once,
                see `fedlgm.data.torch_sets.as_pair`.
            test: the same for the test examples, (inputs [m, ...], targets [m, ...]) with m >= 1.
                The test examples must be public, because evaluation on them is not protected.
            clients: for each client, the indices of its training examples. A client may have no
                examples. Examples that no client holds are not used.
            users: instead of `clients`, the user of each training example [n], as a number or a
                name.
            sites: whether the users are sites, such as hospitals, whose names are public. Reports
                of runs that protect single examples then name the sites.
            classes: number of classes, or of tokens in the vocabulary. With None, the number is the
                largest test target plus one, so that it does not depend on private examples.
            labels: names of the classes, in the order of their numbers. With None, if the targets
                are names, the classes are the names among the test targets, in alphabetical order.
            columns: descriptions of the columns of the inputs. With None, they are derived from the
                test inputs if these are a table.
            name: name of the set in reports.

        Raises:
            DataError: an array is empty or not numeric, or contains NaN or infinity; inputs and
                targets have unequal lengths; the training and the test examples have different
                shapes or types; a target names no class; an index is out of range or occurs at two
                clients.

        >>> x, y = np.zeros((6, 3)), np.arange(6) % 2
        >>> own = DataSet.from_arrays((x, y), (x, y), clients=[[0, 1, 2], [3, 4, 5]])
        >>> own.shape, own.classes, len(own.clients)
        ((3,), 2, 2)
        """
        given = {part: as_pair(pair) for part, pair in (("training", train), ("test", test))}
        train, test, named = class_numbers(given, labels)
        train_x, train_y = _pair(train, "training")
        test_x, test_y = _pair(test, "test")
        headers = [list(getattr(pair[0], "columns", ())) for pair in (train, test)]
        if headers[0] != headers[1] and all(headers):
            raise DataError(
                f"test inputs: the columns {', '.join(map(str, headers[1]))} are not those of the "
                f"training inputs in their order ({', '.join(map(str, headers[0]))}): give "
                "test[train.columns]"
            )
        if columns is None and tables.is_table(test[0]) and headers[0] == headers[1]:
            columns = tables.describe(test[0], headers[1], inputs.first(test_x))
        for part, y in (("training", train_y), ("test", test_y)):
            if len(y) == 0:
                raise DataError(f"{part} data: there must be at least one {part} example")
        if inputs.each(_kind, (train_x, train_y)) != inputs.each(_kind, (test_x, test_y)):
            raise DataError(
                f"test: its arrays {_describe(test_x, test_y)} are not like the training set's "
                f"{_describe(train_x, train_y)}: only their lengths may differ"
            )
        if clients is not None and users is not None:
            raise DataError("clients and users: pass at most one of them")
        if classes is not None and not (isinstance(classes, int | np.integer) and classes >= 1):
            raise DataError(f"classes must be a whole number of at least 1, got {classes!r}")
        if named is not None and classes not in (None, len(named)):
            raise DataError(
                f"classes = {classes}, but labels names {len(named)}: {', '.join(named)}"
            )
        if named is not None:
            classes = len(named)
        if classes is None and np.issubdtype(test_y.dtype, np.integer):
            # Numbers below 0 stand for no class. Tasks whose targets are classes refuse such
            # numbers.
            classes = max(int(test_y.max()) + 1, 0) or None
        user = None if users is None else user_numbers(users, len(train_y))
        for client in clients if isinstance(clients, list | tuple) else ():
            refuse_masked(client, "clients")
        partition = None if clients is None else Partition.from_clients(clients, len(train_y))
        return cls(
            name,
            train_x,
            train_y,
            test_x,
            test_y,
            classes,
            user,
            partition,
            labels=named,
            columns=columns,
            sites=tuple(map(str, np.unique(users))) if sites and user is not None else None,
        )

    @classmethod
    def from_mapping(cls, arrays: Mapping[str, Any]) -> DataSet:
        """Make a set from a mapping {"train": (x, y), "test": (x, y), ...}; further keys are
        options of `from_arrays`.

        Instead of the two pairs of arrays, the mapping may hold two tables; see
        `fedlgm.data.tables.as_arrays`.

        Raises:
            DataError: a key is missing or unknown, or `from_arrays` or `as_arrays` refuses the
                data.
        """
        of_tables = tables.holds_tables(arrays)
        keys = (*_KEYS, *tables.OPTIONS) if of_tables else _KEYS
        unknown = [key for key in arrays if key not in keys]
        missing = [key for key in ("train", "test") if key not in arrays]
        if unknown or missing:
            problem = f"unknown key {unknown[0]!r}" if unknown else f"key {missing[0]!r} is missing"
            files = [key for key in ("train", "test") if isinstance(arrays.get(key), str | Path)]
            if files:
                raise DataError(
                    f"data: {files[0]!r} is a name, not a table: read a file with "
                    "pandas.read_csv(...)"
                )
            hint = "give the validation part as 'test'; " if "validation" in arrays else ""
            raise DataError(f"data: {problem}; {hint}its keys: {', '.join(dict.fromkeys(keys))}")
        if of_tables:
            arrays = tables.as_arrays(arrays)
        options = {key: value for key, value in arrays.items() if key not in ("train", "test")}
        return cls.from_arrays(arrays["train"], arrays["test"], **options)

    def validate(self) -> DataSet:
        """Check the set's arrays and convert them as `from_arrays` does. Arrays that already have
        the right form are not copied.

        Raises:
            DataError: see `from_arrays`.
        """
        if isinstance(self.held("train_x"), Pixels):
            return self  # a bundled set
        alike = DataSet.from_arrays(
            (self.held("train_x"), self.train_y),
            (self.held("test_x"), self.test_y),
            users=self.train_user,
            classes=self.classes,
            labels=self.labels,
            columns=self.columns,
        )
        if self.clients is not None:
            Partition.from_clients(list(self.clients), len(alike.train_y))
        classes = self.classes if alike.labels == self.labels else alike.classes
        unread: Any = {name: alike.held(name) for name in ("train_x", "test_x")}
        return replace(
            alike,
            **unread,
            name=self.name,
            classes=classes,
            clients=self.clients,
            spent=self.spent,
            sites=self.sites,
        )

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of one input, such as (C, H, W); for a model with several inputs, a tuple of
        shapes.
        """
        return tuple(
            inputs.each(
                lambda part: tuple(int(size) for size in part.shape[1:]), self.held("train_x")
            )
        )

    def parts(self) -> dict[str, np.ndarray]:
        """Return the arrays of inputs and targets by name, so that each array can be sent
        separately. The training inputs are named "train_x", or "train_x.0", "train_x.1" and so on
        if there are several; the names of the test inputs begin with "test_x".

        Inputs that are stored as bytes have the two entries "train_x" and "train_x:values", the
        table that decodes the bytes. A `LazyArray` has only the entry "train_x:shape".
        """
        named: dict[str, np.ndarray] = {"train_y": self.train_y, "test_y": self.test_y}
        for name in ("train_x", "test_x"):
            x = self.held(name)
            if isinstance(x, Undecoded):
                named |= x.parts(name)
            else:
                named |= (
                    {f"{name}.{i}": part for i, part in enumerate(x)}
                    if isinstance(x, tuple)
                    else {name: x}
                )
        return named

    @classmethod
    def from_parts(cls, name: str, parts: Mapping[str, np.ndarray], classes: int | None) -> DataSet:
        """Make a set from the arrays that `parts` returned. The set has no users and no clients."""

        def join(key: str) -> Any:
            if f"{key}:values" in parts:
                return Pixels(parts[key], parts[f"{key}:values"])
            count = sum(part.startswith(f"{key}.") for part in parts)
            return tuple(parts[f"{key}.{i}"] for i in range(count)) if count else parts[key]

        return cls(
            name, join("train_x"), parts["train_y"], join("test_x"), parts["test_y"], classes
        )


def _pair(pair: Sequence[Any], part: str) -> tuple[Any, np.ndarray]:
    """Check a pair of inputs and targets, and convert them to arrays."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = f"a {type(pair).__name__}" + (
            f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
        )
        hint = ", or its data set (loader.dataset)" if hasattr(pair, "dataset") else ""
        raise DataError(
            f"{part} data must be a pair of arrays (inputs, targets), got {got}: give (x, y){hint}"
        )
    x, y = pair
    if tables.is_table(x) and np.asarray(x).dtype.kind not in "biuf":
        x = tables.features(x, part)
    arrays: Arrays | Undecoded
    several = (
        "several inputs are a tuple of arrays (a, b), in the order in which the model takes them"
    )
    if isinstance(x, Mapping):
        raise DataError(f"{part} inputs: {several}, not a {type(x).__name__}")
    if isinstance(x, Undecoded):
        arrays = x
    elif isinstance(x, tuple):
        arrays = tuple(as_numbers(array, f"{part} input {i}") for i, array in enumerate(x))
    else:
        arrays = as_numbers(x, f"{part} inputs")
    targets = as_numbers(y, f"{part} targets")
    lengths = [len(array) for array in inputs.parts(arrays)]
    if any(length != len(targets) for length in lengths):
        counts = ", ".join(map(str, lengths))
        hint = f"; {several}" if isinstance(x, list) and len(x) < len(targets) == len(x[0]) else ""
        raise DataError(
            f"{part} data: {counts} inputs but {len(targets)} targets; every input needs one "
            f"target{hint}"
        )
    return arrays, targets


def as_numbers(values: Any, what: str) -> np.ndarray:
    """Convert numbers to an array for a data set: integers to int64, floats and Booleans to
    float32.

    Args:
        values: array-like [n, ...].
        what: description of the array, for the message.

    Raises:
        DataError: the values are not numeric, or some of them are complex, NaN, infinite or too
            large.

    Example:
        >>> as_numbers([0.5, 1], "targets").dtype, as_numbers([True, False], "targets").dtype
        (dtype('float32'), dtype('float32'))
    """
    refuse_masked(values, what)
    try:
        array = np.asarray(_dense(values) if isinstance(values, torch.Tensor) else values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{what}: not an array of numbers: {error}") from error
    if array.dtype == object and array.ndim and not array.size:
        raise DataError(f"{what} hold no values: there are no rows")
    if array.ndim == 0 or array.dtype.kind not in "biufc":
        remedy = ""
        if hasattr(values, "toarray"):
            remedy = "; give a sparse matrix as x.toarray()"
        elif array.dtype == object and array.ndim:
            remedy = "; give it as array.astype(float), or astype(int) for classes"
        raise DataError(
            f"{what} must be an array of numbers [n, ...], got {array.dtype} of shape "
            f"{array.shape}{remedy}"
        )
    if np.issubdtype(array.dtype, np.complexfloating):
        raise DataError(f"{what} are complex: give their real and imaginary parts as two channels")
    kind = np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32
    if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
        raise DataError(f"{what} go up to {array.max()}, more than signed 64-bit integers can hold")
    with np.errstate(over="ignore"):
        held = np.ascontiguousarray(array, dtype=kind)
    if kind == np.float32 and not (finite := np.isfinite(held)).all():
        where = np.argwhere(~finite)
        problem = (
            "too large for float32" if np.isfinite(array[tuple(where[0])]) else "NaN or infinite"
        )
        raise DataError(
            f"{what}: {len(where)} values are {problem}, the first at index "
            f"{tuple(where[0].tolist())}: remove or replace them"
        )
    return held


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor on any device, with any layout and type, to a tensor that NumPy can read."""
    tensor = (
        tensor.detach().cpu().to_dense()
        if tensor.layout != torch.strided
        else tensor.detach().cpu()
    )
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize <= 2 else tensor


def _kind(array: Any) -> Any:
    return inputs.each(lambda values: (values.dtype, values.shape[1:]), array)


def _describe(x: Arrays, y: np.ndarray) -> str:
    parts = [*inputs.parts(x), y]
    return ", ".join(f"{part.dtype} {part.shape}" for part in parts)
