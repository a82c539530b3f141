"""The figures of a study, from its run folders or from its file `study.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import explain_failure
from fedlgm_lab.studies import frames
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.joint import together
from fedlgm_lab.studies.search import Search, Shift
from fedlgm_lab.studies.study_rows import JointCost
from simulations.config.assembly import Assembly
from simulations.runs import strict_json

FILE = "study.json"
"""Name of the file in a study's folder that holds the study's figures."""
NOT_KEPT = ["seconds", "folder"]
"""Columns that files omit: wall times show how many clients took part, and folders are local paths.
"""


@dataclass(frozen=True)
class Searched:
    """A finished search.

    Attributes:
        search: the values that were tried.
        jobs: the runs of the search.
        shifted: final runs at the values next to the chosen values, by step.
    """

    search: Search
    jobs: Sequence[Job]
    shifted: Mapping[Shift, Sequence[Job]]


@dataclass(frozen=True)
class Records:
    """The figures of a study, from its runs or from its file `study.json`.

    Attributes:
        keys: columns that identify a cell.
        headline: the task's metric that summarises a run.
        shown: metrics that a table shows if the caller names none.
        joint: see `Study.joint`.
        runs: see `Study.to_frame`.
        rounds: see `Study.history`; None if the file holds none.
        searched: keys of the search; empty if there was no search.
        search: see `Study.search`; None if there was no search.
        beside: frames of the final runs at the values next to the chosen values, one for each step;
            None if there was no search.
    """

    keys: Sequence[str]
    headline: str
    shown: Sequence[str]
    joint: JointCost
    runs: pd.DataFrame
    rounds: pd.DataFrame | None = None
    searched: Sequence[str] = ()
    search: pd.DataFrame | None = None
    beside: Sequence[pd.DataFrame] | None = None

    @classmethod
    def of_runs(
        cls,
        folder: Path,
        jobs: Sequence[Job],
        failed: Mapping[str, str] | None = None,
        before: Searched | None = None,
    ) -> Records:
        """Collect the figures of runs that have ended.

        Args:
            folder: folder of the run folders.
            jobs: the runs.
            failed: reasons why runs have no figures, by name of their folder.
            before: the search that preceded these runs, if there was one.
        """
        task = Assembly(jobs[0].recipe, jobs[0].own).data.task
        keys = list(dict.fromkeys(["method", *(key for job in jobs for key in job.point)]))
        headline = str(task.headline)
        shown = dict.fromkeys([headline, *task.set_metrics(), *(jobs[0].own.metrics or {})])

        def frame(some: Sequence[Job]) -> pd.DataFrame:
            return frames.runs(some, folder, failed or {}, keys, headline)

        further: list[Job] = []
        if before is not None:
            shifted = [job for beside in before.shifted.values() for job in beside]
            further = [*before.jobs, *shifted]
        every = {job.folder: job for job in (*jobs, *further)}
        records = cls(
            keys,
            headline,
            list(shown),
            together(list(every.values()), folder),
            frame(jobs),
            frames.history(jobs, folder, keys),
        )
        if before is None:
            return records
        return replace(
            records,
            searched=list(before.search.axes),
            search=_search_table(before.search, frame(before.jobs), jobs, keys, headline),
            beside=[frame(beside) for beside in before.shifted.values()],
        )

    @classmethod
    def read(cls, path: Path | str) -> Records:
        """Read the figures from a file.

        Raises:
            ConfigError: the file does not exist, or is of another kind.
        """
        try:
            content = strict_json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            what = f"{path} is not a study.json of fedlgm"
            raise ConfigError(explain_failure(what, error)) from error
        lost = {"keys", "headline", "runs"} - (
            content.keys() if isinstance(content, dict) else set()
        )
        if lost:
            raise ConfigError(f"{path} is not a study.json of fedlgm: it has no {min(lost)}")
        return cls.of_values(content)

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Records:
        """Rebuild the figures that `plain_values` converted to these values."""
        searched = values.get("searched", ())
        return cls(
            values["keys"],
            str(values["headline"]),
            values.get("shown", ()),
            values.get("joint", {}),
            _frame(values["runs"]),
            _frame(values["rounds"]) if values.get("rounds") else None,
            searched,
            _frame(values["search"]) if searched and "search" in values else None,
            [_frame(rows) for rows in values.get("beside", ())] if searched else None,
        )


def _search_table(
    search: Search, runs: pd.DataFrame, chosen: Sequence[Job], keys: Sequence[str], headline: str
) -> pd.DataFrame:
    """Make a table of a search's cells. Column "chosen" marks the chosen cells; column "edge" names
    the keys of which a cell has the lowest or highest value.
    """
    table = frames.cells(runs, keys, [headline])
    names = {
        (job.method, *(frames.name_of(job.point.get(key)) for key in keys[1:])) for job in chosen
    }
    rows = table.to_dict("records")
    table["chosen"] = [tuple(frames.name_of(row[key]) for key in keys) in names for row in rows]
    table["edge"] = [", ".join(search.edges(search.at(row))) for row in rows]
    return table


def plain_values(records: Records, rounds: Sequence[str] = ()) -> dict[str, Any]:
    """Convert figures to values that JSON can hold, which `Records.of_values` reads.

    Args:
        records: a study's records.
        rounds: columns of the rounds to include in addition to the keys; rounds without these
            figures are left out.
    """
    values: dict[str, Any] = {
        "keys": list(records.keys),
        "headline": records.headline,
        "shown": list(records.shown),
        "joint": dict(records.joint),
        "runs": rows_of(records.runs.drop(columns=NOT_KEPT)),
    }
    history = records.rounds
    # the columns are missing if no run has completed a round
    if rounds and history is not None and {*rounds} <= {*history}:
        values["rounds"] = rows_of(
            history.dropna(subset=list(rounds))[[*records.keys, "seed", "round", *rounds]]
        )
    if records.search is not None:
        beside = [rows_of(frame.drop(columns=NOT_KEPT)) for frame in records.beside or ()]
        values |= {
            "searched": list(records.searched),
            "search": rows_of(records.search),
            "beside": beside,
        }
    return values


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Run a block of code that writes a study's files, and turn an error of the system into an
    error that names a remedy.

    Raises:
        RunError: the system refuses a file.
    """
    try:
        yield
    except OSError as error:
        remedy = (
            "its finished runs are kept, and the same call writes the tables once the folder can "
            "be written"
        )
        what = f"cannot write the study's tables to {folder}"
        raise RunError(explain_failure(what, error, remedy)) from error


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Convert the rows of a frame to plain values; missing values become None."""
    return [
        {key: None if value != value else value for key, value in row.items()}  # NaN
        for row in frame.astype(object).to_dict(orient="records")
    ]


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Make a frame of rows; lists become tuples, as in the frame of the runs."""
    return pd.DataFrame(
        [
            {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
            for row in rows
        ]
    )
