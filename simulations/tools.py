"""Functions and commands of packages that are built on runs. Entry points name them, and no import
does.

The group `fedlgm.tools` holds functions and classes by name, and `fedlgm.commands` holds functions
that add commands to a typer application. Any package may state such entry points.

>>> from simulations import tools
>>> tools.difference([0.9, 0.8, 0.9], [0.7, 0.8, 0.6]).mean > 0
True
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import typer

from fedlgm.errors import ConfigError

_TOOLS, _COMMANDS = "fedlgm.tools", "fedlgm.commands"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    for point in entry_points(group=_TOOLS, name=name):
        return point.load()
    raise ConfigError(
        f"no installed package has {name!r}: install fedlgm again (pip install fedlgm)"
    )


def add_commands(app: typer.Typer) -> None:
    """Add the commands of all installed packages to an application.

    Args:
        app: the application.
    """
    for point in sorted(entry_points(group=_COMMANDS), key=lambda point: point.name):
        point.load()(app)
