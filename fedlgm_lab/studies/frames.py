"""The figures of a study's runs as pandas frames and as LaTeX tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedlgm.errors import ConfigError, RunError
from fedlgm.privacy.attackers import percent
from fedlgm.training import inputs
from fedlgm.training.tasks import evaluate
from fedlgm.training.tasks.own_figures import own_figures
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.statistics import interval
from simulations.config.assembly import Assembly
from simulations.config.own import Own
from simulations.runs.folder import RunFolder
from simulations.runs.headline import is_share

_SPENT = ("epsilon", "claimed_epsilon", "audited_epsilon")
_ALARMS = "0.01"  # rate of false alarms at which tables state the share found
_FIRST, _LAST = (
    ("seed", "status", "reason", *_SPENT, "attack_tpr", "guarantee", "noise_reproducible"),
    ("seconds", "folder"),
)
_ABOUT = (*_FIRST, *_LAST)
_IN_LATEX = str.maketrans(
    {"\\": r"\textbackslash ", **{character: f"\\{character}" for character in "&%$#_{}"}}
)
_FIGURES = (*_SPENT, "noise_norm", "noise_scale", "seconds")
_ROUND = ("epsilon", "claimed_epsilon", "noise_norm", "noise_scale", "released")


def runs(
    jobs: Sequence[Job], out: Path, failed: Mapping[str, str], keys: Sequence[str], headline: str
) -> pd.DataFrame:
    """Build the frame of `Study.to_frame`, with one row per run in the order of the jobs."""
    rows = [_row(job, out / job.folder, failed.get(job.folder)) for job in jobs]
    names = [
        name
        for name in dict.fromkeys(key for row in rows for key in row)
        if name not in (*keys, *_ABOUT)
    ]
    names = [headline, *(name for name in names if name != headline)]
    return pd.DataFrame(rows).reindex(columns=[*keys, *_FIRST, *names, *_LAST])


def history(jobs: Sequence[Job], out: Path, keys: Sequence[str]) -> pd.DataFrame:
    """Build the frame of `Study.history`, with one row per run and round."""
    rows = []
    for job in jobs:
        path = out / job.folder
        for row in RunFolder.open(path).rows() if path.exists() else ():
            figures = {name: row[name] for name in _ROUND if name in row}  # type: ignore[literal-required]
            rows.append(
                {
                    **_keys(job),
                    "seed": job.repetition,
                    "round": row["round"],
                    **figures,
                    **row.get("metrics", {}),
                }
            )
    return pd.DataFrame(rows).reindex(
        columns=list(dict.fromkeys([*keys, *(key for row in rows for key in row)]))
    )


def cells(frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str]) -> pd.DataFrame:
    """Build a frame with one row per cell: the number n of finished runs, the mean, interval and
    standard deviation of each metric, and the largest epsilons.
    """
    rows = []
    for cell in cells_of(frame, keys, {}):
        cell_rows = at(frame, cell)
        done = cell_rows[cell_rows["status"] == "finished"]
        row = {**cell, "n": len(done), "failed": len(cell_rows) - len(done)}
        for name in metrics:
            values = done[name].astype(float).dropna()
            low, high = interval(values)
            row |= {name: values.mean(), f"{name}_low": low, f"{name}_high": high}
            row[f"{name}_std"] = values.std()
        worst = [name for name in ("epsilon", "claimed_epsilon", "attack_tpr") if name in done]
        # files of earlier studies have no `attack_tpr`
        row |= {name: done[name].max() for name in worst}
        rows.append(row | {"guarantee": next(iter(done["guarantee"]), "")})
    return pd.DataFrame(rows)


def latex(table: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str]) -> str:
    """Format a table of `cells` in LaTeX, for the package booktabs."""
    shown = [
        key
        for key in keys
        if key != "mechanism" and (key == "method" or table[key].map(repr).nunique() > 1)
    ]
    header = [key.rpartition(".")[2].replace("_", " ") for key in shown]
    header += [f"{name} (\\%)" if is_share(name) else name for name in metrics] + [
        "$n$",
        "$\\varepsilon$",
        "found at 1 \\% false alarms",
        "guarantee",
    ]
    lines = []
    for _, row in table.iterrows():
        values = [_escape(_short(row[key])) for key in shown]
        values += [_mean_and_interval(row, name) for name in metrics]
        values += [str(row["n"]), _number(row["epsilon"]), _escape(share_found(row))]
        lines.append([*values, _escape(str(row["guarantee"]))])
    layout = "l" * len(shown) + "r" * (len(metrics) + 3) + "l"
    titles = [_escape(name) if "\\" not in name and "$" not in name else name for name in header]
    return pd.DataFrame(lines, columns=titles).to_latex(index=False, column_format=layout)


def cells_of(
    frame: pd.DataFrame, keys: Sequence[str], values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """List the combinations of the columns `keys` that occur in the rows with the given values,
    each once and in the order of their first rows.
    """
    cells: dict[tuple[str, ...], dict[str, Any]] = {}
    for _, row in at(frame, values).iterrows():
        cell = {key: row[key] for key in keys}
        cells.setdefault(tuple(map(name_of, cell.values())), cell)
    return list(cells.values())


def values_of(frame: pd.DataFrame, key: str) -> list[Any]:
    """List the values of a column, each once and in the order of their first rows."""
    return [cell[key] for cell in cells_of(frame, [key], {})]


def at(frame: pd.DataFrame, values: Mapping[str, Any]) -> pd.DataFrame:
    """Select the rows that have these values."""
    chosen = np.ones(len(frame), dtype=bool)
    for key, value in values.items():
        name = name_of(value)
        chosen &= np.array([name_of(cell) == name for cell in frame[key]], dtype=bool)
    return frame[chosen]


def metrics_of(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """List the columns of a frame of runs that hold metrics."""
    return [name for name in frame.columns if name not in (*keys, *_ABOUT)]


def require_finished(frame: pd.DataFrame) -> None:
    """Raise an error if a study has runs and none of them is finished.

    Args:
        frame: a study's runs.

    Raises:
        RunError: no run is finished; the message gives the reason why the first run is not.
    """
    if len(frame) and not (frame["status"] == "finished").any():
        raise RunError(f"no run of the study is finished: {frame['reason'].iloc[0]}")


def check_metric(frame: pd.DataFrame, metrics: Sequence[str], name: Any) -> None:
    """Raise an error if a name is not the name of a column with figures.

    Args:
        frame: a study's runs or rounds.
        metrics: names of the study's metrics, which the message lists.
        name: the name to check.

    Raises:
        ConfigError: the study has no metric of this name.
        RunError: no run is finished.
    """
    if "status" in frame:
        require_finished(frame)
    if name not in [column for column in frame if column in (*_FIGURES, *metrics)]:
        raise ConfigError(f"no metric {name!r} in this study; it has {', '.join(metrics)}")


def metrics_at(path: Path, own: Own) -> dict[str, float]:
    """Read a finished run's metrics, and measure the missing ones of `own.metrics` on its final
    model.

    The names that `own.evaluate` returns are unknown before the call, so `own.evaluate` is called
    again even if the run called it.
    """
    folder = RunFolder.open(path)
    result = folder.result()
    if result is None:
        return {}
    metrics = dict(result["metrics"])
    missing = {
        name: function for name, function in (own.metrics or {}).items() if name not in metrics
    }
    if missing or own.evaluate is not None:
        from simulations.api import RunResult

        module = RunResult(result, own).model()
        if missing:
            measured = Assembly(folder.recipe(), own)
            x, y = (
                inputs.tensors(measured.data.dataset.test_x),
                torch.from_numpy(measured.data.dataset.test_y),
            )
            metrics |= evaluate(measured.data.task, module, x, y, metrics=missing)
        if own.evaluate is not None:
            metrics |= own_figures(own.evaluate, result["rounds"], module)
    return metrics


def _keys(job: Job) -> dict[str, Any]:
    return {"method": job.method, **{key: _cell(value) for key, value in job.point.items()}}


def _row(job: Job, path: Path, why: str | None) -> dict[str, Any]:
    row = {
        **_keys(job),
        "seed": job.repetition,
        "status": "finished",
        "reason": "",
        "folder": str(path),
    }
    if why is not None:
        diverged = path.exists() and RunFolder(path).diverged.read() is not None
        return row | {
            "status": "diverged" if diverged else "failed" if path.exists() else "refused",
            "reason": why,
        }
    folder = RunFolder.open(path)
    result = folder.verified_result()
    row |= metrics_at(path, job.own)
    row |= {name: result.get(name) for name in _SPENT}
    row["attack_tpr"] = result["attack_rates"]["tpr"][_ALARMS] if "attack_rates" in result else None
    rows = folder.every_row(result, private=True)
    row["noise_scale"] = sum(float(round_row["noise_scale"]) for round_row in rows)
    seconds = sum(float(round_row.get("seconds", 0.0)) for round_row in rows)
    about = {
        "guarantee": result["guarantee_status"],
        "noise_reproducible": result["noise_reproducible"],
    }
    return row | about | {"seconds": seconds}


def _cell(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def name_of(value: Any) -> str:
    """Name a value so that equal values have equal names, whatever their type in the frame; None
    and NaN have the same name.
    """
    if is_missing(value):
        return "\0"  # no text has this name, not even "none"
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    return f"{float(value)!r}" if isinstance(value, (int, float, np.number)) else str(value)


def is_missing(value: Any) -> bool:
    """Tell whether a frame's value is None or NaN, as for a key without effect on the method."""
    return value is None or (isinstance(value, (float, np.floating)) and bool(np.isnan(value)))


def _short(value: Any) -> str:
    if is_missing(value):
        return "--"
    return f"{value:g}" if is_number(value) else str(value)


def is_number(value: Any) -> bool:
    """Tell whether a frame's value is a number and not a Boolean."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _mean_and_interval(row: Any, name: str) -> str:
    """Format the mean and half the width of the interval, with shares in percent."""
    if not np.isfinite(row[name]):
        return "--"
    share = is_share(name)
    mean, reach = row[name], (row[f"{name}_high"] - row[f"{name}_low"]) / 2
    shown = [
        f"{100 * value:.2f}" if share else f"{value:.4g}"
        for value in (mean, reach)
        if np.isfinite(value)
    ]
    return "$" + r" \pm ".join(shown) + "$"


def share_found(row: Mapping[str, Any]) -> str:
    """Format the largest share of units that an attack with 1 % false alarms can find; "--" for
    files of earlier studies, which lack this share.
    """
    share = row.get("attack_tpr")
    return "--" if is_missing(share) else percent(float(share))  # type: ignore[arg-type]


def _number(value: float) -> str:
    return "$\\infty$" if np.isinf(value) else "--" if np.isnan(value) else f"{value:.3g}"


def _escape(text: str) -> str:
    return text.translate(_IN_LATEX)
