"""Partition schemes of `flwr-datasets`. They get only the columns by which they divide.

The functions `iid` and `dirichlet` map (labels [n], clients, ring) to the number of the client that
gets each sample, its owner (int64 [n], with -1 for no client). `flwr-datasets` is imported on the
first call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

from fedlgm import libraries
from fedlgm.checks import check_positive
from fedlgm.data.partitioners import partitioners
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import load_object, parameters_of, users_code
from fedlgm.noise.keys import KeyRing, Purpose

_ROWS, _SEED = 0, 1  # numbers of this module's streams below Purpose.PARTITION


def iid(labels: np.ndarray, clients: int, ring: KeyRing) -> np.ndarray:
    """Divide samples at random among clients, whose sizes differ by at most one (`IidPartitioner`).
    Each client gets at least one sample.

    Raises:
        ConfigError: there are more clients than samples.
    """
    if clients > len(labels):
        raise ConfigError(
            f"partition scheme 'iid' cannot divide {len(labels)} samples among {clients} clients: "
            "use at most one client per sample, or the scheme 'dirichlet-large' with a large alpha"
        )
    return _owners(partitioners().IidPartitioner(clients), labels, ring)


def dirichlet(labels: np.ndarray, clients: int, ring: KeyRing, *, alpha: float) -> np.ndarray:
    """Divide the samples of each class among the clients in proportions p ~ Dirichlet(alpha, ...,
    alpha) (`DirichletPartitioner`).

    Args:
        labels: labels, int [n].
        clients: number of clients, at most n; some may stay empty.
        ring: source of randomness.
        alpha: concentration, > 0. The smaller it is, the fewer clients share a class.

    Returns:
        The number of the client that gets each sample, int64 [n].

    Raises:
        ConfigError: if an option is out of range or there are too many clients.
    """
    check_positive(alpha=alpha)
    partitioner = partitioners().DirichletPartitioner(
        clients,
        "label",
        float(alpha),
        min_partition_size=0,
        self_balancing=False,
        shuffle=False,
        seed=_seed(ring),
    )
    try:
        return _owners(partitioner, labels, ring)
    except ValueError as error:
        raise ConfigError(
            f"partition scheme 'dirichlet' cannot divide {len(labels)} samples among {clients} "
            "clients: set a smaller federation.clients (at most one per sample), or use the "
            "scheme 'dirichlet-large', which takes any number"
        ) from error


def _seed(ring: KeyRing) -> int:
    low, high = ring.words(2, Purpose.PARTITION, _SEED, 0)
    return int(low) | int(high) << 32


def _owners(partitioner: libraries.Partitioner, labels: np.ndarray, ring: KeyRing) -> np.ndarray:
    """Run `partitioner` on shuffled rows, as `FederatedDataset` does. Return the owner of each
    sample.
    """
    from fedlgm.data.rows import LabelledRows

    rows = ring.numpy_generator(Purpose.PARTITION, _ROWS).permutation(len(labels))
    partitioner.dataset = LabelledRows.of(labels[rows], rows)
    return _read_back(partitioner, len(labels), lambda part: part)


def _read_back(
    partitioner: libraries.Partitioner, count: int, rows: Callable[[Any], Any]
) -> np.ndarray:
    """Return the owner of each of `count` samples, -1 for no client. The function `rows` returns
    the indices of the samples in a partition.
    """
    owner = np.full(count, -1, dtype=np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as notes about retries and unused classes
        for client in range(partitioner.num_partitions):
            owner[rows(partitioner.load_partition(client))] = client
    return owner


def is_partitioner_name(scheme: str) -> bool:
    """Whether a scheme's name has the form of a class name of `flwr_datasets.partitioner`."""
    return scheme.isidentifier() and scheme.endswith("Partitioner")


def find(scheme: str) -> Any:
    """Import the class of `flwr_datasets.partitioner` with the given name, or the object to which
    "package.module:name" refers.

    Raises:
        ConfigError: there is no such class or object.
    """
    if is_partitioner_name(scheme):
        partitioners()
    reference = f"flwr_datasets.partitioner:{scheme}" if is_partitioner_name(scheme) else scheme
    return load_object(reference, "partition scheme")


def partitioner_options(found: Any) -> dict[str, bool]:
    """Return the names of those arguments of a partitioner or of a user's function that a run does
    not supply, and for each name whether the argument is required.
    """
    if not callable(found):
        return {}
    parameters = parameters_of(found).values()
    skipped = {"num_partitions", "seed", "data", "clients"}
    plain = [
        p
        for p in parameters
        if p.name not in skipped and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return {p.name: p.default is p.empty and p.name != "partition_by" for p in plain}


def by_partitioner(
    found: Any, columns: dict[str, np.ndarray], clients: int, ring: KeyRing, values: dict[str, Any]
) -> np.ndarray:
    """Run any partitioner of `flwr-datasets`.

    Args:
        found: a `Partitioner`, which is copied and not changed, or its class.
        columns: columns to divide by: "label" [n], and "user" [n] if the data have users.
        clients: number of clients that the partitioner must return.
        ring: source of randomness for the order of the rows and, if the class has an argument
            `seed`, for this argument.
        values: options for a class. If the class has the arguments `num_partitions`, `partition_by`
            ("label") and `seed`, they are added.

    Returns:
        The number of the client that gets each sample, int64 [n].

    Raises:
        ConfigError: the partitioner refuses its options or the data, or returns the wrong number of
            clients.
    """
    from datasets import Dataset

    name = found.__name__ if isinstance(found, type) else type(found).__name__
    count = len(columns["label"])
    rows = ring.numpy_generator(Purpose.PARTITION, _ROWS).permutation(count)
    given = f"{count} samples (columns {', '.join(columns)}) among {clients} clients"
    with users_code(f"partition scheme {name!r} cannot divide {given}", found):
        partitioner = (
            found(**_fill_options(found, clients, ring, values))
            if isinstance(found, type)
            else deepcopy(found)
        )
        partitioner.dataset = Dataset.from_dict(
            {**{key: c[rows] for key, c in columns.items()}, "row": rows}
        )
        partitions = int(partitioner.num_partitions)
        if partitions != clients:
            raise ConfigError(
                f"partition scheme {name!r} makes {partitions} clients, but federation.clients is "
                f"{clients}"
            )
        return _read_back(partitioner, count, lambda part: np.asarray(part["row"], dtype=np.int64))


def _fill_options(
    kind: type, clients: int, ring: KeyRing, values: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of a class, completed with those arguments that a run supplies."""
    parameters = parameters_of(kind)
    defaults = {"num_partitions": clients, "partition_by": "label", "seed": _seed(ring)}
    # A DistributionPartitioner needs tables as arrays, but TOML has only lists of lists.
    given = {
        key: np.asarray(value)
        if isinstance(value, list) and value and isinstance(value[0], list)
        else value
        for key, value in values.items()
    }
    return {key: value for key, value in defaults.items() if key in parameters} | given
