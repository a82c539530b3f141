"""A cache on disk for results that take seconds to compute. The key of a result covers everything
that determines the result.

The folder of the cache is `$FEDLGM_CACHE`, or ~/.cache/fedlgm/computed if this variable is not set;
if the variable is "0", nothing is cached. Only their owner can read the cached files. A cached file
saves time but proves nothing: the content must be checked like any untrusted input. Damaged files,
and folders that cannot be written to, are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedlgm.files import write_durably

_MOST = 256  # largest number of files for one kind of computation


def folder() -> Path | None:
    """Return the folder of the cached results; None if results are not cached."""
    stated = os.environ.get("FEDLGM_CACHE", "")
    if stated == "0":
        return None
    return Path(stated) if stated else Path.home() / ".cache" / "fedlgm" / "computed"


@cache
def code_of(*files: Path) -> str:
    """Compute a digest of source files, for use in the key of a result."""
    return hashlib.sha256(
        b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))
    ).hexdigest()


@cache
def version_of(package: str) -> str:
    """Return the version of the package that `import` finds, or "" if the package is not installed.

    The metadata in the folder of the imported package are read first, because another installation
    on the path may have metadata of the same name. Nightly builds may be named `PACKAGE-nightly`.

    Example:
        >>> version_of("numpy").count(".") >= 2, version_of("no-such-package")
        (True, '')
    """
    spec = find_spec(package.replace("-", "_"))
    beside = [] if spec is None or spec.origin is None else [str(Path(spec.origin).parent.parent)]
    for path in (beside, sys.path):
        for name in (package, f"{package}-nightly"):
            for distribution in metadata.distributions(name=name, path=path):
                return distribution.version
    return ""


def load(kind: str, inputs: Mapping[str, Any]) -> bytes | None:
    """Return the result that is cached for exactly these inputs; None if there is no such result or
    its file is damaged.

    Args:
        kind: name of the computation.
        inputs: everything that determines the result, as JSON values.

    Example:
        >>> load("an example", {"x": 1}) is None
        True
    """
    place = _place(kind, inputs)
    with suppress(OSError, ValueError):
        if place is not None:
            digest, content = place.read_bytes().split(b"\n", 1)
            if digest == hashlib.sha256(content).hexdigest().encode():
                return content
    return None


def save(kind: str, inputs: Mapping[str, Any], content: bytes) -> None:
    """Cache a result, and delete the oldest results of the same kind if there are too many. `kind`
    and `inputs` are those of `load`, and `content` is the result.
    """
    place = _place(kind, inputs)
    if place is None:
        return
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(
            place, hashlib.sha256(content).hexdigest().encode() + b"\n" + content, shared=True
        )
        for old in sorted(place.parent.glob("*.kept"), key=lambda file: file.stat().st_mtime)[
            :-_MOST
        ]:
            old.unlink(missing_ok=True)


def _place(kind: str, inputs: Mapping[str, Any]) -> Path | None:
    root = folder()
    text = json.dumps(inputs, sort_keys=True)
    return (
        None
        if root is None
        else root / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.kept"
    )
