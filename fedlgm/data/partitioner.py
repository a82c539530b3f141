"""The schemes of `fedlgm.data` for users of Flower Datasets."""

from __future__ import annotations

import warnings
from typing import Any

from datasets import Dataset

with warnings.catch_warnings():  # in a notebook without ipywidgets it warns of bars that nobody shows
    warnings.filterwarnings("ignore", message="IProgress not found")
    from flwr_datasets.partitioner import Partitioner

from fedlgm.data.partition import Partition, partition


class SchemePartitioner(Partitioner):
    """A scheme of `fedlgm.data.partition` with the interface of the partitioners of `flwr_datasets`.

        FederatedDataset(dataset="cifar10", partitioners={"train": SchemePartitioner(100, "label", "hsu", alpha=0.5)})

    Args:
        num_partitions: number of clients.
        partition_by: column of integer labels.
        scheme: one of `fedlgm.data.schemes()`.
        seed: public seed.
        **options: options of the scheme.

    Raises:
        ConfigError: on first use, as `partition` does.
    """

    def __init__(self, num_partitions: int, partition_by: str, scheme: str, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self._num_partitions = num_partitions
        self._partition_by = partition_by
        self._scheme = scheme
        self._seed = seed
        self._options = options
        self._partition: Partition | None = None

    def load_partition(self, partition_id: int) -> Dataset:
        """Samples of one client, a view of the data set."""
        return self.dataset.select(self._divided()[partition_id])

    @property
    def num_partitions(self) -> int:
        """Number of clients."""
        return len(self._divided())

    def _divided(self) -> Partition:
        if self._partition is None:
            labels = self.dataset.with_format("numpy")[:][self._partition_by]
            self._partition = partition(labels, self._num_partitions, self._scheme, seed=self._seed, **self._options)
        return self._partition
