"""The commands `fedlgm study` and `fedlgm compare`. Slow imports are made inside the functions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedlgm import libraries
from simulations import tables
from simulations.ending import report_interruption
from simulations.shell import JsonOption, SetOption, console, print_json


def study(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A bundled study or table, or a TOML file; or a recipe, with --grid.",
            metavar="STUDY",
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            help="key=value,value: mechanism, or any key of the recipe; replaces the study's grid; "
            "repeatable.",
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            help="key=value,value to search: each method takes its best value; repeatable.",
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the bundled studies.")] = False,
    tuned: Annotated[
        bool,
        typer.Option(
            "--tuned",
            help="Check the claims again, with rates or bounds searched alike for every method: "
            "the values in the study's table `tune`.",
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A short trial of a study.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of runs of each combination.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of runs at a time, each in its own process.")
    ] = 1,
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster; each of its CPUs makes one run at a time.")
    ] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; continued if it exists.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run every combination of a grid and show the figures; finished runs are not repeated."""
    if listed:
        _list(as_json)
        return
    from fedlgm.errors import ConfigError
    from fedlgm_lab.studies import claims, files, frames, records
    from fedlgm_lab.studies.study import study as run

    if maker := files.maker_of(name):
        if grid or search or tuned or quick or seeds or workers > 1 or ray_address:
            raise ConfigError(
                f"{name} is not a grid of runs: it takes only --set, --out and --json"
            )
        _make(maker, out or Path("runs") / "tables", overrides or (), as_json)
        return
    parsed = files.requested_study(name, grid or (), search or (), overrides or (), quick)
    label = parsed.name or Path(parsed.recipe).stem
    folder = out or Path("runs") / f"study-{label}{'-quick' if quick else ''}"
    if tuned and not parsed.tune:
        raise ConfigError(f"{label} names no values to search: add them to its file as [tune]")

    make = partial(
        run,
        parsed.recipe,
        grid=parsed.grid,
        seeds=seeds or parsed.seeds,
        workers=ray_address or workers,
        overrides=parsed.set,
        search_seeds=parsed.search_seeds,
        progress=not as_json,
    )

    with _explain_interruption(), contextlib.redirect_stdout(sys.stderr):
        # the search comes first, because its runs also count in the joint cost of the study
        again = make(folder=folder / "tuned", search=parsed.tune) if tuned else None
        result = make(folder=folder, search=parsed.search or None)
    frames.require_finished(result.to_frame())
    asked: dict[str, Any] = {"study": label, "paper": parsed.paper}
    asked |= parsed.model_dump(include={"recipe", "set", "grid"})
    checked = claims.check(parsed.claims, result.to_frame(), result.compared_keys, result.headline)
    if again is not None:
        searched = claims.check(
            parsed.claims, again.to_frame(), again.compared_keys, again.headline
        )
        told = asked | {"claims": [claim.to_row() for claim in searched]}
        again.write(told | records.plain_values(again.records), parsed.metrics)
        checked = claims.weigh(checked, searched)
    metric = parsed.y or result.headline
    content = asked | {"claims": [claim.to_row() for claim in checked]}
    content |= records.plain_values(result.records, [metric] if parsed.x == "round" else [])
    files_told = result.write(content, parsed.metrics, parsed.x, metric)
    table = result.table(parsed.metrics)
    if as_json:
        print_json(content | {"cells": records.rows_of(table), "out": str(folder)})
        return
    if console.is_terminal:
        texts = [
            [escape(f"{cell:.4g}" if isinstance(cell, float) else str(cell)) for cell in row]
            for row in table.values
        ]
        console.print(
            tables.table(None, table.columns, texts, left=result.keys, keys=len(result.keys)),
            highlight=False,
        )
    else:
        console.print(table.to_string(index=False), highlight=False, markup=False, soft_wrap=True)
    frame = result.to_frame()
    for _, row in frame[frame["reason"] != ""].iterrows():
        console.print(
            f"note: {row['method']}, seed {row['seed']}: {row['reason']}",
            highlight=False,
            markup=False,
        )
    for index, claim in enumerate(checked):
        also = "" if again is None else f"; tuned: {searched[index].in_words()}"
        console.print(
            f"{claim.verdict}: {claim.says} ({claim.in_words()}{also})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print(str(result).splitlines()[-1], highlight=False, markup=False)
    console.print(files_told)


def _make(name: str, folder: Path, overrides: Iterable[str], as_json: bool) -> None:
    """Make the tables of a maker, and show them."""
    from fedlgm_lab.studies.tables.maker import make
    from simulations.config.overrides import settings

    with _explain_interruption(), contextlib.redirect_stdout(sys.stderr):
        pages, complete = make(name, folder, dict(settings(overrides)))
    if as_json:
        print_json({"tables": pages, "complete": complete, "out": str(folder)})
        return
    for parts in pages.values():
        for part, text in parts.items():
            console.print(f"{part}\n\n{text}\n", highlight=False, markup=False, soft_wrap=True)
    console.print(f"files: {folder}", highlight=False)
    if not complete:
        console.print("not everything is measured: the same command continues")


def compare(
    recipe: str | None,
    methods: Sequence[str] | None,
    seeds: int,
    overrides: Iterable[str],
    epsilons: Sequence[float],
    partitions: Sequence[str],
    engine: str,
    workers: int,
    attacks: str | None,
    inception: Path | None,
    out: Path | None,
    as_json: bool,
) -> libraries.Group | dict[str, Any]:
    """Run a study of methods, budgets and partitions, and return it as tables, or with `as_json` as
    figures.

    Args:
        recipe: see `fedlgm_lab.studies.jobs.jobs`.
        methods: see `jobs`.
        seeds: see `jobs`.
        overrides: see `jobs`.
        epsilons: see `jobs`.
        partitions: see `jobs`.
        engine: engine that trains.
        workers: processes that take one run each.
        attacks: see `fedlgm_lab.attacks.runs.measured.Attacks.parse`.
        inception: see `fedlgm_lab.attacks.runs.measured.Attacks.parse`.
        out: folder of the runs.
        as_json: whether to return figures instead of tables.
    """
    from rich.console import Group

    from fedlgm_lab.studies import comparison, records
    from fedlgm_lab.studies.jobs import jobs
    from fedlgm_lab.studies.results import Study
    from fedlgm_lab.studies.study import complete
    from simulations.progress import progress

    wanted = None
    if attacks is not None or inception is not None:
        from fedlgm_lab.attacks.runs import measured, table
        from simulations.config.assembly import Assembly

        wanted = measured.Attacks.parse(attacks or "", inception)
    todo = jobs(recipe, methods, seeds, overrides, epsilons, partitions)
    if wanted is not None and wanted.labels:
        # before the first run
        wanted = wanted.with_class_numbers(Assembly(todo[0].recipe, todo[0].own).data.dataset)
    folder = out or Path("runs") / f"compare-{Path(recipe or 'digits').stem}"
    with _explain_interruption(), contextlib.redirect_stdout(sys.stderr):
        failed = complete(todo, folder, workers, not as_json, engine)
        if wanted is not None:
            with progress("attacks", not as_json) as on_attack:
                done = [job for job in todo if job.folder not in failed]
                rows = measured.measure(done, folder, wanted, progress=on_attack)
    result = Study(folder, records.Records.of_runs(folder, todo, failed))
    summary = comparison.summarise(result) | {"out": str(folder)}
    files_told = result.write(records.plain_values(result.records))
    if wanted is not None:
        summary["attacks"] = table.cells(summary, rows)
    if as_json:
        return summary
    attacked = [table.tables(summary["attacks"])] if wanted is not None else []
    return Group(comparison.tables(summary), *attacked, files_told)


@contextlib.contextmanager
def _explain_interruption() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        report_interruption("interrupted; the same command continues the study")
        raise


def _list(as_json: bool) -> None:
    from fedlgm_lab.studies import files
    from fedlgm_lab.studies.tables.titles import TITLES

    studies = {name: files.load(name) for name in files.names()}
    others = files.elsewhere()
    if as_json:
        described = {
            name: {
                "paper": entry.paper,
                "title": entry.title,
                "data": entry.data,
                "command": f"fedlgm study {name}",
            }
            for name, entry in studies.items()
        }
        described |= {name: {"title": title} for name, title in TITLES.items()}
        print_json(described | {name: entry.model_dump() for name, entry in others.items()})
        return
    console.print("Papers, by the number that begins the names of their studies", markup=False)
    for number, paper in files.papers().items():
        console.print(
            f"{number}  {paper.authors}: {paper.title} (arXiv {paper.arxiv})\n     mechanisms: "
            f"{', '.join(paper.mechanisms)}\n     recipes: {', '.join(paper.recipes)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    from simulations.tables import print_names

    console.print(
        "\nBundled studies, each made by: fedlgm study NAME; what each needs: --json, or "
        "docs/results/studies.md",
        markup=False,
        soft_wrap=True,
    )
    print_names(console, [(name, study.title) for name, study in studies.items()])
    console.print("\nTables and figures that are not grids of runs", markup=False)
    print_names(console, [(name, f"{other.title}; {other}") for name, other in others.items()])
    console.print("\nFurther tables, and what makes several at once", markup=False)
    print_names(console, list(TITLES.items()))
