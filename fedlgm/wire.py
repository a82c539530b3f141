"""Names inside the messages between strategy and clients.

A train message carries the global model, the round's plan and a block of clients; its reply carries the sum of the
block's bounded contributions. Nothing else about a client's data leaves it.
"""

from __future__ import annotations

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
NOTE = "note."  # prefix of diagnostics [clients, K] that published variants report

# keys of the config record
ROUND = "round"
CLIENTS = "clients"
PLAN = "plan"

# record in a node's own state: names of the noise keys of its clients' releases under local trust
RELEASES = "fedlgm.releases"
# record in a node's own state: root of its keys where it has no seed
SECRET = "fedlgm.secret"

# keys of the metric record
DISCARDED = "discarded"
CLIENT_COUNT = "num-clients"  # clients in the block, which is public
EXAMPLE_COUNT = "num-examples"  # of evaluation only

# message types: the second is used by published variants that look at private norms
TRAIN_NORMS = "train.norms"

# keys of a node's answer to a query
PARTITION = "partition-id"
PARTITIONS = "num-partitions"
ANY_CLIENT = -1

_HEADER = 1 << 16  # bytes that hold a header of the .npy format, version 1


def fields(values: np.ndarray) -> dict[str, Any]:
    """The fields of Flower's `Array` for `values`: as from `Array(values)`, with one copy instead of three."""
    values = np.asarray(values, order="C")
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    data = b"".join((header.getvalue(), values.reshape(-1).view(np.uint8).data))
    return {"dtype": str(values.dtype), "shape": values.shape, "stype": "numpy.ndarray", "data": data}


def view(data: bytes | memoryview) -> np.ndarray:
    """The numbers in the data of Flower's `Array`, read-only and without a copy.

    Raises:
        RunError: the data are not exactly one array of numbers in the .npy format, version 1.
    """
    head = BytesIO(memoryview(data)[:_HEADER])
    try:
        np.lib.format.read_magic(head)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(head)
        return np.frombuffer(data, dtype, offset=head.tell()).reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # NumPy's parser raises what Python's tokenizer does
        raise RunError(f"an array in a message cannot be read: {error}") from error


def in_a_simulation(population: int) -> str:
    """The end of a message about too few nodes: what `flwr run` takes, whose simulation has two nodes by default.

    >>> in_a_simulation(20)
    '; in a simulation: --federation-config num-supernodes=20, ...'
    """
    return (
        f"; in a simulation: --federation-config num-supernodes={population}, or for the app of a recipe "
        'nodes="workers" in --run-config'
    )
