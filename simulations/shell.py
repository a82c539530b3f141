"""Common parts of the commands: arguments, and printing a result as a table or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core
from click import Command, Context, UsageError
from rich.console import Console, RenderableType

from fedlgm.files import path_of
from fedlgm.wording import alternatives

Found = TypeVar("Found")


def expand_home(path: Path) -> Path:
    """A path of the command line. In it "~" means the user's home, even if no shell has replaced
    it.

    Example:
        >>> expand_home(Path("runs/first")).as_posix()
        'runs/first'
    """
    return path_of("DIR", path)


def bundled_recipes(incomplete: str) -> list[str]:
    """Names of the bundled recipes that begin like this, for the completion of a shell.

    Example:
        >>> bundled_recipes("dig")
        ['digits']
    """
    return [file.stem for file in Path(__file__).parent.glob(f"recipes/{incomplete}*.toml")]


RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        help="Bundled recipe or TOML file; default `digits`.", autocompletion=bundled_recipes
    ),
]
NamedRecipeArgument = Annotated[str, typer.Argument(help="Bundled recipe or TOML file.")]
NewFolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder to create.", callback=expand_home)
]
RunArgument = Annotated[Path, typer.Argument(help="Run folder.")]
TestSeedOption = Annotated[
    int | None,
    typer.Option(help="FOR TESTS: anyone who knows the seed can subtract the noise. NOT PRIVATE."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change the recipe: section.key=value; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]

console = Console(emoji=False)

_MEANT = {
    "run": "simulate",
    "train": "simulate",
    "help": "--help",
    "version": "--version",
    "stop": "down",
    "start": "up",
    "resume": "simulate --resume",
}
_LISTED = (
    "mechanisms",
    "recipes",
    "studies",
    "models",
    "trackers",
    "data",
    "datasets",
    "data-sets",
    "list",
)
"""Words that a reader may try as commands, although `fedlgm doctor` lists what they name."""


class Commands(typer.core.TyperGroup):
    """Commands that answer an unknown name with similar names, or with the command that lists the
    known names.
    """

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        """Name, command and arguments of a command line.

        Raises:
            UsageError: there is no such command; the message names the nearest.
        """
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            lists = "`fedlgm doctor` lists recipes, mechanisms, models and data sets, `fedlgm study --list` the studies"
            hint = f"{lists}." if name in _LISTED else alternatives(name, self.list_commands(ctx))
            meant = _MEANT.get(name, "")
            if meant.partition(" ")[0] in self.list_commands(ctx) or (
                meant.startswith("-") and ctx.parent is None
            ):
                hint = f"use {meant}."
            raise UsageError(f"No such command {name!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)


def show(found: Found, table: Callable[[Found], RenderableType], as_json: bool) -> None:
    """Print a result on standard output.

    Args:
        found: the result, as JSON has it.
        table: function that draws the result for a reader.
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
