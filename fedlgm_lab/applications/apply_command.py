"""`fedlgm apply`: coordinate descent and PCA over a federation.

Imports that take long are made inside the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.shell import Commands, JsonOption, show

app = typer.Typer(
    cls=Commands, help="Run coordinate descent or PCA over a federation.", no_args_is_help=True
)
SettingsArgument = Annotated[
    Path | None, typer.Argument(help="TOML file of settings; by default the bundled file.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="key=value of the settings; repeatable.")
]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder to create: settings, ledger, figures, picture.")
]


@app.command("coordinate-descent")
def coordinate_descent(
    settings: SettingsArgument = None,
    overrides: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit a regression or classification by private proximal coordinate descent."""
    from fedlgm_lab.applications import runs as apps
    from fedlgm_lab.applications.settings import DescentSettings
    from simulations.summaries import terminal as display

    summary = apps.coordinate_descent(
        DescentSettings.load("coordinate-descent", settings, overrides or ()), out
    )
    show(summary, display.application, as_json)


@app.command("pca")
def pca(
    settings: SettingsArgument = None,
    overrides: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute principal components from one private second-moment matrix."""
    from fedlgm_lab.applications import runs as apps
    from fedlgm_lab.applications.settings import PcaSettings
    from simulations.summaries import terminal as display

    summary = apps.principal_components(PcaSettings.load("pca", settings, overrides or ()), out)
    show(summary, display.application, as_json)
