"""Tables and curves of a compared set of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from simulations.reports.headline import headline, is_share
from simulations.reports.svg import save
from simulations.reports.terminal import number
from simulations.runs.folder import RunFolder
from simulations.studies.jobs import Job
from simulations.studies.noise import model_noise
from simulations.studies.rows import JointCost, Row, budget
from simulations.tables import table

if TYPE_CHECKING:
    from pandas import DataFrame

_CURVES = {
    "noise": "noise scale, cumulated",
    "model_noise": "noise of the model",
    "epsilon": "epsilon (solid: proven, dashed: claimed)",
}
_NOISES = {"noise_scale": "Noise scale", "model_noise": "Noise of the model"}


def tables(summary: Row) -> Group:
    """The LaDP-FL paper's Tables II (accuracy), III (noise), V (partitions) and VIII (significance); privacy spent."""
    cells, partitions = summary["cells"], list(dict.fromkeys(cell["partition"] for cell in summary["cells"]))
    score = cells[0]["headline"]
    parts: list[Any] = [_by_budget(summary, each, name) for each in partitions for name in (score, *_NOISES)]
    parts += [_by_partition(cells, partitions)] if len(partitions) > 1 else []
    parts.append(_privacy(cells))
    averaged = min(cell["averaged_rounds"] for cell in cells)
    rounds = "the last evaluated round" if averaged == 1 else f"the last {averaged} evaluated rounds"
    notes = (
        f"{score}: mean of {rounds}, then mean and standard deviation over "
        "the repetitions; noise scale: l2 norm of the noise in each round's mean, summed over the rounds; noise of the "
        "model: l2 norm of the noise in all rounds' means together; improvement and reduction: of the first method "
        "over the column's, averaged over the budgets"
    )
    compared = [cell for cell in cells if any(found is not None for found in cell["differences"].values())]
    if compared:
        first = summary["methods"][0]
        parts.append(_differences(compared, first))
        notes += (
            f"; differences: {first} less the row's method, paired by repetition, with the 95 % Student interval "
            "and the p-value of no difference"
        )
    caveats = escape("\n".join(f"note: {caveat}" for caveat in summary["caveats"]))
    pictures = "\n".join(f"picture: {path}" for path in summary.get("pictures", {}).values())
    guarantees = {cell["method"]: cell["guarantee"] for cell in cells}
    sentences = "\n".join(escape(f"{method}: {sentence}") for method, sentence in guarantees.items())
    return Group(*parts, sentences, "", joint_sentence(summary["together"]), *filter(None, (caveats, notes, pictures)))


def joint_sentence(cost: JointCost) -> str:
    """The cost of publishing all cells side by side, in a sentence."""
    if cost["epsilon_protected"] is None:
        return f"published together, the runs have no joint epsilon: {cost['why']}"
    said = f"published together, {cost['runs_protected']} runs cost epsilon {number(cost['epsilon_protected'])}"
    others = cost["runs"] - cost["runs_protected"]
    rest = f"; with the other {others}, which are not private, no bound holds" if others else ""
    return f"{said} at delta {cost['delta']:g} (composition over everything that was run on the data){rest}"


def draw(done: Sequence[Job], out: Path) -> dict[str, str]:
    """Curves over the rounds: mean over the seeds, range shaded. One PNG for each figure.

    Returns:
        Name of the figure -> path.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    everything = list(dict.fromkeys((job.epsilon, job.partition) for job in done))
    scenes = [scene for scene in everything if scene[0] is not None] or everything
    score, rounds, paths = done[0].recipe.task.build().headline, _rounds(done, out), {}
    for name, label in ({score: f"test {score}"} | _CURVES).items():
        figure = Figure(figsize=(5.5 * len(scenes), 4), layout="constrained")
        grid = figure.subplots(1, len(scenes), squeeze=False)
        for axes, (epsilon, partition) in zip(grid[0], scenes, strict=True):
            here = rounds[(rounds["partition"] == partition) & rounds["budget"].isin([epsilon, None])]
            for index, (method, own) in enumerate(here.groupby("method", sort=False)):
                _curve(axes, own, name, str(method), f"C{index}")
            title = partition if epsilon is None else f"{partition}, epsilon = {epsilon:g}"
            axes.set(xlabel="round", ylabel=label, title=title)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        paths[name] = str(save(figure, out / f"{name}.png"))
    return paths


def _rounds(done: Sequence[Job], out: Path) -> DataFrame:
    """One row per run and round with the figures of the curves; NaN where a round was not evaluated."""
    import pandas as pd

    rows: list[Row] = []
    for job in done:
        folder = RunFolder.open(out / job.folder)
        own = folder.rows()
        noises = zip(own, np.cumsum([row["noise_scale"] for row in own]), model_noise(folder, own), strict=True)
        for row, noise, model in noises:
            made: Row = {"method": job.method, "budget": job.epsilon, "partition": job.partition, "round": row["round"]}
            made |= {"noise": noise, "model_noise": model}
            if "loss" in row:
                made |= dict([headline(row)]) | {"epsilon": row["epsilon"], "claimed": row["claimed_epsilon"]}
            rows.append(made)
    return pd.DataFrame(rows).astype({"budget": object})


def _curve(axes: Any, own: DataFrame, name: str, label: str, colour: str) -> None:
    """One method's line: mean over its runs, with the range between them."""
    by_round = own.dropna(subset=name).groupby("round")
    values = by_round[name].agg(["mean", "min", "max"])
    if name == "epsilon":
        axes.plot(by_round["claimed"].mean(), color=colour, linestyle="--", alpha=0.7)
    if np.isfinite(values).all(axis=None):
        axes.plot(values["mean"], color=colour, label=label)
        axes.fill_between(values.index, values["min"], values["max"], color=colour, alpha=0.15, linewidth=0)
    else:
        axes.plot([], [], color=colour, label=f"{label} (proven: none)")


