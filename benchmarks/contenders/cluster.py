"""Several Ray nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_core_nodes(count: int) -> Iterator[str]:
    """A cluster of nodes with one core each; yields its address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()
