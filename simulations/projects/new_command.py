"""`fedlgm new`: a small private project that runs at once."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from simulations.shell import JsonOption, NewFolderArgument, console, print_json

_UNITS = {
    "client": "a whole client, with all its examples",
    "example": "one example, such as one row of a table",
}
_TRUSTS = {"central": "a trusted server", "local": "each client, before it sends anything"}


def new(
    kind: Annotated[
        str,
        typer.Argument(help="Kind of project: pytorch, hugging-face, flower, hospitals or opacus."),
    ],
    folder: NewFolderArgument,
    unit: Annotated[str | None, typer.Option(help="Unit of protection: client or example.")] = None,
    trust: Annotated[
        str | None, typer.Option(help="Who adds the noise: central (a server) or local (clients).")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget of a run; default 8.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a small private project that runs at once: README, code with example data, and a test.

    On a terminal it asks for what is not given: what is protected, who adds the noise, and epsilon.
    """
    from simulations.projects import new as projects

    offered = projects.kind_of(kind).protections
    projects.refuse_used(folder)  # before anything is asked
    if sys.stdin.isatty() and not as_json:
        if unit is None:
            units = list(dict.fromkeys(protection.unit for protection in offered))
            unit = _ask("What must stay hidden?", units, _UNITS)
        if trust is None:
            trusts = [protection.trust for protection in offered if protection.unit == unit]
            trust = _ask("Who adds the noise?", trusts, _TRUSTS)
        if epsilon is None:
            epsilon = typer.prompt("Epsilon (smaller is stronger)", default=8.0, type=float)
    protection = projects.protection_of(kind, unit, trust)
    epsilon = 8.0 if epsilon is None else epsilon
    files = projects.write(kind, folder, protection, epsilon)
    run = projects.kind_of(kind).run
    if as_json:
        told: dict[str, Any] = {
            "folder": str(folder),
            "files": [file.name for file in files],
            "unit": protection.unit,
            "trust": protection.trust,
            "epsilon": epsilon,
            "run": run,
        }
        print_json(told)
        return
    console.print(
        f"wrote {folder}: {', '.join(file.name for file in files)}\n"
        f"It protects {_UNITS[protection.unit]}; the noise is added by "
        f"{_TRUSTS[protection.trust]}; epsilon {epsilon:g}.\n"
        f"Next: cd {folder} && {run}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _ask(question: str, choices: list[str], meanings: dict[str, str]) -> str:
    """The user's choice. A single choice is printed and taken without a question."""
    from click import Choice

    for choice in choices:
        typer.echo(f"  {choice}: {meanings[choice]}")
    if len(choices) == 1:
        return choices[0]
    answer: str = typer.prompt(question, default=choices[0], type=Choice(choices))
    return answer
