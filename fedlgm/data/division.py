"""Division of a data set among clients by a scheme that a recipe names or a user passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedlgm.data import flower_datasets as flower
from fedlgm.data.assignment import WITHOUT_LABELS
from fedlgm.data.class_names import class_number
from fedlgm.data.dataset import DataSet
from fedlgm.data.partition import Partition, partition, schemes
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_reference, shown_name, users_code
from fedlgm.noise.keys import KeyRing
from fedlgm.wording import prefix_key


def divide(data: DataSet, clients: int, scheme: Any, *, seed: int = 0, **values: Any) -> Partition:
    """Divide a data set's training examples among clients.

    The result depends only on the arguments, never on a global random generator.

    Args:
        data: the set. Schemes that divide by label need integer targets [n].
        clients: number of clients, at least 1.
        scheme: one of `schemes()`, of which "natural" uses the clients or users that come with the
            set; a class of `flwr_datasets.partitioner`, its name or an object of the class; or your
            own function (data, clients, seed, **options), which returns the indices of each
            client's training examples. Your own class, object or function may be given as
            "package.module:name".
        seed: public seed, 0 <= seed < 2**128.
        **values: options of the scheme; `private_class` is the number or the name of a class.

    Raises:
        ConfigError: a scheme or option is unknown, a value is out of range, or the data do not meet
            a requirement of the scheme.
        DataError: your own function returns indices of examples that do not exist, or returns an
            index twice.

    >>> x, y = np.zeros((8, 2)), np.arange(8) % 2
    >>> divide(DataSet.from_arrays((x, y), (x, y)), 4, "iid").sizes.tolist()
    [2, 2, 2, 2]
    """
    ring = KeyRing.from_seed(seed)
    if (
        isinstance(scheme, str)
        and not is_reference(scheme)
        and not flower.is_partitioner_name(scheme)
    ):
        if scheme == "natural":
            return _natural(data, clients, seed, values)
        if isinstance(values.get("private_class"), int | str):
            with prefix_key("private_class"):
                values["private_class"] = class_number(data, values["private_class"])
        return partition(_labels(data, scheme), clients, scheme, seed=seed, **values)
    partitioner = flower.find(scheme) if isinstance(scheme, str) else scheme
    label = shown_name(scheme)
    if hasattr(partitioner, "load_partition"):
        columns = {
            "label": data.train_y
            if data.train_y.ndim == 1
            else np.zeros(len(data.train_y), np.int64)
        }
        if data.train_user is not None:
            columns["user"] = data.train_user
        return Partition.from_owner(
            flower.by_partitioner(partitioner, columns, clients, ring, values), clients
        )
    if not callable(partitioner):
        raise ConfigError(
            f"partition scheme {label} is neither one of {', '.join(schemes())}, nor a Partitioner "
            "of flwr-datasets, nor a function (data, clients, seed, **options)"
        )
    with users_code(f"partition scheme {label}", partitioner):
        given = partitioner(data, clients, seed, **values)
        lists: Any = given if isinstance(given, Mapping | str) else list(given)
    division = Partition.from_clients(lists, len(data.train_y))
    if len(division) != clients:
        raise ConfigError(
            f"partition scheme {label} makes {len(division)} clients, but federation.clients is "
            f"{clients}"
        )
    return division


def needs_labels(scheme: str) -> bool:
    """Whether a scheme is a bundled scheme that divides by label and therefore needs integer
    targets [n].

    >>> [needs_labels(scheme) for scheme in ("iid", "dirichlet")]
    [False, True]
    """
    return scheme in schemes() and scheme not in WITHOUT_LABELS


def _labels(data: DataSet, scheme: str) -> np.ndarray:
    """Return the integer labels [n] by which a scheme divides. If the targets are no integers [n]
    and the scheme needs no labels, return zeros.
    """
    y = data.train_y
    if y.ndim == 1 and np.issubdtype(y.dtype, np.integer):
        return y
    if needs_labels(scheme):
        raise ConfigError(
            f"partition scheme {scheme!r} divides by integer labels [n], but the targets of "
            f"{data.name!r} are {y.dtype} {y.shape}: use 'iid', 'natural' (with users or clients "
            "of the set's own), or a scheme of your own; one column of classes is y.ravel(), "
            "one-hot rows are y.argmax(1)"
        )
    return np.zeros(len(y), dtype=np.int64)


def _natural(data: DataSet, clients: int, seed: int, values: dict[str, Any]) -> Partition:
    users = values.pop("users", data.train_user)
    if data.clients is not None:
        if values:
            raise ConfigError(
                f"partition scheme 'natural': unknown option {next(iter(values))!r}; its options: "
                "none"
            )
        if len(data.clients) != clients:
            raise ConfigError(
                f"{data.name!r} has {len(data.clients)} clients of its own, but federation.clients "
                f"is {clients}"
            )
        return data.clients
    if users is None:
        raise ConfigError(
            f"'natural' needs a set with clients or users of its own: {data.name!r} has none; name "
            "the owner of each example (users=), or divide by another scheme, such as 'iid'"
        )
    return partition(_labels(data, "natural"), clients, "natural", seed=seed, users=users, **values)
