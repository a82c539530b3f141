"""Tables and curves of a compared set of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from simulations.reports.headline import headline, is_share
from simulations.reports.svg import save
from simulations.reports.terminal import number
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow
from simulations.studies.jobs import Job
from simulations.studies.noise import model_noise
from simulations.studies.rows import ComparedCell, ComparedDifference, Comparison, JointCost, score, score_spread
from simulations.tables import table

_NoiseName = Literal["noise_scale", "model_noise"]
_CURVES = {
    "noise": "noise scale, cumulated",
    "model_noise": "noise of the model",
    "epsilon": "epsilon (solid: proven, dashed: claimed)",
}
_CUMULATED: dict[str, Callable[[RunFolder, list[FullRow]], np.ndarray]] = {
    "noise": lambda _, rows: np.cumsum([row["noise_scale"] for row in rows]),
    "model_noise": model_noise,
}
_NOISES: dict[_NoiseName, str] = {"noise_scale": "Noise scale", "model_noise": "Noise of the model"}


def tables(summary: Comparison) -> Group:
    """The LaDP-FL paper's Tables II (accuracy), III (noise), V (partitions) and VIII (significance); privacy spent."""
    cells, methods = summary["cells"], summary["methods"]
    partitions = list(dict.fromkeys(cell["partition"] for cell in cells))
    parts: list[Any] = []
    for partition in partitions:
        here = [cell for cell in cells if cell["partition"] == partition]
        lost = {(run["epsilon_budget"], run["method"]) for run in summary["failed"] if run["partition"] == partition}
        parts.append(_by_budget(here, methods, lost, f"{_title(cells[0])} ({partition})", _score, _improvement))
        for name, title in _NOISES.items():
            show, gain = partial(_noise, name=name), partial(_reduction, name=name)
            parts.append(_by_budget(here, methods, lost, f"{title} ({partition})", show, gain))
    parts += [_by_partition(cells, methods, partitions)] if len(partitions) > 1 else []
    parts.append(_privacy(cells))
    averaged = min(cell["averaged_rounds"] for cell in cells)
    rounds = "the last evaluated round" if averaged == 1 else f"the last {averaged} evaluated rounds"
    notes = (
        f"{cells[0]['headline']}: mean of {rounds}, then mean and standard deviation over "
        "the repetitions; noise scale: l2 norm of the noise in each round's mean, summed over the rounds; noise of the "
        "model: l2 norm of the noise in all rounds' means together; improvement and reduction: of the first method "
        "over the column's, averaged over the budgets"
    )
    if any(found is not None for cell in cells for found in cell["differences"].values()):
        parts.append(_differences(cells, methods[0]))
        notes += (
            f"; differences: {methods[0]} less the row's method, paired by repetition, with the 95 % Student interval "
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
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    everything = list(dict.fromkeys((job.epsilon, job.partition) for job in done))
    scenes = [scene for scene in everything if scene[0] is not None] or everything
    folders = {job.folder: RunFolder.open(out / job.folder) for job in done}
    runs = {name: (folder, folder.rows()) for name, folder in folders.items()}
    paths = {}
    score = done[0].recipe.task.build().headline
    for name, label in ({score: f"test {score}"} | _CURVES).items():
        figure, grid = plt.subplots(1, len(scenes), figsize=(5.5 * len(scenes), 4), squeeze=False)
        for axes, (epsilon, partition) in zip(grid[0], scenes, strict=True):
            here = [job for job in done if job.partition == partition and job.epsilon in (epsilon, None)]
            for index, method in enumerate(dict.fromkeys(job.method for job in here)):
                own = [runs[job.folder] for job in here if job.method == method]
                _curve(axes, name, own, method, f"C{index}")
            title = partition if epsilon is None else f"{partition}, epsilon = {epsilon:g}"
            axes.set(xlabel="round", ylabel=label, title=title)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        figure.tight_layout()
        paths[name] = str(save(figure, out / f"{name}.png"))
        plt.close(figure)
    return paths


def _curve(axes: Any, name: str, runs: list[tuple[RunFolder, list[FullRow]]], label: str, colour: str) -> None:
    """One method's line: mean over its runs, with the range between them."""
    if name in _CUMULATED:
        rounds = [row["round"] for row in runs[0][1]]
        values = np.array([_CUMULATED[name](*run) for run in runs])
    else:
        seen = [[row for row in rows if "loss" in row] for _, rows in runs]
        rounds = [row["round"] for row in seen[0]]
        values = np.array([[row["epsilon"] if name == "epsilon" else headline(row)[1] for row in run] for run in seen])
        if name == "epsilon":
            claimed = np.array([[row["claimed_epsilon"] for row in run] for run in seen])
            axes.plot(rounds, claimed.mean(axis=0), color=colour, linestyle="--", alpha=0.7)
    if np.isfinite(values).all():
        axes.plot(rounds, values.mean(axis=0), color=colour, label=label)
        axes.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    else:
        axes.plot([], [], color=colour, label=f"{label} (proven: none)")


def _by_budget(
    cells: list[ComparedCell],
    methods: list[str],
    lost: set[tuple[float | None, str]],
    title: str,
    show: Callable[[ComparedCell], str],
    gain: Callable[[ComparedCell, ComparedCell], float | None],
) -> Table:
    """Tables II and III: rows are budgets, columns methods; then the reference's average gain over each method."""
    made = table(title, ["epsilon", *methods])
    at = {(cell["epsilon_budget"], cell["method"]): cell for cell in cells}
    budgets = list(dict.fromkeys(cell["epsilon_budget"] for cell in cells if cell["epsilon_budget"] is not None))
    lines: list[float | None] = [*budgets] or [None]
    gains: dict[str, list[float]] = {method: [] for method in methods}
    for budget in lines:
        found = {m: at.get((budget, m)) or at.get((None, m)) for m in methods}
        shown = [
            show(cell) if cell else "failed" if lost & {(budget, method), (None, method)} else "-"
            for method, cell in found.items()
        ]
        made.add_row("-" if budget is None else f"{budget:g}", *shown)
        reference = found[methods[0]]
        for method, cell in found.items():
            value = gain(reference, cell) if reference and cell and cell is not reference else None
            if value is not None:
                gains[method].append(value)
    made.add_section()
    means = [f"{np.mean(values):+.2%}" if values else "-" for values in gains.values()]
    made.add_row("improvement" if show is _score else "reduction", *means)
    return made


def _by_partition(cells: list[ComparedCell], methods: list[str], partitions: list[str]) -> Table:
    """Table V: one row per budget and method, the headline and noise for every partition."""
    figures = [name for partition in partitions for name in (f"{partition}: {_title(cells[0])}", "noise scale")]
    made = table("By partition", ["epsilon", "method", *figures], left=("method",))
    at = {(c["epsilon_budget"], c["method"], c["partition"]): c for c in cells}
    for budget, method in dict.fromkeys((c["epsilon_budget"], c["method"]) for c in cells):
        found = [at.get((budget, method, partition)) for partition in partitions]
        shown = [text for cell in found for text in ((_score(cell), _noise(cell)) if cell else ("-", "-"))]
        name = "no protection" if budget is None else method
        made.add_row("-" if budget is None else f"{budget:g}", name, *shown)
    return made


def _privacy(cells: list[ComparedCell]) -> Table:
    columns = ("method", "budget", "guarantee", "proven", "claimed", "delta", "s/round")
    made = table("Privacy spent", columns, left=("method", "guarantee"))
    for cell in cells:
        budget = "-" if cell["epsilon_budget"] is None else f"{cell['epsilon_budget']:g}"
        figures = [number(cell["epsilon"]), number(cell["claimed_epsilon"]), f"{cell['delta']:g}"]
        made.add_row(cell["method"], budget, cell["guarantee_status"], *figures, f"{cell['seconds']:.2f}")
    return made


def _differences(cells: list[ComparedCell], first: str) -> Table:
    columns = ("method", "budget", "partition", cells[0]["headline"], "noise scale", "claimed epsilon")
    made = table(f"Differences: {first} less the others", columns, left=("method", "partition"))
    for cell in cells:
        if all(found is None for found in cell["differences"].values()):
            continue  # the first method's own, and those that have no runs to be compared with
        budget = "-" if cell["epsilon_budget"] is None else f"{cell['epsilon_budget']:g}"
        shares = [is_share(cell["headline"]), False, False]
        shown = [_difference(*pair) for pair in zip(cell["differences"].values(), shares, strict=True)]
        made.add_row(cell["method"], budget, cell["partition"], *shown)
    return made


def _difference(found: ComparedDifference | None, share: bool) -> str:
    """A difference as in "+1.20 (-0.31 to 2.71; p = 0.08)", shares in percentage points."""
    if found is None:
        return "-"
    mean, low, high = (value * (100 if share else 1) for value in (found["mean"], found["low"], found["high"]))
    return f"{mean:+.3g} ({low:.3g} to {high:.3g}; p = {found['p']:.2g})"


def _title(cell: ComparedCell) -> str:
    name = cell["headline"]
    return f"{name.capitalize()} in %" if is_share(name) else name.capitalize()


def _score(cell: ComparedCell) -> str:
    mean, spread = score(cell), score_spread(cell)
    if is_share(cell["headline"]):
        return _with_spread(cell, f"{100 * mean:.2f}", f"{100 * spread:.2f}")
    return _with_spread(cell, f"{mean:.4g}", f"{spread:.2g}")


def _noise(cell: ComparedCell, name: _NoiseName = "noise_scale") -> str:
    if cell[name] == 0:
        return "-"
    spread = cell["noise_scale_std"] if name == "noise_scale" else cell["model_noise_std"]
    if cell[name] >= 10:
        return _with_spread(cell, f"{cell[name]:,.1f}", f"{spread:,.1f}")
    return _with_spread(cell, f"{cell[name]:.3g}", f"{spread:.2g}")


def _with_spread(cell: ComparedCell, mean: str, spread: str) -> str:
    """A mean with its spread, which one repetition does not have."""
    return f"{mean} ± {spread}" if cell["seeds"] > 1 else mean


def _improvement(reference: ComparedCell, cell: ComparedCell) -> float | None:
    """Relative gain of the reference, positive if it is better."""
    ours, theirs = score(reference), score(cell)
    if not theirs > 0:
        return None
    return float(ours / theirs - 1) if cell["better"] == "higher" else float(1 - ours / theirs)


def _reduction(reference: ComparedCell, cell: ComparedCell, name: _NoiseName) -> float | None:
    return float(1 - reference[name] / cell[name]) if cell[name] > 0 else None
