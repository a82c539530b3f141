"""What fedlgm uses and replaces of Flower's private modules, which may change with any version."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from types import ModuleType

FLOWER = "1.41."
SOON_S = 0.1


def unsupported(instead: str) -> str:
    """Why the Flower that is installed cannot be used; empty if it can.

    Args:
        instead: what to do then, the end of a sentence.
    """
    found = version("flwr")
    if found.startswith(FLOWER):
        return ""
    return f"flwr {found} is installed; this uses private modules of {FLOWER}*: {instead}"


def look_again_soon(module: ModuleType) -> None:
    """Let `module` wait a tenth of a second, not a whole one, for parts of a message that is announced before them.

    Where a version has no such name any longer, nothing changes.
    """
    names = vars(module)
    if "pull_objects" in names:
        names["pull_objects"] = partial(names["pull_objects"], initial_backoff=SOON_S)
