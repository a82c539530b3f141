"""`fedlgm attack`: attacks that measure what a federation leaks.

Slow imports are made inside the commands.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlgm import libraries
from simulations.progress import progress
from simulations.shell import Commands, JsonOption, console, print_json

if TYPE_CHECKING:
    from fedlgm_lab.attacks.membership import MembershipResult
    from fedlgm_lab.attacks.runs.membership import Population
    from fedlgm_lab.attacks.runs.target import Target

app = typer.Typer(
    cls=Commands,
    help="Measure what a federation reveals: membership, images of single clients, whole classes.",
    no_args_is_help=True,
)

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|RECIPE]", help="Run folder, bundled recipe or TOML file; default `digits`."
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value of a recipe; repeatable.")
]
PictureOption = Annotated[
    Path | None, typer.Option(help="PNG to write; by default attack-<name>.png.")
]
ExamplesOption = Annotated[
    int | None,
    typer.Option(
        help="Number of examples of the attacked recipe; fewer examples lead to more overfitting."
    ),
]
UnitOption = Annotated[
    str, typer.Option(help="Unit of membership: example, or client (all of its examples).")
]
UNITS = ("example", "client")


@app.command()
def mia(
    target: TargetArgument = None,
    examples: ExamplesOption = None,
    unit: UnitOption = "example",
    overrides: SetOption = None,
    picture: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Infer membership from the model's outputs."""
    from fedlgm_lab.attacks.runs import membership

    opened, people = _population(target, None, examples, unit, overrides, as_json)
    _report_membership("mia", opened, people, membership.mia(people), picture, as_json)


