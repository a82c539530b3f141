"""JSON for every reader, in which infinity and NaN are strings.

An epsilon is infinite if a release is not private, and a loss is NaN if a model has diverged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlgm.files import PUBLIC, write_durably

_NUMBERS = {text: float(text) for text in ("inf", "-inf", "nan")}


def dumps(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON."""
    return json.dumps(_map_leaves(value, _plain), indent=indent, allow_nan=False)


def write(path: Path, value: Any, mode: int = PUBLIC, indent: int | None = 2) -> None:
    """Write `value` to a file, complete or not at all."""
    write_durably(path, (dumps(value, indent) + "\n").encode(), mode)


def loads(text: str) -> Any:
    """Inverse of `dumps`; also reads the bare Infinity and NaN that earlier versions wrote.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return _map_leaves(json.loads(text), _number)
    except RecursionError as error:
        raise ValueError("lists or mappings are nested too deeply") from error


def _map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same lists and mappings with other leaves."""
    if isinstance(value, dict):
        return {key: _map_leaves(item, leaf) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_leaves(item, leaf) for item in value]
    return leaf(value)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return _NUMBERS.get(value, value) if isinstance(value, str) else value
