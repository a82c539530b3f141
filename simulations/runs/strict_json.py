"""JSON for every reader, in which infinity and NaN are strings.

An epsilon is infinite if a release is not private, and a loss is NaN if a model has diverged.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fedlgm.files import PUBLIC, write_durably

_NUMBERS = {text: float(text) for text in ("inf", "-inf", "nan")}


def dumps(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def write(path: Path, value: Any, mode: int = PUBLIC, indent: int | None = 2) -> None:
    """Write `value` to a file, complete or not at all."""
    write_durably(path, (dumps(value, indent) + "\n").encode(), mode)


def loads(text: str) -> Any:
    """Inverse of `dumps`; also reads the bare Infinity and NaN that earlier versions wrote.

    Raises:
        ValueError: the text is not JSON.
    """
    return _numbers(json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value
