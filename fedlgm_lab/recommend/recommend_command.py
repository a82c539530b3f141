"""The `fedlgm recommend` command. Slow imports are made inside the functions."""

from __future__ import annotations

from typing import Annotated, cast

import typer
from rich.console import Group

from fedlgm_lab.recommend.score_rows import Advice
from simulations.shell import JsonOption, RecipeArgument, SetOption, show


def recommend(
    recipe: RecipeArgument = None,
    public: Annotated[
        str | None,
        typer.Option(
            help="Public examples: test (the recipe's test examples), or the name of a data set "
            "whose training examples are public, such as digits/public. Default: synthetic "
            "examples."
        ),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Training examples of all clients, if the data set does not state it."
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend a mechanism for a recipe's model from public examples only."""
    from fedlgm_lab.recommend.recommend import recommend as recommending

    advice = recommending(recipe, public=public, examples=examples, overrides=overrides or ())
    show(cast(Advice, dict(advice)), tables, as_json)


def tables(found: Advice) -> Group:
    """Lay out the tables of rules and layers, a picture of the scores, and the advice."""
    from rich.markup import escape
    from rich.text import Text

    from fedlgm_lab.recommend.picture import bars
    from simulations.summaries.terminal import number
    from simulations.tables import table

    rules = table(
        f"{found['recipe']}: score over that of gaussian, at bound {found['bound']:g}",
        ["rule", *(f"model {share + 1}" for share in range(len(found["stages"]))), "all"],
        [
            [rule, *(f"{stage['ratios'][rule]:.2f}" for stage in found["stages"]), f"{ratio:.2f}"]
            for rule, ratio in found["scores"].items()
        ],
        left=("rule",),
    )
    columns = ("layer", "size", "median norm", "curvature", "suggested bound")
    layers = table("layers, by public examples", columns, left=("layer",))
    for row in found["layers"]:
        figures = (number(row["norm"]), number(row["trace"]), number(row["suggested_bound"]))
        layers.add_row(escape(row["layer"]), f"{row['size']:,}", *figures)
    per_client = f"{found['examples_per_client']:.3g} examples per client"
    assumption = (
        " (assumed: one batch; --examples says how many there are)" if found["assumed"] else ""
    )
    notes = [
        f"noise on the mean: {number(found['noise_on_mean'])} of the bound",
        (
            f"median length of a whole contribution: {number(found['suggested_bound'])}, the bound "
            f"is {found['bound']:g}"
        ),
        f"computed on {found['public']}; no private example was read"
        + (f"; {per_client}{assumption}" if found["unit"] == "client" else ""),
    ]
    picture = Text("\n".join([f"{'worse':>37}|better", *bars(found["scores"])]))
    return Group(
        rules, picture, layers, *map(Text, notes), Text(f"\n{found['advice']}", style="bold")
    )
