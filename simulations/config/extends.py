"""TOML files that extend another file by the key `extends`: recipes and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlgm.errors import ConfigError
from fedlgm.files import read_toml


def read(path: Path, depth: int, deepest: int, kind: str) -> dict[str, Any]:
    """Values of a file as written, including its key `extends`.

    Args:
        path: the file.
        depth: number of files that extend it, directly or through others.
        deepest: largest permitted number.
        kind: plural noun for the files, for messages.

    Raises:
        ConfigError: the file is extended too deeply, or is not TOML.
    """
    if depth > deepest:
        raise ConfigError(
            f"{path}: `extends` goes deeper than {deepest} {kind}; does one extend itself?"
        )
    return read_toml(path)
