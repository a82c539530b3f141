"""Partitioners of Flower Datasets inside ours, and ours among them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import (
    DirichletPartitioner,
    IidPartitioner,
    Partitioner,
    PathologicalPartitioner,
    ShardPartitioner,
)

from fedlgm.data.rows import LabelledRows


@pytest.mark.parametrize(
    "make",
    [
        lambda: IidPartitioner(7),
        lambda: DirichletPartitioner(
            7, "label", 0.4, min_partition_size=0, self_balancing=False, seed=5
        ),
        lambda: PathologicalPartitioner(7, "label", 3, seed=5),
        lambda: ShardPartitioner(7, "label", 2, seed=5),
    ],
)
def test_selections_are_the_rows_that_a_plain_data_set_gives(
    make: Callable[[], Partitioner],
) -> None:
    rng = np.random.default_rng(1)
    labels, rows = rng.integers(0, 10, 1003), rng.permutation(1003)
    light, plain = make(), make()
    light.dataset = LabelledRows.of(labels, rows)
    plain.dataset = Dataset.from_dict({"label": labels, "row": rows})
    for client in range(7):
        assert light.load_partition(client).tolist() == list(plain.load_partition(client)["row"])
