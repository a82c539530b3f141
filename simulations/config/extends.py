"""Recipes and studies are TOML files that may extend another file with the key `extends`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlgm.errors import ConfigError
from fedlgm.files import read_toml

_MOST = 9


def chain(
    path: Path, locate: Callable[[Path, str], Path], kind: str
) -> list[tuple[Path, dict[str, Any]]]:
    """All files that a file extends, directly or through other files, and then the file itself.
    Each file comes with its values.

    Args:
        path: the file.
        locate: function that returns the path of what a file names as `extends`.
        kind: plural noun for the files, for messages.

    Raises:
        ConfigError: a file is extended too deeply, or is not TOML.
    """
    files: list[tuple[Path, dict[str, Any]]] = []
    while True:
        if len(files) == _MOST:
            raise ConfigError(
                f"{path}: `extends` goes deeper than {_MOST - 1} {kind}; does one extend itself?"
            )
        raw = read_toml(path)
        base = raw.pop("extends", None)
        files.insert(0, (path, raw))
        if base is None:
            return files
        path = locate(path, str(base))
