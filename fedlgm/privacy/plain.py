"""Conversion of arguments to Python numbers, which do not overflow or lose precision as smaller
types do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


def plain_number(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number; return any other value unchanged.

    Example:
        >>> plain_number(np.int16(200)) ** 2, plain_number("a")
        (40000, 'a')
    """
    return value.item() if isinstance(value, np.generic) else value


def plain_numbers(function: F) -> F:
    """Let an accounting function compute with Python numbers, whatever types its caller uses.

    In half precision 300 squared is infinite, and in 16-bit integers 200 squared is negative. A
    release with such a noise multiplier would cost nothing, or less than nothing.

    Example:
        >>> plain_numbers(lambda multiplier: multiplier**2)(np.float16(300))
        90000.0
    """

    @wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        named: Mapping[str, Any] = {key: plain_number(value) for key, value in options.items()}
        return function(*map(plain_number, arguments), **named)

    return wrapper  # type: ignore[return-value]
