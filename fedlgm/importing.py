"""Faster imports of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, which would take a seventh of the time that it takes to
    import PyTorch.

    Only the library's own processes use this function, before they read data, because the garbage
    collector never examines the objects that exist at the end of the block.

    Example:
        >>> with importing():
        ...     import torch
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
