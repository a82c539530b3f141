"""Division of a data set among clients, by scheme name.

Schemes of `flwr-datasets` run on its own partitioners; the others are in `assignment`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlgm.data import assignment, flower
from fedlgm.errors import ConfigError, DataError, alternatives
from fedlgm.extension import is_reference
from fedlgm.keys import KeyRing


@dataclass(frozen=True)
class Partition:
    """Samples of each client in compressed rows: client i holds `order[offsets[i]:offsets[i + 1]]`, ascending.

    Attributes:
        order: sample indices, int32 [assigned]; no index occurs twice.
        offsets: int64 [clients + 1], from 0 to `len(order)`.
    """

    order: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_owner(cls, owner: np.ndarray, clients: int) -> Partition:
        """Partition in which sample s belongs to client `owner[s]` (int [n], -1: to nobody)."""
        order = np.argsort(owner, kind="stable").astype(np.int32)
        counts = np.bincount(owner[owner >= 0], minlength=clients)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return cls(order[len(owner) - offsets[-1] :], offsets)

    @classmethod
    def from_clients(cls, clients: Sequence[Any], samples: int) -> Partition:
        """Partition in which client i holds the samples `clients[i]`, integers in [0, samples).

        Raises:
            DataError: no clients, or indices that are no integers, out of range or given twice.
        """
        owner = np.full(samples, -1, dtype=np.int64)
        if len(clients) == 0:
            raise DataError("clients: there must be at least one")
        for client, indices in enumerate(clients):
            index = np.asarray(indices)
            if index.size == 0:
                continue
            if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
                raise DataError(f"clients[{client}] must be a list of sample numbers, got {index.dtype} {index.shape}")
            if index.min() < 0 or index.max() >= samples:
                raise DataError(f"clients[{client}] names samples outside [0, {samples})")
            counts = np.bincount(index, minlength=samples)
            taken = np.flatnonzero((counts > 1) | ((counts > 0) & (owner >= 0)))
            if len(taken):
                raise DataError(f"clients[{client}] names sample {taken[0]}, which is taken: a sample has one owner")
            owner[index] = client
        return cls.from_owner(owner, len(clients))

    def __len__(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        """Sample indices of one client, 0 <= client < len(self) (a view)."""
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} is not in [0, {len(self)})")
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Sample indices of each client in turn."""
        return (self[client] for client in range(len(self)))

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client, int64 [clients]."""
        return np.diff(self.offsets)

    def label_histogram(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Samples of each client and class, int64 [clients, classes].

        Args:
            labels: labels of the divided set, int [n], in [0, classes).
            classes: number of classes.
        """
        client = np.repeat(np.arange(len(self)), self.sizes)
        cells = np.bincount(client * classes + labels[self.order], minlength=len(self) * classes)
        return cells.reshape(len(self), classes)


_SCHEMES: dict[str, Callable[..., np.ndarray]] = {
    "iid": flower.iid,
    "dirichlet": flower.dirichlet,
    "pathological": flower.pathological,
    "shard": flower.shard,
    **assignment.SCHEMES,
}


def schemes() -> tuple[str, ...]:
    """Names of the schemes of `partition`."""
    return tuple(_SCHEMES)


def options(scheme: str) -> dict[str, bool]:
    """Options of a scheme, each with whether it must be given.

    For a partitioner of `flwr-datasets` or of a user's own these are the arguments that a run does not fill in itself.

    Raises:
        ConfigError: for an unknown scheme, or one that cannot be imported.
    """
    if is_reference(scheme) or flower.is_partitioner_name(scheme):
        return flower.partitioner_options(flower.find(scheme))
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"unknown partition scheme {scheme!r}; "
            + alternatives(
                scheme,
                _SCHEMES,
                "a class of flwr-datasets such as ExponentialPartitioner",
                "your own as package.module:name",
            )
        )
    parameters = inspect.signature(_SCHEMES[scheme]).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def partition(labels: np.ndarray, clients: int, scheme: str, *, seed: int = 0, **values: Any) -> Partition:
    """Divide samples among clients.

    The result depends on the arguments only, never on a global random generator. No sample goes to two clients; clients
    may be empty.

    Args:
        labels: class of each sample, int [n], not negative.
        clients: number of clients, at least 1.
        scheme: one of `schemes()`; their functions in `flower` and `assignment` describe them and their options.
        seed: public seed, 0 <= seed < 2**128.
        **values: options of the scheme.

    Returns:
        The partition.

    Raises:
        ConfigError: for an unknown scheme or option, a value out of range, or a demand that the data cannot meet.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or not len(labels) or not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise ConfigError(f"labels must be integers >= 0 of shape [n], n > 0; got {labels.dtype} {labels.shape}")
    assignment.require_count("clients", clients)
    known = options(scheme)
    missing = [name for name, needed in known.items() if needed and name not in values]
    unknown = [name for name in values if name not in known]
    if missing or unknown:
        problem = f"unknown option {unknown[0]!r}" if unknown else f"option {missing[0]!r} is missing"
        raise ConfigError(f"partition scheme {scheme!r}: {problem}; its options: {', '.join(known) or 'none'}")
    owner = _SCHEMES[scheme](labels, clients, KeyRing.from_seed(seed), **values)
    return Partition.from_owner(owner, clients)
