"""Types of libraries that are optional or load slowly, for annotations alone: no module loads a
library to name its type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset as Dataset
    from flwr_datasets.partitioner import Partitioner as Partitioner
    from matplotlib.figure import Figure as Figure
    from pandas import DataFrame as DataFrame
    from pandas import Series as Series
    from rich.console import Group as Group
    from rich.table import Table as Table
