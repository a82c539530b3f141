"""The `fedlgm check` command. Slow imports are made inside the functions."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlgm.errors import ConfigError
from simulations.shell import JsonOption, console, print_json

if TYPE_CHECKING:
    from fedlgm.check import Report


def check(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|RUN|SCRIPT]",
            help="Settings (.toml), a configuration of NVFlare (.json), a script (.py, which is "
            "read and not run), or a run's folder.",
        ),
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise multiplier: the noise on the sum over the bound.")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Bound of one unit's contribution.")] = None,
    sampler: Annotated[str | None, typer.Option(help="poisson, shuffle, fixed or all.")] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="Sampling rate, instead of the batch size.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Units per step.")] = None,
    population: Annotated[int | None, typer.Option(help="Units in the data.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", "--rounds", help="Releases.")] = None,
    unit: Annotated[str | None, typer.Option(help="example, client or user.")] = None,
    delta: Annotated[float | None, typer.Option(help="Stated delta.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Stated epsilon.")] = None,
    accounted_as: Annotated[
        str | None, typer.Option(help="Sampling that the accounting assumed: poisson, fixed, none.")
    ] = None,
    values: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting, NAME=VALUE; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the privacy statement of somebody else's run; exit status 1 if it is broken."""
    from fedlgm.check import build_settings, check_file
    from fedlgm.check import check as check_settings

    flags = {
        "noise_multiplier": noise_multiplier, "clip": clip, "sampler": sampler, "steps": steps,
        "sampling_rate": sampling_rate, "batch_size": batch_size, "population": population,
        "epochs": epochs, "unit": unit, "delta": delta, "epsilon": epsilon,
        "accounted_as": accounted_as,
    }  # fmt: skip
    settings = {name: value for name, value in flags.items() if value is not None}
    for name, value in map(_pair, values or ()):
        if name in settings:
            raise ConfigError(f"{name} is given twice")
        settings[name] = value
    if subject is not None and Path(subject).is_dir():
        if settings:
            raise ConfigError("a run's folder states all settings: leave out the options")
        report = _run(Path(subject))
    elif subject is None:
        if not settings:
            raise ConfigError("give a file, a run's folder, a script, or settings as options")
        report = check_settings(build_settings(settings))
    else:
        report = check_file(subject, **settings)
    print_json(report.to_dict()) if as_json else _show(report)
    if report.status == "broken":
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes NAME=VALUE, got {text!r}")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return name, value


def _show(report: Report) -> None:
    from simulations import tables

    rows = [[verdict.rule, verdict.status, verdict.why] for verdict in report.verdicts]
    names = ("assumption", "verdict", "why")
    console.print(tables.table(f"check: {report.status}", names, rows, left=names))
    console.print(report.sentence(), markup=False)


def _run(path: Path) -> Report:
    """Report on a run of fedlgm, by its verified ledger and the words of its guarantee."""
    from fedlgm.check import RULES, Report, Settings, Verdict
    from fedlgm.check.report import judge_statement
    from fedlgm.privacy import attack_rates
    from simulations.runs.folder import RunFolder
    from simulations.summaries.ledgers import checked_ledger_report

    folder = RunFolder.open(path)
    recipe = folder.recipe()
    with folder.checked_ledger() as ledger:
        rates = attack_rates(ledger)
        read = checked_ledger_report(folder, ledger, rates)
        guarantee = folder.guarantee_in(ledger)
    settings = Settings(
        mechanism="ledger",
        unit=recipe.unit,
        population=recipe.federation.clients if recipe.unit == "client" else None,
        delta=read["delta"],
        epsilon=read["claimed_epsilon"] if math.isfinite(read["claimed_epsilon"]) else None,
        stated_for="run",
        noise_seed="public" if read["noise_reproducible"] else "secret",
    )
    words: dict[str, Any] = {"proven": "holds", "conditional": "conditional"}
    status = words.get(guarantee.status, "broken")
    verdicts = [Verdict(status, guarantee.reason, rule="guarantee")]
    if read["noise_reproducible"]:
        why = "The seed of the noise is public: the figures hold for a run with a secret seed."
        verdicts.append(Verdict("conditional", why, rule="seed"))
    proven = read["epsilon"] if math.isfinite(read["epsilon"]) else None
    judged = (RULES["delta"](settings), judge_statement(settings, proven))
    verdicts += [replace(verdict, rule=verdict.rule or "delta") for verdict in judged if verdict]
    return Report(settings, tuple(verdicts), proven, guarantee.relation, rates if proven else None)
