"""A study's figures as frames, tables, pictures and paired tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedlgm.errors import ConfigError
from fedlgm.files import path_of, write_whole
from fedlgm.privacy.guarantee import caveat_of
from fedlgm_lab.studies import frames, joint
from fedlgm_lab.studies.records import FILE, NOT_KEPT, Records, writing
from fedlgm_lab.studies.statistics import LEVEL, Difference, difference, holm, over_cells
from fedlgm_lab.studies.study_rows import JointCost
from simulations.runs import strict_json

Sides = tuple[str, Any, Any]
"""Two sides to compare, as a key of the grid and two values of this key."""


@dataclass(frozen=True, repr=False)
class StudyDifference(Difference):
    """Difference between the figures of two sides, over all cells of the grid and in each cell.

    Attributes:
        mean, low, high, p, seeds: statistics of the seeds' differences (see `Difference`). A seed's
            difference is the difference between the two sides' means over the cells for which both
            sides have a figure. Only the seeds with the most such cells count; the statistics are
            NaN if there is only one such seed.
        cells: one row per cell: the grid's keys, mean, low, high (NaN for fewer than two seeds), p,
            `p_holm` (adjusted for the number of cells), seeds, `left_out` (number of further seeds
            for which a run diverged or failed), the proven epsilon of both sides, and `claimed`.
            The last is true if `p_holm` is below 0.05 and no seed is left out (runs that diverge
            are not a random sample). After a search, the difference must also keep its sign, with p
            below 0.05, when the searched value of both sides is one step lower and when it is one
            step higher.

    Example:
        >>> import pandas as pd
        >>> StudyDifference(0.1, 0.0, 0.2, 0.05, 3, pd.DataFrame({"claimed": [True, False]})).claimed
        False
    """

    cells: pd.DataFrame

    @property
    def claimed(self) -> bool:
        """Whether a difference may be claimed in every cell."""
        return bool(self.cells["claimed"].all())

    def _whole(self) -> str:
        interval = f"95 % interval {self.low:+.4g} to {self.high:+.4g}"
        return f"difference over all cells: {self.mean:+.4g}, {interval}, p = {self.p:.2g}, {self.seeds} seeds"

    def __repr__(self) -> str:
        return f"{self._whole()}\n{self.cells.to_string(index=False)}"

    def _repr_html_(self) -> str:
        return f"{self.cells.to_html(index=False)}<p>{self._whole()}</p>"


class Study:
    """Runs of a grid that have ended. The metrics are measured with the final models on the test
    set.

    `Study.read` reads the figures from the file `study.json` that every study writes into its
    folder; the frames of such a study have no seconds and no folders.

    Example:
        >>> import simulations, tempfile
        >>> found = simulations.study(
        ...     "digits", grid={"mechanism": ["uniform", "gaussian"]}, seeds=2, folder=tempfile.mkdtemp(),
        ...     overrides={"federation.rounds": 1, "federation.clients": 20, "training.epochs": 1},
        ... )
        >>> list(found.to_frame()["method"])
        ['uniform', 'uniform', 'gaussian', 'gaussian']

    Args:
        folder: folder of the run folders, or the file `study.json` from which the study was read.
        found: the figures.
    """

    def __init__(self, folder: Path, found: Records) -> None:
        self.folder, self.records = folder, found

    @classmethod
    def read(cls, path: Path | str) -> Study:
        """Read a study from its file, for tables, pictures and tests without the runs.

        Args:
            path: a `study.json`, or the folder that holds it.

        Raises:
            ConfigError: the folder has no `study.json`, or the file is of another kind.
        """
        file = path_of("path", path)
        if file.is_dir():
            file /= FILE
            if not file.exists():
                raise ConfigError(
                    f"{path} has no {FILE}, which a study writes at its end: repeat its call, "
                    "which does not repeat finished runs"
                )
        return cls(file, Records.read(file))

    @property
    def keys(self) -> list[str]:
        """Names of the columns that identify a cell: "method", the grid's keys and the keys of a
        search.
        """
        return list(self.records.keys)

    @property
    def compared_keys(self) -> list[str]:
        """Keys that must have equal values when methods are compared. The keys of a search are not
        among them, because their values are chosen for each method separately.
        """
        return [
            key for key in self.keys if key not in ("method", "mechanism", *self.records.searched)
        ]

    @property
    def headline(self) -> str:
        """The task's metric that summarises a run."""
        return self.records.headline

    @property
    def joint(self) -> JointCost:
        """The cost of publishing all runs (see `fedlgm_lab.studies.joint.together`)."""
        return self.records.joint

    @property
    def _frame(self) -> pd.DataFrame:
        return self.records.runs

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with one row per run: the method, the values of the grid's keys and all
        figures.

        The other columns are the seed; the run's status, and the reason if it has no figures; the
        proven, the claimed and the audited epsilon; `attack_tpr` (the largest share of units that
        an attack with 1 % false alarms can find); the guarantee's status; the metrics; the noise
        scale (l2 norm of the noise in each round's mean, summed over the rounds); the seconds that
        the rounds took; and the folder.
        """
        return self._frame.copy()

    def history(self) -> pd.DataFrame:
        """Return a frame with one row per run and round: the values of the keys, the seed, the
        number of the round and the round's public figures.

        Raises:
            ConfigError: the study's file holds no rounds.
        """
        if self.records.rounds is None:
            raise ConfigError(
                "this study's file holds no rounds: plot over a key of its grid, or open the study "
                "from its runs"
            )
        return self.records.rounds

    def table(self, metrics: str | Sequence[str] | None = None) -> pd.DataFrame:
        """Return a frame with one row per cell: the keys, the number n of finished runs, then the
        mean, the 95 % Student interval and the standard deviation of each metric.

        Args:
            metrics: a name, or a list of names; default: the task's headline and the requested
                metrics.
        """
        return frames.cells(self._frame, self.keys, self._metrics(metrics))

    def to_latex(
        self, path: Path | str | None = None, metrics: str | Sequence[str] | None = None
    ) -> str:
        """Format the table in LaTeX (package booktabs), with the mean of each metric, half the
        width of its 95 % interval, the epsilon and the status of the guarantee.

        Args:
            path: file to write as well.
            metrics: see `table`.

        Raises:
            ConfigError: a metric is unknown, or the file's name does not end in .tex.
            RunError: the file cannot be written.
        """
        if path is not None and path_of("path", path).suffix != ".tex":
            raise ConfigError(f"the file of a LaTeX table must end in .tex, got {str(path)!r}")
        text = f"% {self._privacy_note()}\n" + frames.latex(
            self.table(metrics), self.keys, self._metrics(metrics)
        )
        if path is not None:
            write_whole(
                path_of("path", path), lambda partial: partial.write_text(text, encoding="utf-8")
            )
        return text

    def plot(
        self,
        path: Path | str | None = None,
        *,
        x: str | None = None,
        hue: str | Sequence[str] | None = None,
        y: str | None = None,
        spread: str = "interval",
        labels: Mapping[str, str] | None = None,
    ) -> Figure:
        """Draw the mean and the spread of a metric over the seeds, against a key of the grid or
        against the rounds.

        Args:
            path: PNG, SVG or PDF to write.
            x: a key of the grid, or "round"; default: the first key with several values, or else
                "round".
            hue: key, or keys, of the grid; each combination of their values has a separate line.
                Figures are then averaged over all other keys, which the legend names. Default: all
                keys with several values, so that no line joins different settings.
            y: metric; default: the task's headline.
            spread: "interval" (95 %, Student) or "std".
            labels: texts to show instead of methods, keys and metrics.

        Raises:
            ConfigError: a key, metric, spread or kind of file is unknown.
        """
        from fedlgm_lab.studies import drawing

        return drawing.draw(self, path, x, hue, y or self.headline, spread, labels or {})

    def write(
        self,
        content: Mapping[str, Any],
        metrics: list[str] | None = None,
        x: str | None = None,
        y: str | None = None,
    ) -> str:
        """Write the study's tables and picture into its folder, and return a line of text with the
        names of the files.

        Args:
            content: values of the study's `study.json`.
            metrics: metrics of the LaTeX table, see `table`.
            x: horizontal axis of the picture, see `plot`.
            y: metric of the picture, see `plot`.

        Raises:
            RunError: the system refuses a file.
        """
        csv, latex, picture, json = (
            self.folder / name for name in ("runs.csv", "table.tex", "study.svg", FILE)
        )
        with writing(self.folder):
            strict_json.write(json, content, indent=1)
            self._frame.drop(columns=NOT_KEPT).to_csv(csv, index=False)
            self.to_latex(latex, metrics)
            self.plot(picture, x=x, y=y)
        return f"files: {csv}, {latex}, {picture}, {json}"

    def difference(
        self,
        a: Any,
        b: Any,
        metric: str | None = None,
        at: Mapping[str, Any] | None = None,
        by: str | None = None,
    ) -> StudyDifference:
        """Compute the difference between the figures of two methods, two models, or two values of
        another key, paired by seed.

        Args:
            a: label of a method or model, or a value of another key of the grid.
            b: another label or value of the same key.
            metric: metric to compare; default: the task's headline.
            at: values of the grid's keys that cells must have; default: all cells.
            by: key of the grid that is compared, such as "model"; default: the first key that has
                both values.

        Raises:
            ConfigError: a label, key or metric is unknown, or there is no cell for which both sides
                have at least two seeds.
        """
        name = metric or self.headline
        by = by or self._key_of(a, b)
        if by not in self.keys:
            raise ConfigError(
                f"by: {by!r} is not a key of this study; it has {', '.join(self.keys)}"
            )
        for label in (a, b):
            if label not in (labels := frames.values_of(self._frame, by)):
                raise ConfigError(
                    f"no {by} {label!r} in this study; it has {', '.join(map(str, labels))}"
                )
        frames.check_metric(self._frame, frames.metrics_of(self._frame, self.keys), name)
        others = (
            self.compared_keys
            if by in ("method", "mechanism")
            else ["method", *(key for key in self.compared_keys if key != by)]
        )
        return _differences(self._frame, self.records.beside, (by, a, b), name, others, at or {})

    def _key_of(self, a: Any, b: Any) -> str:
        """Find the first key that has both values. If no key has both, return the first key with
        several values, so that the caller's message lists them.
        """
        by_key = {
            key: frames.values_of(self._frame, key) for key in ("method", *self.compared_keys)
        }
        holding = [key for key, values in by_key.items() if a in values and b in values]
        varied = [key for key, values in by_key.items() if len(values) > 1]
        return next(iter((*holding, *varied)), "method")

    @property
    def search(self) -> pd.DataFrame:
        """A frame of the search, with the headline's mean and interval and the number n of runs for
        every method and value; it marks the chosen values.

        Raises:
            ConfigError: the study has no search.
        """
        if self.records.search is None:
            raise ConfigError("this study searched nothing: give search={recipe key: values}")
        return self.records.search.copy()

    def _metrics(self, wanted: str | Sequence[str] | None) -> list[str]:
        available = frames.metrics_of(self._frame, self.keys)
        if wanted is None:
            wanted = [name for name in self.records.shown if name in available]
        elif isinstance(wanted, str):
            wanted = [wanted]
        unknown = [name for name in wanted if name not in available]
        if unknown:
            raise ConfigError(
                f"no metric {unknown[0]!r} in this study; it has {', '.join(available)}"
            )
        return list(wanted)

    def __repr__(self) -> str:
        without = int((self._frame["status"] != "finished").sum())
        lost = f", {without} without figures" if without else ""
        head = f"Study({len(self._frame)} runs{lost}; {self.folder})"
        return f"{head}\n{self._short_table().to_string(index=False)}\n{self._privacy_note()}"

    def _repr_html_(self) -> str:
        return f"{self._short_table().to_html(index=False)}<p>{self._privacy_note()}</p>"

    def _short_table(self) -> pd.DataFrame:
        return self.table().drop(columns="mechanism", errors="ignore")  # "method" says the same

    def _privacy_note(self) -> str:
        seeded = bool((self._frame["noise_reproducible"] == True).any())  # noqa: E712  (missing where there are no figures)
        caveat = caveat_of(seeded).strip(" ,;()")
        return joint.sentence(self.joint) + (f"; {caveat}" if caveat else "")


def _differences(
    frame: pd.DataFrame,
    shifted: Sequence[pd.DataFrame] | None,
    sides: Sides,
    metric: str,
    keys: list[str],
    at: Mapping[str, Any],
) -> StudyDifference:
    for key, value in at.items():
        if key not in keys:
            raise ConfigError(
                f"at: {key!r} is not a key of the grid; it has {', '.join(keys) or 'no other'}"
            )
        values = frames.values_of(frame, key)
        if frames.name_of(value) not in map(frames.name_of, values):
            raise ConfigError(
                f"at: no {key} = {value!r} in this study; it has {', '.join(map(str, values))}"
            )
    rows, pairs = [], []
    for cell in frames.cells_of(frame, keys, at):
        both, epsilons = pair_seeds(frame, cell, sides, metric)
        lost = left_out(frame, cell, sides, both)
        if len(both) < 2 and not lost:
            continue
        tested = Difference(*(float("nan"),) * 3, 1.0, len(both))
        if len(both) > 1:
            tested = difference(both["a"], both["b"])
        beside = [(other, pair_seeds(other, cell, sides, metric)[0]) for other in shifted or ()]
        held = all(
            len(pair) > 1
            and not left_out(other, cell, sides, pair)
            and _same_sign(difference(pair["a"], pair["b"]), tested)
            for other, pair in beside
        )
        rows.append(
            {
                **cell,
                "mean": tested.mean,
                "low": tested.low,
                "high": tested.high,
                "p": tested.p,
                "p_holm": 1.0,
                "seeds": tested.seeds,
                "left_out": lost,
                "epsilon_a": epsilons[0],
                "epsilon_b": epsilons[1],
                "claimed": held and not lost,
            }
        )
        pairs += both.itertuples(name=None)
    if not any(row["seeds"] > 1 for row in rows):
        raise ConfigError(
            f"{sides[1]!r} and {sides[2]!r} have no cell with at least two seeds of both: run more "
            "seeds"
        )
    cells = pd.DataFrame(rows)
    cells["p_holm"] = holm(cells["p"].tolist())
    cells["claimed"] &= cells["p_holm"] < LEVEL
    return StudyDifference(**vars(over_cells(pairs)), cells=cells)


def left_out(frame: pd.DataFrame, cell: Mapping[str, Any], sides: Sides, both: pd.DataFrame) -> int:
    """Count the seeds of a cell for which a side has no figure; 0 if a side has no runs in the
    cell.
    """
    by, *values = sides
    seeds = [{*frames.at(frame, {by: value, **cell})["seed"]} for value in values]
    return len(set.union(*seeds) - {*both.index}) if all(seeds) else 0


def _same_sign(actual: Difference, wanted: Difference) -> bool:
    return actual.p < LEVEL and actual.mean * wanted.mean > 0


def pair_seeds(
    frame: pd.DataFrame, cell: Mapping[str, Any], sides: Sides, metric: str
) -> tuple[pd.DataFrame, list[float]]:
    """Collect a cell's figures, as columns "a" and "b" for the two sides, for the seeds for which
    both sides have a figure. Also return the largest proven epsilon of each side.
    """
    if metric not in frame:  # a frame without runs
        return pd.DataFrame(columns=["a", "b"]), []
    by, *values = sides
    figures, epsilons = [], []
    for value in values:
        rows = frames.at(frame, {by: value, **cell})
        rows = rows[np.isfinite(rows[metric].astype(float))]
        figures.append(rows.set_index("seed")[metric].astype(float))
        epsilons.append(float(rows["epsilon"].max()) if len(rows) else float("nan"))
    return pd.concat(figures, axis=1, keys=["a", "b"], join="inner"), epsilons
