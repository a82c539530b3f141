"""Several Ray nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_core_nodes(count: int, store: int | None = None) -> Iterator[str]:
    """Start a cluster of nodes with one core each, and yield its address.

    Args:
        count: number of nodes.
        store: size of each node's object store in MB; with None, Ray chooses it.
    """
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1} if store is None else {"num_cpus": 1, "object_store_memory": store << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()
