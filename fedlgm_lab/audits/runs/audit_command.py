"""The command `fedlgm audit`, which shows a table, a picture and JSON, and exits with status 1 if
the audit contradicts the report.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlgm import libraries
from fedlgm_lab import audits
from simulations.progress import progress as bar
from simulations.shell import JsonOption, console, print_json

FAILED = 1
"""Exit status of an audit that contradicts the report."""


def audit(
    target: Annotated[
        str,
        typer.Argument(
            help="A mechanism (your own: package.module:Class), a recipe or a run's folder."
        ),
    ],
    variant: Annotated[str | None, typer.Option(help="sound or published.")] = None,
    method: Annotated[
        str,
        typer.Option(
            help="auto, probe, distinguisher, one-run-gaussian, one-run, or package.module:name."
        ),
    ] = "auto",
    epsilon: Annotated[float, typer.Option(help="Mechanisms: budget of the audited noise.")] = 4.0,
    delta: Annotated[float, typer.Option(help="Mechanisms: its delta.")] = 1e-5,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Mechanisms: rounds of the audited run.")
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Mechanisms: sampling rate of the audited run.")
    ] = 1.0,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Releases of each population (distinguisher).")
    ] = None,
    canaries: Annotated[
        int | None, typer.Option(min=1, help="Number of canaries (one-run methods).")
    ] = None,
    confidence: Annotated[float | None, typer.Option(help="Confidence of the whole audit.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the audit; by default none.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Recipes: section.key=value; mechanisms: option=value."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Picture to write; by default `audit.png` in the folder of a run."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Audit a mechanism, a recipe or a finished run: a lower bound on epsilon, and checks of the
    noise.

    The exit status is 1 if the audit contradicts the report.
    """
    from fedlgm.errors import ConfigError
    from fedlgm_lab.audits import CONFIDENCE, Audit
    from fedlgm_lab.audits.distinguisher import TRIALS
    from fedlgm_lab.audits.runs import targets
    from fedlgm_lab.audits.runs.audit_figures import draw_audit

    how = Audit(
        method=method,  # type: ignore[arg-type]
        confidence=CONFIDENCE if confidence is None else confidence,
        trials=TRIALS if trials is None else trials,
        canaries=canaries,
        seed=seed,
    )
    kind = targets.kind_of(target)
    with bar(f"audit of {target}", not as_json and sys.stderr.isatty()) as on_progress:

        def progress(done: int, total: int) -> None:
            on_progress(done, total, "")

        if kind == "mechanism":
            result = targets.audit_mechanism(
                target, how, variant=variant, overrides=overrides or (), progress=progress,
                epsilon=epsilon, delta=delta, rounds=rounds, rate=rate,
            )  # fmt: skip
        elif kind == "recipe":
            result = targets.audit_recipe(
                target, how, variant=variant, overrides=overrides or (), progress=progress
            )
        else:
            if variant is not None or overrides:
                raise ConfigError(
                    "a finished run is audited as it ran: leave out --variant and --set"
                )
            result = targets.audit_run(target, how, progress=progress)
    picture = out or (Path(target) / "audit.png" if kind == "run" else None)
    if picture is not None:
        draw_audit(result, picture)
    if as_json:
        print_json(result.to_dict() | ({"picture": str(picture)} if picture is not None else {}))
    else:
        console.print(table(result, picture))
    if not result.passed:
        raise typer.Exit(FAILED)


def table(result: audits.AuditResult, picture: Path | None = None) -> libraries.Group:
    """Lay out the reported and the audited epsilon, then layers, adversaries and checks."""
    from rich.console import Group
    from rich.markup import escape

    from simulations import tables
    from simulations.summaries.terminal import number

    how = f"({result.method}, confidence {result.confidence:g})"
    figures = [
        ("epsilon reported", f"{number(result.epsilon_reported)}  at delta {result.delta:g}"),
        ("epsilon audited", f"[bold]at least {number(result.epsilon_lower)}[/bold]  {how}"),
        ("guarantee", escape(result.guarantee)),
    ]
    head = tables.facts(figures, result.subject)
    if result.observations:
        head.add_row("scores", f"{result.observations:,}  in {result.seconds:.1f} s")
    parts: list[Any] = [head]
    if result.layers:
        columns = ("layer", "coordinates", "epsilon audited", "epsilon planned")
        rows = [
            (
                escape(row.layer),
                f"{row.size:,}",
                number(row.epsilon_lower),
                number(row.epsilon_planned),
            )
            for row in result.layers
        ]
        parts.append(tables.table("by layer", columns, rows, left=("layer",)))
    if result.adversaries:
        columns = ("against", "noise of", "epsilon audited", "epsilon reported")
        adversaries = [
            (
                row.adversary,
                f"{row.nodes} nodes",
                f"at least {number(row.epsilon_lower)}",
                number(row.epsilon_reported),
            )
            for row in result.adversaries
        ]
        parts.append(
            tables.table("by adversary, noise measured", columns, adversaries, left=("against",))
        )
    if result.checks:
        passed = {True: "[green]passed[/green]", False: "[bold red]FAILED[/bold red]"}
        checks = [
            (passed[check.passed], escape(check.name), escape(check.detail))
            for check in result.checks
        ]
        parts.append(tables.facts(checks, "checks"))
    if picture is not None:
        parts.append(escape(f"picture: {picture}"))
    parts.append(
        "[green]nothing contradicts what is reported[/green]"
        if result.passed
        else "[bold red]NOT AS REPORTED[/bold red]"
    )
    return Group(*parts)
