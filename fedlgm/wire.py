"""Names of the fields in the messages between strategy and clients, and their encoding.

A train message carries the global model, the round's plan and a block of clients. Its reply carries
the sum of the block's bounded contributions and no other information about a client's data.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np

from fedlgm.errors import RunError

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
MODEL = "model"
SUM = "sum"
NORMS = "norms"
NOTE = "note."  # prefix of the figures [clients, K] of `clients.published_client`

# keys of the config record
ROUND = "round"
CLIENTS = "clients"
PLAN = "plan"

# record in a node's own state: fingerprints of the noise keys of its clients' releases under local
# trust
RELEASES = "fedlgm.releases"
# record in a node's own state: root of its keys if it has no seed
SECRET = "fedlgm.secret"

# keys of the metric record
DISCARDED = "discarded"
CLIENT_COUNT = "num-clients"  # number of clients in the block, which is public

# message type of `clients.published_client`
TRAIN_NORMS = "train.norms"

# keys of a node's answer to a query
PARTITION = "partition-id"
PARTITIONS = "num-partitions"
ANY_CLIENT = -1

# number of bytes before the text of a .npy header, version 1; the last two state the text's length
_PREFIX = 10


def fields(values: np.ndarray) -> dict[str, Any]:
    """Make the fields that Flower's `Array(values)` would have, with one copy of the values instead
    of three.
    """
    return {
        "dtype": str(values.dtype),
        "shape": values.shape,
        "stype": "numpy.ndarray",
        "data": npy(values),
    }


def npy(values: np.ndarray) -> bytes:
    """Convert an array to the .npy format, version 1."""
    values = np.asarray(values, order="C")
    return b"".join((_header(values.dtype, values.shape), values.reshape(-1).view(np.uint8).data))


@lru_cache(maxsize=64)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Make the header of a C-ordered array in the .npy format. Headers are cached, because the same
    few headers occur in every round.
    """
    header = BytesIO()
    described = {
        "shape": shape,
        "fortran_order": False,
        "descr": np.lib.format.dtype_to_descr(dtype),
    }
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def view(data: bytes | memoryview) -> np.ndarray:
    """Return the numbers in the data of Flower's `Array`, read-only and without a copy.

    Raises:
        RunError: the data are not exactly one array in the .npy format, version 1.
    """
    try:
        end = _PREFIX + int.from_bytes(memoryview(data)[_PREFIX - 2 : _PREFIX], "little")
        shape, fortran, dtype = _parse_header(bytes(memoryview(data)[:end]))
        return np.frombuffer(data, dtype, offset=end).reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # NumPy's parser raises errors of many types
        raise RunError(f"an array in a message cannot be read: {error}") from error


@lru_cache(maxsize=64)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape, the order and the type in a .npy header. Results are cached, because NumPy
    parses a header as Python source, which is slow.
    """
    head = BytesIO(header)
    np.lib.format.read_magic(head)
    return np.lib.format.read_array_header_1_0(head)


def in_a_simulation(population: int) -> str:
    """The end of a message about too few nodes. It names the option of `flwr run` that sets their
    number, which is two by default.

    >>> in_a_simulation(20)
    '; in a simulation: --federation-config num-supernodes=20, ...'
    """
    return (
        f"; in a simulation: --federation-config num-supernodes={population}, or for the app of a "
        "recipe "
        'nodes="workers" in --run-config'
    )


def printable(text: str, longest: int) -> str:
    """Convert untrusted text to one short line for a log or a terminal, with "?" in place of
    characters that are not printable.

    Example:
        >>> printable("gone" + chr(10) + "round 9: all is well" + chr(27), 30)
        'gone?round 9: all is well?'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text[:longest])
