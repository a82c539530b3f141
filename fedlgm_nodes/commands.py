"""The commands that this package adds to the program `fedlgm`."""

from __future__ import annotations

import typer

from fedlgm_nodes.deploy import deployment_commands as commands
from fedlgm_nodes.deploy import node_commands, record_commands

_PANEL = "Real nodes"


def add_commands(app: typer.Typer) -> None:
    """Add `fedlgm node` and `fedlgm deploy` to an application."""
    record_commands.add_commands(node_commands.app)
    app.add_typer(node_commands.app, name="node", rich_help_panel=_PANEL)
    app.add_typer(commands.app, name="deploy", rich_help_panel=_PANEL)
