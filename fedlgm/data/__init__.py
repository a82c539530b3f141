"""Data sets and their division among clients.

data = load("fashion-mnist")
clients = partition(data.train_y, 500, "dirichlet", alpha=0.1, seed=7)
x = data.train_x[clients[3]]
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from fedlgm.data.bundled import digits, synthetic
from fedlgm.data.dataset import DataSet
from fedlgm.data.partition import Partition, partition, schemes
from fedlgm.data.partition import options as scheme_options
from fedlgm.data.sources import FILE_SETS, locate, read
from fedlgm.errors import ConfigError

__all__ = ["DataSet", "Partition", "load", "names", "partition", "scheme_options", "schemes", "synthetic"]

_synthetic = cache(synthetic)


def names() -> tuple[str, ...]:
    """Names that `load` knows."""
    return ("digits", *FILE_SETS, "synthetic")


def load(name: str, data_dir: str | Path | None = None, *, download: bool = True) -> DataSet:
    """Load a data set; it is held once per process.

    Files are looked for in `data_dir`, then in `$FEDLGM_DATA` (~/.cache/fedlgm when it is not set), then where Debian's
    packages put them; a set that is nowhere is downloaded by torchvision into `$FEDLGM_DATA`. Setting FEDLGM_OFFLINE=1
    forbids downloads.

    Args:
        name: one of `names()`; "synthetic-N" is synthetic data with N training samples.
        data_dir: directory of the files: bare, in a folder of the set's name, or in torchvision's (LEAF's) layout.
        download: whether to download a missing set.

    Returns:
        The set. Pixels lie in [-1, 1] (grey: from background to ink), scaled by constants that do not depend on the
        data and so cost no privacy; synthetic data are not bounded.

    Raises:
        ConfigError: if the name is unknown.
        DataError: if the files are missing (the message says where to put them) or damaged (it names the file).
    """
    if name == "digits":
        return digits()
    if name in FILE_SETS:
        return read(name, locate(name, data_dir, download=download))
    size = re.fullmatch(r"synthetic(?:-(\d+))?", name)
    if size is None:
        raise ConfigError(f"unknown data set {name!r}; known: {', '.join(names())} (or synthetic-N with N samples)")
    return _synthetic(int(size[1])) if size[1] else _synthetic()
