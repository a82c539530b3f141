"""Sources of a study's figures: its run folders, or the file that the command keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pandas as pd

from fedlgm.errors import ConfigError, RunError
from fedlgm_lab.studies import frames
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.joint import together
from fedlgm_lab.studies.search import Search, Shift
from fedlgm_lab.studies.study_rows import JointCost
from simulations.config.assembly import Assembly
from simulations.runs import strict_json

FILE = "study.json"
"""File of a study's figures, in its folder."""
NOT_KEPT = ["seconds", "folder"]
"""Columns that files omit, because wall times show how many clients took part."""


@dataclass(frozen=True)
class Searched:
    """A finished search.

    Attributes:
        search: the tried values.
        jobs: its runs.
        shifted: runs at the values next to the chosen ones, by step.
    """

    search: Search
    jobs: Sequence[Job]
    shifted: Mapping[Shift, Sequence[Job]]


@dataclass(frozen=True)
class RunRecords:
    """Figures of finished runs.

    Attributes:
        folder: folder of the run folders.
        jobs: the runs, all of which have ended.
        failed: reasons why runs have no figures, by name of their folder.
        before: the preceding search.
    """

    folder: Path
    jobs: Sequence[Job]
    failed: Mapping[str, str] = field(default_factory=dict)
    before: Searched | None = None

    @cached_property
    def _task(self) -> Any:
        return Assembly(self.jobs[0].recipe, self.jobs[0].own).data.task

    @cached_property
    def keys(self) -> Sequence[str]:
        """Key columns of the cells."""
        return list(dict.fromkeys(["method", *(key for job in self.jobs for key in job.point)]))

    @property
    def headline(self) -> str:
        """The task's metric that summarises a run."""
        return str(self._task.headline)

    @property
    def shown(self) -> Sequence[str]:
        """Metrics of the table, if none are named."""
        return list(
            dict.fromkeys(
                [self.headline, *self._task.set_metrics(), *(self.jobs[0].own.metrics or {})]
            )
        )

    @cached_property
    def runs(self) -> pd.DataFrame:
        """See `Study.to_frame`."""
        return self._frame(self.jobs)

    @property
    def rounds(self) -> pd.DataFrame:
        """See `Study.history`."""
        return frames.history(self.jobs, self.folder, self.keys)

    @cached_property
    def joint(self) -> JointCost:
        """See `Study.joint`."""
        further: list[Job] = []
        if self.before is not None:
            further = [
                *self.before.jobs,
                *(job for jobs in self.before.shifted.values() for job in jobs),
            ]
        return together(
            list({job.folder: job for job in (*self.jobs, *further)}.values()), self.folder
        )

    @property
    def searched(self) -> Sequence[str]:
        """Keys of the search; empty if there was none."""
        return [] if self.before is None else list(self.before.search.axes)

    @cached_property
    def beside(self) -> Sequence[pd.DataFrame] | None:
        """Frames of the runs at neighbouring values of a search, one for each step; None if there
        was none.
        """
        return (
            None
            if self.before is None
            else [self._frame(jobs) for jobs in self.before.shifted.values()]
        )

    @property
    def search(self) -> pd.DataFrame | None:
        """See `Study.search`; None if there was none."""
        if self.before is None:
            return None
        search = self.before.search
        table = frames.cells(self._frame(self.before.jobs), self.keys, [self.headline])
        chosen = {
            (job.method, *(frames.name_of(job.point.get(key)) for key in self.keys[1:]))
            for job in self.jobs
        }
        rows = table.to_dict("records")
        names = [tuple(frames.name_of(row[key]) for key in self.keys) for row in rows]
        table["chosen"] = [name in chosen for name in names]
        table["edge"] = [", ".join(search.edges(search.at(row))) for row in rows]
        return table

    def _frame(self, jobs: Sequence[Job]) -> pd.DataFrame:
        return frames.runs(jobs, self.folder, self.failed, self.keys, self.headline)


@dataclass(frozen=True)
class KeptRecords:
    """Figures of a study's file.

    Attributes:
        kept: values of the file (see `kept`).
    """

    kept: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path | str) -> KeptRecords:
        """The records of a file.

        Raises:
            ConfigError: the file does not exist, or is of another kind.
        """
        try:
            content = strict_json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{path} is not a study.json of fedlgm: {why}") from error
        lost = {"keys", "headline", "runs"} - (
            content.keys() if isinstance(content, dict) else set()
        )
        if lost:
            raise ConfigError(f"{path} is not a study.json of fedlgm: it has no {min(lost)}")
        return cls(content)

    @property
    def keys(self) -> Sequence[str]:
        """See `RunRecords`."""
        return list(self.kept["keys"])

    @property
    def headline(self) -> str:
        """See `RunRecords`."""
        return str(self.kept["headline"])

    @property
    def shown(self) -> Sequence[str]:
        """See `RunRecords`."""
        return list(self.kept["shown"])

    @cached_property
    def runs(self) -> pd.DataFrame:
        """See `RunRecords`."""
        return _frame(self.kept["runs"])

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """See `RunRecords`."""
        if not self.kept.get("rounds"):
            raise ConfigError(
                "this study's file holds no rounds: plot over a key of its grid, or open the study "
                "from its runs"
            )
        return _frame(self.kept["rounds"])

    @property
    def joint(self) -> JointCost:
        """See `RunRecords`."""
        return cast(JointCost, self.kept["joint"])

    @property
    def searched(self) -> Sequence[str]:
        """See `RunRecords`."""
        return list(self.kept.get("searched", ()))

    @cached_property
    def search(self) -> pd.DataFrame | None:
        """See `RunRecords`."""
        return _frame(self.kept["search"]) if self.searched else None

    @cached_property
    def beside(self) -> Sequence[pd.DataFrame] | None:
        """See `RunRecords`."""
        return [_frame(rows) for rows in self.kept["beside"]] if self.searched else None


Records = RunRecords | KeptRecords


def plain_values(found: Records, rounds: Sequence[str] = ()) -> dict[str, Any]:
    """Plain values from which `KeptRecords` computes the same figures.

    Args:
        found: a study's records.
        rounds: columns of the rounds to keep in addition to the keys; only rounds with these
            figures are kept.
    """
    values: dict[str, Any] = {
        "keys": list(found.keys),
        "headline": found.headline,
        "shown": list(found.shown),
        "joint": dict(found.joint),
        "runs": rows_of(found.runs.drop(columns=NOT_KEPT)),
    }
    if rounds and {*rounds} <= {*(history := found.rounds)}:  # no run may have a round
        values["rounds"] = rows_of(
            history.dropna(subset=list(rounds))[[*found.keys, "seed", "round", *rounds]]
        )
    if found.search is not None:
        beside = [rows_of(frame.drop(columns=NOT_KEPT)) for frame in found.beside or ()]
        values |= {
            "searched": list(found.searched),
            "search": rows_of(found.search),
            "beside": beside,
        }
    return values


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Every block that writes a study's files.

    Raises:
        RunError: the system refuses a file.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write the study's tables to {folder}: {error.strerror}; its finished runs are "
            "kept, and the same call writes the tables once the folder can be written"
        ) from error


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a frame as plain values; missing values are None."""
    return [
        {key: None if value != value else value for key, value in row.items()}  # NaN
        for row in frame.astype(object).to_dict(orient="records")
    ]


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The frame of such rows; lists are tuples, as in the frame of the runs."""
    return pd.DataFrame(
        [
            {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
            for row in rows
        ]
    )
