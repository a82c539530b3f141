"""The `fedlgm risk` command. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlgm import libraries
from simulations.progress import progress
from simulations.shell import JsonOption, RecipeArgument, SetOption, console, print_json

if TYPE_CHECKING:
    from fedlgm_lab.risk.measure import Errors, Findings
    from simulations.config.recipe import Recipe

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
    from fedlgm_lab.risk.measure import risk_of
    from fedlgm_lab.risk.risk_figures import figure
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
    summary = _summary(parsed, findings, kind, r, folder)
    save(figure(findings, summary["weights"]), folder / "risk.png")
    written = _recipe(parsed, findings, kind, r)
    if written is not None:
        (folder / "recipe.toml").write_text(written.to_toml(), encoding="utf-8")
        summary["recipe"] = str(folder / "recipe.toml")
    strict_json.write(folder / _RISKS, summary, indent=None)
    if as_json:
        print_json(summary)
        return
    console.print(table(findings, summary["weights"]))
    console.print(*_words(summary), sep="\n", markup=False)


def table(found: Findings, weights: list[float]) -> libraries.Table:
    """Error rates by layer."""
    from simulations import tables

    names = (
        "layer",
        "error, training set (paper)",
        "error, held out",
        "error, gradient norm",
        "strength",
        "weight",
    )
    rows = [
        [
            row.layer,
            *(
                f"{value:.3f}"
                for value in (
                    row.training_error,
                    row.held_out_error,
                    row.gradient_error,
                    row.strength,
                    weight,
                )
            ),
        ]
        for row, weight in zip(found.risks, weights, strict=True)
    ]
    return tables.table("layer risk: 0.5 is a coin toss", names, rows, left=("layer",))


def _summary(
    recipe: Recipe, findings: Findings, errors: Errors, emphasis: float, folder: Path
) -> dict[str, Any]:
    """JSON form of the findings, with the weights of `lm-dp-sgd` and the written files."""
    return {
        "recipe_name": recipe.name,
        "model": recipe.model.name,
        **findings.to_dict(),
        "errors": errors,
        "emphasis": emphasis,
        "error_rates": findings.rates(errors),
        "strengths": [row.strength for row in findings.risks],
        "weights": findings.weights(errors, emphasis).tolist(),
        "folder": str(folder),
        "picture": str(folder / "risk.png"),
    }


def _recipe(recipe: Recipe, findings: Findings, errors: Errors, emphasis: float) -> Recipe | None:
    """The recipe with the findings; None if its mechanism does not use them."""
    from simulations.config import recipe as recipes

    if recipe.mechanism.name != "lm-dp-sgd":
        return None
    raw = recipe.model_dump(exclude_none=True)
    measured = {"error_rates": findings.rates(errors), "emphasis": emphasis}
    raw["mechanism"] |= {"group_by": "module", **measured}  # adversaries look at modules' outputs
    if recipe.mechanism.variant == "sound":
        raw["mechanism"]["strengths"] = [row.strength for row in findings.risks]
    return recipes.Recipe.model_validate(raw)


def _words(summary: dict[str, Any]) -> list[str]:
    rates = ", ".join(f"{rate:.4g}" for rate in summary["error_rates"])
    strengths = ", ".join(f"{value:.4g}" for value in summary["strengths"])
    least = ", ".join(f"{value:.4g}" for value in summary["bias_weights"])
    lines = [
        f"public examples: {summary['examples']:,}, {summary['public']}; no other data were used",
        f"a held-out error near 0.5 has a standard error of {summary['standard_error']:.3f}",
        "for a recipe with mechanism.name = 'lm-dp-sgd':",
        f"  error_rates = [{rates}]",
        f"  strengths = [{strengths}]",
        f"  emphasis = {summary['emphasis']:g}",
        f"or, for the least bias and without error rates (Appendix D.2): strengths = [{least}]",
    ]
    if "recipe" in summary:
        lines.append(f"the recipe with them: {summary['recipe']}")
    return [*lines, f"picture: {summary['picture']}"]
