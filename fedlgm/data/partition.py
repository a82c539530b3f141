"""Division of samples among clients by named schemes.

The schemes "iid" and "dirichlet" use the partitioners of `flwr-datasets`; the other bundled schemes
are in `assignment`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm import cache as remembered
from fedlgm.checks import check_count
from fedlgm.data import assignment
from fedlgm.data import flower_datasets as flower
from fedlgm.errors import ConfigError, DataError
from fedlgm.extension.loader import is_reference
from fedlgm.extension.registry import Registry
from fedlgm.noise import keys
from fedlgm.noise.keys import KeyRing


@dataclass(frozen=True)
class Partition:
    """A division of samples among clients. Client i holds the samples `order[offsets[i]:offsets[i +
    1]]`, in ascending order.

    Attributes:
        order: sample indices, int32 [assigned]; no index occurs twice.
        offsets: int64 [clients + 1], from 0 to `len(order)`.

    Example:
        >>> clients = Partition.from_owner(np.array([1, 0, 1, -1]), clients=2)
        >>> clients[1].tolist(), clients.sizes.tolist()
        ([0, 2], [1, 2])
        >>> clients.label_histogram(np.array([5, 3, 3, 0]), classes=6)[1].tolist()
        [0, 0, 0, 1, 0, 1]
    """

    order: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_owner(cls, owner: np.ndarray, clients: int) -> Partition:
        """Make the partition in which sample s belongs to client `owner[s]` (int [n]; -1 means no
        client).
        """
        order = np.argsort(owner, kind="stable").astype(np.int32)
        counts = np.bincount(owner[owner >= 0], minlength=clients)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return cls(order[len(owner) - offsets[-1] :], offsets)

    @classmethod
    def from_clients(cls, clients: Sequence[Any], samples: int) -> Partition:
        """Make the partition in which client i holds the samples `clients[i]`, integers in [0,
        samples).

        Raises:
            DataError: there are no clients or no samples, or an index is not an integer, is out of
                range or occurs twice.
        """
        if isinstance(clients, Mapping) or not hasattr(clients, "__len__"):
            raise DataError(
                "clients: give a list of sample numbers for each client, not a "
                f"{type(clients).__name__}"
            )
        if len(clients) == 0:
            raise DataError("clients: there must be at least one")
        parts = [np.asarray(indices) for indices in clients]
        for client, (given, index) in enumerate(zip(clients, parts, strict=True)):
            if index.size and (index.ndim != 1 or not np.issubdtype(index.dtype, np.integer)):
                kind = (
                    f"{index.dtype} {index.shape}"
                    if index.dtype != object
                    else type(given).__name__
                )
                raise DataError(f"clients[{client}] must be a list of sample numbers, got {kind}")
        holder = np.repeat(np.arange(len(parts)), [index.size for index in parts])
        if len(holder) == 0:
            raise DataError("clients: none of them has an example")
        named = np.concatenate([index for index in parts if index.size])
        outside = np.flatnonzero((named < 0) | (named >= samples))
        if len(outside):
            raise DataError(f"clients[{holder[outside[0]]}] names samples outside [0, {samples})")
        again = np.delete(np.arange(len(named)), np.unique(named, return_index=True)[1])
        if len(again):
            raise DataError(
                f"clients[{holder[again[0]]}] names sample {named[again[0]]}, which is named before: "
                "name each sample once, for one client"
            )
        owner = np.full(samples, -1, dtype=np.int64)
        owner[named] = holder
        return cls.from_owner(owner, len(clients))

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        """Return the sample indices of a client, 0 <= client < len(self), as a view."""
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} is not in [0, {len(self)})")
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the sample indices of each client in turn."""
        return (self[client] for client in range(len(self)))

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client, int64 [clients]."""
        return np.diff(self.offsets)

    def owners(self, samples: int) -> np.ndarray:
        """Return the client of each sample, int32 [samples], with -1 for no client."""
        owner = np.full(samples, -1, dtype=np.int32)
        owner[self.order] = np.repeat(np.arange(len(self)), self.sizes)
        return owner

    def label_histogram(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the samples of each client in each class, int64 [clients, classes].

        Args:
            labels: labels of the divided set, int [n], in [0, classes).
            classes: number of classes.
        """
        client = np.repeat(np.arange(len(self)), self.sizes)
        cells = np.bincount(client * classes + labels[self.order], minlength=len(self) * classes)
        return cells.reshape(len(self), classes)


