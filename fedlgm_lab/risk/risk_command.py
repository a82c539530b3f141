"""The `fedlgm risk` command. Slow imports are made inside the functions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.progress import progress
from simulations.shell import JsonOption, RecipeArgument, SetOption, console, print_json

_RISKS = "risk.json"


def risk(
    recipe: RecipeArgument = None,
    public: Annotated[
        str | None,
        typer.Option(help="Public data set; by default risk.data, else the set's public part."),
    ] = None,
    emphasis: Annotated[
        float | None,
        typer.Option(help="Exponent r >= 1 of the weights; by default mechanism.emphasis, else 1."),
    ] = None,
    errors: Annotated[
        str,
        typer.Option(help="Error rates for the weights: training (as in the paper) or held-out."),
    ] = "training",
    overrides: SetOption = None,
    seed: Annotated[int | None, typer.Option(help="Overrides run.seed.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; by default runs/risk-RECIPE.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure which layers of a recipe's model reveal membership, on public data only."""
    from fedlgm.errors import ConfigError
    from fedlgm.mechanisms.lm_dp_sgd import check_risk
    from fedlgm_lab.reports.svg import save
    from fedlgm_lab.risk.measure import Errors, measured_recipe, risk_of
    from fedlgm_lab.risk.risk_figures import figure, sentences, summarise, table
    from simulations.config import recipe as recipes
    from simulations.runs import strict_json

    if errors not in ("training", "held-out"):
        raise ConfigError(f"--errors: unknown {errors!r}; known: training, held-out")
    if emphasis is not None:
        check_risk(None, emphasis, 1)
    parsed = recipes.load(
        recipe, [*(overrides or ()), *([f"risk.data={public}"] if public else [])]
    )
    r = float(parsed.mechanism.options.get("emphasis", 1.0)) if emphasis is None else emphasis
    folder = out or Path("runs") / f"risk-{parsed.name}"
    if folder.exists() and not (folder / _RISKS).exists() and any(folder.iterdir()):
        raise ConfigError(f"--out: {folder} is not a folder of layer risks: choose another one")
    with progress("layer risk", not as_json) as on_progress:
        findings = risk_of(parsed, seed, on_progress)
    folder.mkdir(parents=True, exist_ok=True)
    kind: Errors = errors  # type: ignore[assignment]
    summary = summarise(parsed, findings, kind, r, folder)
    save(figure(findings, summary["weights"]), folder / "risk.png")
    written = measured_recipe(parsed, findings, kind, r)
    if written is not None:
        (folder / "recipe.toml").write_text(written.to_toml(), encoding="utf-8")
        summary["recipe"] = str(folder / "recipe.toml")
    strict_json.write(folder / _RISKS, summary, indent=None)
    if as_json:
        print_json(summary)
        return
    console.print(table(findings, summary["weights"]))
    console.print(*sentences(summary), sep="\n", markup=False)
