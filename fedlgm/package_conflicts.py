"""Checks at import that refuse Windows, and folders that shadow this library's packages."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("fedlgm", "clients", "strategies", "simulations", "fedlgm_nodes", "fedlgm_lab")
"""This library's top-level packages."""


def refuse_shadowed_packages() -> None:
    """Refuse to continue if a user's folder or module shadows one of this library's packages.

    Python looks for `clients`, `strategies` and `simulations` in the current folder first, and a
    project may have folders of these names there.

    Raises:
        ImportError: the message names the folder and the remedy.

    Example:
        >>> refuse_shadowed_packages()
    """
    here = Path(__file__).resolve().parents[1]
    for name in PACKAGES[1:4]:
        spec = find_spec(name)
        origin = Path(spec.origin) if spec and spec.origin else None
        if origin and origin.resolve().parents[1] != here:
            raise ImportError(
                f"{origin} hides fedlgm's package {name!r}, which Python therefore cannot import: "
                "rename it, or start Python in another folder"
            )


def refuse_windows() -> None:
    """Refuse Windows, because its Python has no `fcntl`, with which ledgers are locked.

    Raises:
        ImportError: the operating system is Windows.
    """
    if sys.platform == "win32":
        raise ImportError(
            "fedlgm's simulations and ledgers need Linux or macOS, because ledgers use their file "
            "locks: on Windows, use WSL (wsl --install), and install fedlgm there"
        )
