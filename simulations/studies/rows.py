"""Rows of a comparison: figures of its runs, of its cells and of all runs together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

if TYPE_CHECKING:
    from simulations.attacks.rows import AttackedCell, AttackedRun

    Run = TypeVar("Run", "ComparedRun", AttackedRun)


class ComparedFigures(TypedDict, total=False):
    """Figures that a run and a cell have in common.

    Attributes:
        method, epsilon_budget, partition: keys of a cell; runs without privacy have no budget.
        averaged_rounds: evaluated rounds that the headline is averaged over.
        headline, better: name of the task's metric that summarises a run, and "higher" or "lower". The figure itself is
            stored under that name, see `score`.
        noise_scale: sum over the rounds of the l2 norm of the noise in the round's mean.
        model_noise: l2 norm of the noise in the sum of all rounds' means, root mean square.
        seconds: median wall time of a round; not kept in the comparison's file.
        epsilon, claimed_epsilon, delta, guarantee, guarantee_status, noise_reproducible: as in `RunSummary`.
        last: means over the last evaluated rounds, by name and repetition; not written.
    """

    method: str
    epsilon_budget: float | None
    partition: str
    averaged_rounds: int
    headline: str
    better: str
    noise_scale: float
    model_noise: float
    seconds: float
    epsilon: float
    claimed_epsilon: float
    delta: float
    guarantee: str
    guarantee_status: str
    noise_reproducible: bool
    last: dict[str, dict[int, float]]


class ComparedRun(ComparedFigures, total=False):
    """One run; it also has the headline of its last round under "final_" and its name.

    Attributes:
        repetition: number of the repetition, from 0.
        skipped_rounds: rounds that released nothing.
        run: its folder.
    """

    repetition: int
    skipped_rounds: int
    run: str


class ComparedDifference(TypedDict):
    """`simulations.difference` of two cells.

    Attributes:
        mean, low, high, p, seeds: as in `Difference`.
    """

    mean: float
    low: float
    high: float
    p: float
    seeds: int


class ComparedCell(ComparedFigures, total=False):
    """All repetitions of a method at a budget and partition; epsilons are the largest among them.

    Attributes:
        seeds: number of repetitions.
        noise_scale_std, model_noise_std, seconds_std: standard deviations over them; the headline has one likewise.
        differences: the first method's figures less this one's, by figure; None if fewer than two repetitions have
            both.
    """

    seeds: int
    noise_scale_std: float
    model_noise_std: float
    seconds_std: float
    differences: dict[str, ComparedDifference | None]


class FailedRun(TypedDict):
    """A run without figures, such as one that diverged.

    Attributes:
        method, epsilon_budget, partition, repetition, run: as in `ComparedRun`.
        message: why.
    """

    method: str
    epsilon_budget: float | None
    partition: str
    repetition: int
    message: str
    run: str


class JointCost(TypedDict):
    """The joint cost of all runs.

    Attributes:
        epsilon: epsilon of all runs; infinite if one is not private, None if there is no joint figure.
        epsilon_protected: epsilon of the runs whose releases are private; None if there is no joint figure.
        why: why there is none.
        runs, runs_protected: their numbers.
        delta: the largest among the recipes.
    """

    epsilon: float | None
    epsilon_protected: float | None
    why: str | None
    runs: int
    runs_protected: int
    delta: float


class Comparison(TypedDict, total=False):
    """Figures of a finished set of runs.

    Attributes:
        methods: in the requested order.
        out: folder of the run folders.
        runs, cells, together: see their types.
        failed: runs without figures; they are in no cell.
        caveats: limits of the figures.
        pictures: name -> file.
        attacks: findings of attacks, if requested.
    """

    methods: list[str]
    out: str
    runs: list[ComparedRun]
    cells: list[ComparedCell]
    failed: list[FailedRun]
    together: JointCost
    caveats: list[str]
    pictures: dict[str, str]
    attacks: list[AttackedCell]


def by_cell(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each cell (one method at one budget and partition), in order of first appearance."""
    cells: dict[tuple[str, float | None, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run["method"], run["epsilon_budget"], run["partition"]), []).append(run)
    return list(cells.values())


def score(row: ComparedFigures) -> float:
    """The headline of a run or cell."""
    return float(cast(Mapping[str, Any], row)[row["headline"]])


def score_spread(cell: ComparedCell) -> float:
    """Standard deviation of the headline over a cell's repetitions."""
    return float(cast(Mapping[str, Any], cell)[f"{cell['headline']}_std"])
