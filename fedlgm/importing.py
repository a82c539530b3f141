"""Faster imports of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import without searches for garbage. These searches take a seventh of the time of PyTorch's
    import.

    This is only for the library's own processes, before they read data, because objects that exist
    at the end are never searched later.

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
