"""Types for annotations, from libraries that are optional or load slowly: no module loads a library
only to name its types.

`torch` is loaded when it is first used. Processes that only read plans, such as a deployment's
signer, would otherwise use half a gigabyte of memory for nothing. Except for type checkers,
`Tensor` is only a placeholder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from datasets import Dataset as Dataset
    from flwr_datasets.partitioner import Partitioner as Partitioner
    from matplotlib.figure import Figure as Figure
    from pandas import DataFrame as DataFrame
    from pandas import Series as Series
    from rich.console import Group as Group
    from rich.table import Table as Table
    from torch import Tensor as Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
    Tensor = Any