_OF_FLOWER = ("iid", "dirichlet")
"""Schemes whose results are cached on disk, because importing `flwr-datasets` takes a second."""
_SCHEMES: Registry[Callable[..., np.ndarray]] = Registry(
    "partition scheme",
    {"iid": flower.iid, "dirichlet": flower.dirichlet, **assignment.SCHEMES},
    "a class of flwr-datasets such as ExponentialPartitioner",
)


def schemes() -> tuple[str, ...]:
    """List the names of the schemes that `partition` knows.

    Example:
        >>> {"iid", "dirichlet", "natural"} <= set(schemes())
        True
    """
    return _SCHEMES.names()


def options(scheme: str) -> dict[str, bool]:
    """Return the names of a scheme's options, and for each name whether the option is required.

    The options of a partitioner of `flwr-datasets`, or of a user's function, are those of its
    arguments that a run does not supply.

    Raises:
        ConfigError: the scheme is unknown or cannot be imported.

    Example:
        >>> options("dirichlet")["alpha"], options("iid")  # alpha must be given
        (True, {})
    """
    if is_reference(scheme) or flower.is_partitioner_name(scheme):
        return flower.partitioner_options(flower.find(scheme))
    parameters = inspect.signature(_SCHEMES.find(scheme)).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def partition(
    labels: np.ndarray, clients: int, scheme: str, *, seed: int = 0, **values: Any
) -> Partition:
    """Divide samples among clients.

    The result depends only on the arguments, never on a global random generator. No sample belongs
    to two clients, and a client may have no samples.

    Args:
        labels: class of each sample, int [n], not negative.
        clients: number of clients, at least 1.
        scheme: one of `schemes()`. The functions in `flower_datasets` and `assignment` describe the
            schemes and their options.
        seed: public seed, 0 <= seed < 2**128.
        **values: options of the scheme.

    Returns:
        The partition.

    Raises:
        ConfigError: the scheme or an option is unknown, a value is out of range, or the data do not
            meet a requirement of the scheme.

    Example:
        >>> clients = partition(np.arange(100) % 10, 5, "iid", seed=1)
        >>> clients.sizes.tolist(), len(set(clients.order.tolist()))
        ([20, 20, 20, 20, 20], 100)
    """
    labels = np.asarray(labels)
    if (
        labels.ndim != 1
        or not len(labels)
        or not np.issubdtype(labels.dtype, np.integer)
        or labels.min() < 0
    ):
        raise ConfigError(
            f"labels must be integers >= 0 of shape [n], n > 0; got {labels.dtype} {labels.shape}"
        )
    clients = check_count("clients", clients)
    parameters = options(scheme)
    missing = [name for name, needed in parameters.items() if needed and name not in values]
    unknown = [name for name in values if name not in parameters]
    if missing or unknown:
        problem = (
            f"unknown option {unknown[0]!r}" if unknown else f"option {missing[0]!r} is missing"
        )
        raise ConfigError(
            f"partition scheme {scheme!r}: {problem}; its options: {', '.join(parameters) or 'none'}"
        )
    inputs = None
    if scheme in _OF_FLOWER:
        inputs = {
            "request": [scheme, clients, seed, repr(sorted(values.items()))],
            "labels": hashlib.sha256(labels.astype(np.int64).tobytes()).hexdigest(),
            "code": remembered.code_of(*Path(__file__).parent.glob("*.py"), Path(keys.__file__)),
            "versions": [
                remembered.version_of(package) for package in ("flwr-datasets", "datasets", "numpy")
            ],
        }
        cached = _restore(remembered.load("division", inputs), len(labels), clients)
        if cached is not None:
            return cached
    division = Partition.from_owner(
        _SCHEMES.find(scheme)(labels, clients, KeyRing.from_seed(seed), **values), clients
    )
    if inputs is not None:
        remembered.save("division", inputs, division.owners(len(labels)).tobytes())
    return division


def _restore(content: bytes | None, samples: int, clients: int) -> Partition | None:
    """Convert the cached owners of the samples to a partition. Return None if nothing is cached or
    the owners are invalid.
    """
    if content is None or len(content) != 4 * samples:
        return None
    owner = np.frombuffer(content, dtype=np.int32).astype(np.int64)
    if len(owner) and (owner.min() < -1 or owner.max() >= clients):
        return None
    return Partition.from_owner(owner, clients)
