"""The `fedlgm tune` command. Slow imports are made inside the functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlgm import libraries
from simulations.shell import JsonOption, RecipeArgument, SetOption, show


def tune(
    recipe: RecipeArgument = None,
    search: Annotated[
        list[str] | None,
        typer.Option("--search", help="section.key=value,value: values to try; repeatable."),
    ] = None,
    expected_runs: Annotated[
        float, typer.Option(help="Mean of the secret random number of runs.")
    ] = 10.0,
    law: Annotated[
        str, typer.Option(help="Law of that number: logarithmic, geometric or poisson.")
    ] = "logarithmic",
    score_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Compare runs by a noised score on the private data, with this epsilon for each "
            "run. Default: compare them on the public test set."
        ),
    ] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to create; everything but private/ may be published."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search settings privately: charge the whole search, make a secret number of runs, publish the
    best.
    """
    from fedlgm_lab.tune.tune import tune as tuning
    from simulations.config.grids import parse_grid

    result = tuning(
        recipe,
        search=parse_grid(search or (), "--search"),
        expected_runs=expected_runs,
        law=law,  # type: ignore[arg-type]
        overrides=overrides or (),
        score_epsilon=score_epsilon,
        folder=out,
    )
    show(dict(result), summary, as_json)


def summary(found: Mapping[str, Any]) -> libraries.Group:
    """Lay out the result of a search and its cost."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    from simulations.tables import facts

    figures = {**found.get("settings", {}), **found.get("metrics", {})}
    table = facts(
        [
            (escape(key), escape(f"{value:.4g}" if isinstance(value, float) else str(value)))
            for key, value in figures.items()
        ],
        f"{found['recipe']}: the published run",
    )
    readers, everybody, single = (
        found["epsilon"],
        found["epsilon_all_runs"],
        found["epsilon_one_run"],
    )
    private = f"{found['folder']}/private"
    lines = [
        (
            f"epsilon {readers:.4g} at delta {found['delta']:g} for readers who see only this "
            f"model: {found['guarantee']}"
        ),
        (
            f"epsilon {everybody:.4g} for a party that sees all runs, at the expected number, "
            f"{found['expected_runs']:g}"
        ),
        f"epsilon {single:.4g} would have been the cost of one run with fixed settings",
        (
            f"RDP accountant, {found['law']} number of runs; compared by "
            f"{found['score']}{_score(found)}"
        ),
        (
            f"number, losers and order of the runs are secret: publish neither {private} nor how "
            "long this took"
        ),
    ]
    nothing = (
        []
        if "settings" in found
        else ["no run produced a model, so there is nothing else to publish"]
    )
    return Group(table, *map(Text, nothing + lines))


def _score(result: Mapping[str, Any]) -> str:
    """Describe the noise in the scores of a search; empty if there is none."""
    if result["score_epsilon"] is None:
        return ""
    words = f", with noise of standard deviation {result['score_noise']:.2g}, epsilon {result['score_epsilon']:g} each"
    if "published_score" in result:
        score = f"{result['published_score']:.3f}"
        words += (
            f"; the published run's score is {score}, which is too high, as the best of several"
        )
    return words
