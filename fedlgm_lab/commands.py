"""The commands of this package, for `fedlgm`. Slow imports are made inside the functions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlgm_lab.applications import apply_command as application_command
from fedlgm_lab.attacks.runs import attack_command
from fedlgm_lab.audits.runs.audit_command import audit
from fedlgm_lab.certificate import certificate_commands as certificates
from fedlgm_lab.check_command import check
from fedlgm_lab.recommend.recommend_command import recommend
from fedlgm_lab.risk.risk_command import risk
from fedlgm_lab.statement.statement_command import statement
from fedlgm_lab.studies.study_command import study
from fedlgm_lab.tune.tune_command import tune
from simulations.shell import (
    JsonOption,
    RecipeArgument,
    RunArgument,
    SetOption,
    console,
    print_json,
    show,
)

_TRAIN, _PLAN, _READ = "Train and compare", "Plan, without training on private data", "Read a run"
_TEST = "Measure what leaks"


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this package to an application."""
    app.command(rich_help_panel=_TRAIN)(compare)
    app.command(rich_help_panel=_TRAIN)(study)
    app.command(rich_help_panel=_TRAIN)(tune)
    app.add_typer(application_command.app, name="apply", rich_help_panel=_TRAIN)
    app.command(rich_help_panel=_PLAN)(recommend)
    app.command(rich_help_panel=_PLAN)(partition)
    app.command(rich_help_panel=_READ)(report)
    app.command(rich_help_panel=_READ)(statement)
    app.command(rich_help_panel=_READ)(crate)
    app.command(rich_help_panel=_READ)(certificates.certify)
    app.command(rich_help_panel=_READ)(certificates.anchor)
    app.command(rich_help_panel=_READ)(certificates.verify)
    app.command(rich_help_panel=_TEST)(audit)
    app.command(rich_help_panel=_TEST)(check)
    app.command(rich_help_panel=_TEST)(risk)
    app.add_typer(attack_command.app, name="attack", rich_help_panel=_TEST)


def compare(
    recipe: RecipeArgument = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Mechanisms, separated by commas: NAME, NAME:VARIANT or package.module:Class. The "
            "first is the reference. Default: the recipe's own, uniform and gaussian "
            "(example-level recipes: dp-sgd and auto-s)."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of runs of each method.")] = 3,
    epsilons: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Budget; repeatable.")
    ] = None,
    partitions: Annotated[
        list[str] | None, typer.Option("--partition", help="Partition scheme; repeatable.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="[METHOD/]section.key=value; repeatable.")
    ] = None,
    engine: Annotated[str, typer.Option(help="local, processes, ray, flower or auto.")] = "local",
    attacks: Annotated[
        str | None,
        typer.Option(
            help="Attack every run: membership, inversion, gan:CLASS[:CLASS...], separated by "
            "commas."
        ),
    ] = None,
    inception: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With gan: add Inception distances, with torch-fidelity's weights in FILE.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of runs at a time, each in its own process.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; continued if it exists.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare accuracy, noise and privacy of several mechanisms; reuses finished runs."""
    from fedlgm_lab.studies import study_command as studying
    from simulations import engines

    engines.get(engine)
    names = (
        None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    )
    values = (seeds, overrides or (), epsilons or (), partitions or ())
    shown = studying.compare(
        recipe, names, *values, engine, workers, attacks, inception, out, as_json
    )
    print_json(shown) if as_json else console.print(shown)


def partition(
    recipe: RecipeArgument = None,
    overrides: SetOption = None,
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("partition.png"),
    as_json: JsonOption = False,
) -> None:
    """Show the label histogram of every client, as a picture and a table."""
    from fedlgm_lab.reports import partition as divisions
    from simulations.config import recipe as recipes

    report = divisions.partition_report(recipes.load(recipe, overrides or ()), out)
    show(report, divisions.partition_table, as_json)


def report(
    run: RunArgument,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Write private/report.html instead, with figures for the operator only.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's report.html and print its summary."""
    from fedlgm_lab.reports import report as reporting
    from simulations.summaries import terminal as display

    summary = reporting.write_report(run, private)
    show(summary, display.summary, as_json)


def crate(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="Archive to write; it ends in .zip.")] = Path(
        "crate.zip"
    ),
    model: Annotated[
        Path | None,
        typer.Option(help="The exported model of a run whose model was a Python object."),
    ] = None,
) -> None:
    """Pack a run's public files, its model and its statement as an RO-Crate for an archive."""
    from fedlgm_lab.reports.crate import write_crate

    console.print(f"wrote {write_crate(run, out, model)}")