@app.command()
def lira(
    target: TargetArgument = None,
    shadows: Annotated[
        int,
        typer.Option(
            help="Number of federations to train: even, at least 6 (4 for a run). The attack is "
            "stronger with more federations."
        ),
    ] = 16,
    examples: ExamplesOption = None,
    unit: UnitOption = "example",
    overrides: SetOption = None,
    picture: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Infer membership by likelihood ratios, online and offline: LiRA, and RMIA for few shadow
    models.
    """
    from fedlgm_lab.attacks.runs import membership

    opened, people = _population(target, shadows, examples, unit, overrides, as_json)
    _report_membership("lira", opened, people, membership.lira(people), picture, as_json)


@app.command()
def inversion(
    target: TargetArgument = None,
    victims: Annotated[int, typer.Option(help="Number of clients to attack.")] = 3,
    images: Annotated[int, typer.Option(help="Number of images that each client keeps.")] = 1,
    epsilons: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Budget of the mechanism; repeatable.")
    ] = None,
    published: Annotated[
        bool, typer.Option(help="Attack the mechanism's published variant as well.")
    ] = False,
    per_layer: Annotated[
        bool, typer.Option(help="Also attack each released layer separately.")
    ] = False,
    iterations: Annotated[int, typer.Option(help="Number of optimisation steps.")] = 400,
    restarts: Annotated[
        int | None,
        typer.Option(
            help="Random starts of the optimisation; by default 4 without noise, 1 with it."
        ),
    ] = None,
    overrides: SetOption = None,
    picture: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reconstruct images of single clients from their updates, raw and as the mechanism releases
    them.
    """
    from fedlgm_lab.attacks.inversion import InversionSettings
    from fedlgm_lab.attacks.runs import attack_figures as figures
    from fedlgm_lab.attacks.runs import inversion as attacks
    from fedlgm_lab.attacks.runs.target import Target
    from fedlgm_lab.reports.svg import save

    opened = Target.open(target, overrides or ())
    settings = InversionSettings(iterations=iterations, restarts=restarts)
    with progress("inversion", not as_json) as on_progress:
        findings = attacks.attack(
            opened,
            count=victims,
            images=images,
            epsilons=epsilons or (),
            published=published,
            per_layer=per_layer,
            settings=settings,
            progress=on_progress,
        )
    path = save(figures.inversions(findings), picture or Path("attack-inversion.png"))
    rows = [finding.to_dict() for finding in findings]
    if as_json:
        print_json(
            {"attack": "inversion", "target": opened.name, "findings": rows, "picture": str(path)}
        )
        return
    table = _table(
        f"inversion of single updates: {opened.name}",
        "protection",
        "client",
        "layer",
        "SSIM",
        "PSNR",
        "labels",
    )
    for row in rows:
        table.add_row(
            row["protection"],
            str(row["client"]),
            row["layer"] or "all released",
            f"{row['ssim']:.3f}",
            f"{row['psnr']:.1f} dB",
            f"{row['labels_found']}/{row['images']}",
        )
    console.print(table)
    console.print(
        f"SSIM: 1 for the private image itself, near 0 for an unrelated one\npicture: {path}",
        markup=False,
    )


@app.command()
def gan(
    target: TargetArgument = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="Class to reconstruct, a number or a name; the last client must lack it."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Generator steps for each released model.")] = 20,
    inception: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Add the Inception distance, with torch-fidelity's weights in FILE.",
        ),
    ] = None,
    overrides: SetOption = None,
    picture: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reconstruct from the released models a class that the last client, the attacker, lacks."""
    from fedlgm_lab.attacks.gan import GanSettings
    from fedlgm_lab.attacks.inception import InceptionFeatures
    from fedlgm_lab.attacks.runs import attack_figures as figures
    from fedlgm_lab.attacks.runs import gan as attacks
    from fedlgm_lab.attacks.runs.target import Target
    from fedlgm_lab.reports.svg import save

    settings = GanSettings(steps=steps)
    features = None if inception is None else InceptionFeatures(inception)
    opened = Target.open(target, overrides or ())
    with progress("gan", not as_json) as on_progress, contextlib.redirect_stdout(sys.stderr):
        finding = attacks.attack(
            opened, label=label, settings=settings, inception=features, progress=on_progress
        )
    path = save(figures.classes([("reconstructed", finding)]), picture or Path("attack-gan.png"))
    if as_json:
        print_json(
            {"attack": "gan", "name": opened.name, **finding.to_dict(), "picture": str(path)}
        )
        return
    table = _table(f"reconstruction of class {finding.target}: {opened.name}", "figure", "value")
    table.add_row(
        "Frechet distance (features of a classifier trained on the public test set)",
        f"{finding.distance:.1f}",
    )
    table.add_row("the same between halves of the private images", f"{finding.floor:.1f}")
    table.add_row("the same for the nearest other class", f"{finding.nearest_class:.1f}")
    table.add_row(f"put into class {finding.target} by that classifier", f"{finding.agreement:.1%}")
    if finding.inception_distance is not None:
        table.add_row("Frechet Inception distance", f"{finding.inception_distance:.1f}")
        table.add_row(
            "the same between halves of the private images", f"{finding.inception_floor:.1f}"
        )
    table.add_row("accuracy of the attacked model", f"{finding.result['accuracy']:.1%}")
    console.print(table)
    console.print(_cost_text(finding.result), f"picture: {path}", sep="\n", markup=False)


def _population(
    target: str | None,
    shadows: int | None,
    examples: int | None,
    unit: str,
    overrides: list[str] | None,
    as_json: bool,
) -> tuple[Target, Population]:
    from fedlgm.checks import check_known
    from fedlgm_lab.attacks.runs import membership
    from fedlgm_lab.attacks.runs.target import Target

    check_known("unit", unit, UNITS, "--unit")
    opened = Target.open(target, overrides or ())
    if shadows is None:
        shadows = 0 if opened.folder is not None else 1
    else:
        membership.require_enough(opened, shadows)
    with progress("membership", not as_json) as on_progress, contextlib.redirect_stdout(sys.stderr):
        people = membership.population(
            opened,
            shadows,
            examples=examples,
            unit=unit,  # type: ignore[arg-type]
            progress=on_progress,
        )
    return opened, people


def _report_membership(
    attack: str,
    target: Target,
    people: Population,
    results: dict[str, MembershipResult],
    picture: Path | None,
    as_json: bool,
) -> None:
    from fedlgm_lab.attacks.runs import attack_figures as figures
    from fedlgm_lab.attacks.runs import membership, results_file
    from fedlgm_lab.attacks.runs.target import FIGURES
    from fedlgm_lab.reports.svg import save
    from simulations.runs.rows import excerpt

    path = save(
        figures.curves(results, f"membership: {attack}"), picture or Path(f"attack-{attack}.png")
    )
    if target.folder is not None:
        results_file.keep(target.folder, people.pool.unit, results)
    inside, outside = membership.overfit(people.modules[0], people)
    attacked = people.results[0]
    if as_json:
        protects = {"epsilon_unit": attacked["unit"]} if "unit" in attacked else {}
        print_json(
            {
                "attack": attack,
                "unit": people.pool.unit,
                "models": len(people.modules),
                "accuracy_members": inside,
                "accuracy_others": outside,
                "results": {name: result.to_dict() for name, result in results.items()},
                **excerpt(FIGURES[1:], attacked),
                **protects,
                "picture": str(path),
            }
        )
        return
    first = next(iter(results.values()))
    rates = [f"TPR at FPR {rate.fpr:g}" for rate in first.rates]
    title = f"membership inference: {first.members} members, {first.nonmembers} others ({people.pool.unit}s)"
    table = _table(title, "attack", f"AUC ({first.confidence:.0%} interval)", *rates)
    for name, result in results.items():
        cells = [f"{rate.tpr:.4f} ({rate.low:.4f}-{rate.high:.4f})" for rate in result.rates]
        table.add_row(
            name, f"{result.auc:.3f} ({result.auc_low:.3f}-{result.auc_high:.3f})", *cells
        )
    console.print(table)
    console.print(
        f"accuracy of the attacked model: {inside:.1%} on members, {outside:.1%} on others",
        _cost_text(attacked),
        *_other_unit(people),
        *_bound_text(target),
        f"picture: {path}",
        sep="\n",
        markup=False,
    )


def _bound_text(target: Target) -> list[str]:
    """State the bound that the run's guarantee sets on every attack, and the command that shows
    this bound beside the results.
    """
    from fedlgm.privacy.ledger import Ledger
    from simulations.runs.stopping import reported_rates

    if target.folder is None:
        return []
    with Ledger(target.folder.ledger_file) as ledger:
        rates = reported_rates(target.folder.recipe(), ledger)
    return [
        f"bound for the run: {rates.sentence(target.recipe.units)}",
        f"beside the bound on every attack: fedlgm report {target.folder.path} --private",
    ]


def _other_unit(people: Population) -> list[str]:
    """State that the figures concern another unit than the unit that epsilon protects; empty if the
    units are equal.
    """
    attacked, protected = people.pool.unit, people.results[0].get("unit", people.pool.unit)
    if attacked == protected:
        return []
    remedy = (
        f"; for figures about {protected}s use --unit {protected}" if protected in UNITS else ""
    )
    return [f"the epsilon protects {protected}s, these figures are about {attacked}s{remedy}"]


def _cost_text(result: Mapping[str, Any]) -> str:
    """State the claimed and the proven epsilon with the guarantee, in the words that all commands
    use.
    """
    from simulations.summaries.terminal import epsilon_label, number

    if "epsilon" not in result:
        return ""
    claimed, proven = number(result["claimed_epsilon"]), number(result["epsilon"])
    label = epsilon_label(result["guarantee_status"])
    return f"epsilon claimed {claimed}, {label} {proven} at delta {result['delta']:g}: {result['guarantee']}"


def _table(title: str, *columns: str) -> libraries.Table:
    from simulations.tables import table

    return table(title, columns, left=columns[:1])
