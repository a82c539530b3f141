"""Common parts of the commands: arguments, and printing a result as a table or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType

Found = TypeVar("Found")

RecipeArgument = Annotated[str | None, typer.Argument(help="Bundled recipe or TOML file; default `digits`.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

console = Console(emoji=False)


def show(found: Found, table: Callable[[Found], RenderableType], as_json: bool) -> None:
    """Print a result on standard output.

    Args:
        found: the result, as JSON has it.
        table: draws it for a reader.
        as_json: print it as one JSON object instead.
    """
    if as_json:
        print_json(found)
    else:
        console.print(table(found))


def print_json(value: Any) -> None:
    """Print one JSON object; infinity and NaN are strings."""
    from simulations.runs import strict_json

    sys.stdout.write(strict_json.dumps(value) + "\n")