def _by_budget(summary: Row, partition: str, name: str) -> Table:
    """Tables II and III: rows are budgets, columns methods; then the first method's average gain over each."""
    methods, title = summary["methods"], _NOISES.get(name) or _title(name)
    made = table(f"{title} ({partition})", ["epsilon", *methods])
    rows = [row for row in (*summary["failed"], *summary["cells"]) if row["partition"] == partition]
    at = {(row["epsilon_budget"], row["method"]): row for row in rows}
    budgets = dict.fromkeys(row["epsilon_budget"] for row in rows if name in row and row["epsilon_budget"] is not None)
    gains: dict[str, list[float]] = {method: [] for method in methods}
    for each in budgets or [None]:
        found = {method: at.get((each, method)) or at.get((None, method)) or {} for method in methods}
        shown = [_shown(row, name) if name in row else "failed" if row else "-" for row in found.values()]
        made.add_row("-" if each is None else f"{each:g}", *shown)
        for method in methods[1:]:
            ours, theirs = (found[one].get(name, 0.0) for one in (methods[0], method))
            if theirs > 0 and name in found[methods[0]]:
                higher = name not in _NOISES and found[method]["better"] == "higher"
                gains[method].append(ours / theirs - 1 if higher else 1 - ours / theirs)
    made.add_section()
    means = [f"{np.mean(values):+.2%}" if values else "-" for values in gains.values()]
    made.add_row("reduction" if name in _NOISES else "improvement", *means)
    return made


def _by_partition(cells: list[Row], partitions: list[str]) -> Table:
    """Table V: one row per budget and method, the headline and noise for every partition."""
    score = cells[0]["headline"]
    columns = [name for partition in partitions for name in (f"{partition}: {_title(score)}", "noise scale")]
    made = table("By partition", ["epsilon", "method", *columns], left=("method",))
    at = {(cell["epsilon_budget"], cell["method"], cell["partition"]): cell for cell in cells}
    for each, method in dict.fromkeys((cell["epsilon_budget"], cell["method"]) for cell in cells):
        found = [at.get((each, method, partition)) for partition in partitions]
        shown = [_shown(cell, name) if cell else "-" for cell in found for name in (score, "noise_scale")]
        made.add_row("-" if each is None else f"{each:g}", "no protection" if each is None else method, *shown)
    return made


def _privacy(cells: list[Row]) -> Table:
    columns = ("method", "budget", "guarantee", "proven", "claimed", "delta", "s/round")
    made = table("Privacy spent", columns, left=("method", "guarantee"))
    for cell in cells:
        figures = [number(cell["epsilon"]), number(cell["claimed_epsilon"]), f"{cell['delta']:g}"]
        made.add_row(cell["method"], budget(cell), cell["guarantee_status"], *figures, f"{cell['seconds']:.2f}")
    return made


def _differences(cells: list[Row], first: str) -> Table:
    columns = ("method", "budget", "partition", cells[0]["headline"], "noise scale", "claimed epsilon")
    made = table(f"Differences: {first} less the others", columns, left=("method", "partition"))
    for cell in cells:
        shown = [_difference(found, is_share(name)) for name, found in cell["differences"].items()]
        made.add_row(cell["method"], budget(cell), cell["partition"], *shown)
    return made


def _difference(found: Row | None, share: bool) -> str:
    """A difference as in "+1.20 (-0.31 to 2.71; p = 0.08)", shares in percentage points."""
    if found is None:
        return "-"
    mean, low, high = (found[name] * (100 if share else 1) for name in ("mean", "low", "high"))
    return f"{mean:+.3g} ({low:.3g} to {high:.3g}; p = {found['p']:.2g})"


def _title(name: str) -> str:
    return f"{name.capitalize()} in %" if is_share(name) else name.capitalize()


def _shown(cell: Row, name: str) -> str:
    """A figure with its spread, which one repetition does not have."""
    mean, spread, noise = cell[name], cell[f"{name}_std"], name in _NOISES
    if noise and mean == 0:
        return "-"
    if is_share(name):
        mean, spread, form = 100 * mean, 100 * spread, ".2f"
    else:
        form = ",.1f" if noise and mean >= 10 else ".3g" if noise else ".4g"
    return f"{mean:{form}}" + (f" ± {spread:{form if 'f' in form else '.2g'}}" if cell["seeds"] > 1 else "")
