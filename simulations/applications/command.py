"""`fedlgm apply`: coordinate descent and PCA. Heavy imports happen inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.shell import Commands, JsonOption, show

app = typer.Typer(cls=Commands, help="Coordinate descent and PCA over a federation.", no_args_is_help=True)
SettingsArgument = Annotated[Path | None, typer.Argument(help="TOML file of settings; the options below override it.")]
EpsilonOption = Annotated[float | None, typer.Option(help="Budget of the whole run.")]
DeltaOption = Annotated[float | None, typer.Option(help="0 for Laplace noise; by default 1/rows^2 for Gaussian noise.")]
ClientsOption = Annotated[int | None, typer.Option(help="Clients among which the rows are divided.")]
SeedOption = Annotated[int | None, typer.Option(help="Seed of data, partition and noise.")]
OutOption = Annotated[Path | None, typer.Option(help="Folder to create: settings, ledger, figures, picture.")]


@app.command("coordinate-descent")
def coordinate_descent(
    settings: SettingsArgument = None,
    data: Annotated[str | None, typer.Option(help="diabetes, breast-cancer, california or electricity.")] = None,
    scaling: Annotated[str | None, typer.Option(help="range, centered or standardized.")] = None,
    rule: Annotated[str | None, typer.Option(help="inid, spr or iid.")] = None,
    family: Annotated[str | None, typer.Option(help="gaussian or laplace.")] = None,
    relation: Annotated[str | None, typer.Option(help="replace-one or add-remove.")] = None,
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    clients: ClientsOption = None,
    passes: Annotated[int | None, typer.Option(help="Passes over the coordinates.")] = None,
    clip: Annotated[float | None, typer.Option(help="l2 bound of a row's gradient.")] = None,
    rate: Annotated[float | None, typer.Option(help="Learning rate relative to 1/M_i.")] = None,
    strength: Annotated[float | None, typer.Option(help="Weight of the regulariser.")] = None,
    seed: SeedOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit a regression or classification by private proximal coordinate descent."""
    values = {
        "data": data, "scaling": scaling, "rule": rule, "family": family, "relation": relation, "epsilon": epsilon,
        "delta": delta, "clients": clients, "passes": passes, "clip": clip, "rate": rate, "strength": strength,
        "seed": seed,
    }  # fmt: skip
    from simulations.applications import runs as apps
    from simulations.applications.settings import DescentSettings
    from simulations.reports import terminal as display

    found = apps.coordinate_descent(DescentSettings.load("coordinate-descent", settings, values), out)
    show(found, display.application, as_json)


@app.command("pca")
def pca(
    settings: SettingsArgument = None,
    data: Annotated[str | None, typer.Option(help="synthetic or digits.")] = None,
    method: Annotated[str | None, typer.Option(help="gaussian-symmetric, gaussian-inid, laplace-inid, ...")] = None,
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    clients: ClientsOption = None,
    rank: Annotated[int | None, typer.Option(help="Number of components.")] = None,
    dimension: Annotated[int | None, typer.Option(help="Features of synthetic data.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of synthetic data.")] = None,
    seed: SeedOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute principal components from one private second-moment matrix."""
    values = {
        "data": data, "method": method, "epsilon": epsilon, "delta": delta, "clients": clients, "rank": rank,
        "dimension": dimension, "rows": rows, "seed": seed,
    }  # fmt: skip
    from simulations.applications import runs as apps
    from simulations.applications.settings import PcaSettings
    from simulations.reports import terminal as display

    show(apps.principal_components(PcaSettings.load("pca", settings, values), out), display.application, as_json)
