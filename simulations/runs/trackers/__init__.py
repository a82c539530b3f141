"""Trackers, which follow a run's public figures: TensorBoard, MLflow, Weights & Biases, or your
own.

A tracker has three methods (see `Tracker`). It is named in a recipe (`run.trackers`) or passed to
`simulations.launch.simulate(..., trackers=[...])`. It receives only public figures; the private
diagnostics of a round (who took part, how long it took) never reach a tracker.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedlgm.errors import ConfigError, FedlgmError, Notice, RunError
from fedlgm.extension.loader import is_bundled, misfit, raised_in, users_code
from fedlgm.extension.registry import Registry
from fedlgm.planning.facts import RunFacts

__all__ = ["RunStart", "Tracker", "Trackers", "make", "names", "scalars"]


@dataclass(frozen=True)
class RunStart:
    """Information for a tracker when a run starts or continues.

    Attributes:
        name: the recipe's name.
        folder: the run folder.
        recipe: the whole recipe as plain values, defaults included.
        layers: d_j by layer name, in order.
        facts: the run's public facts, its noise multiplier included.
        rounds_done: finished rounds of a continued run; a tracker may have seen later rounds, which
            are repeated.
    """

    name: str
    folder: Path
    recipe: Mapping[str, Any]
    layers: Mapping[str, int]
    facts: RunFacts
    rounds_done: int = 0


@runtime_checkable
class Tracker(Protocol):
    """Interface of a tracker.

    `round` is called in a different thread from `start` and `end`, never concurrently. An exception
    in `start` stops the run before anything is released. An exception in `round` or `end` is
    reported as a warning and ends the tracker; the run continues, and its rows are in
    `metrics.jsonl`.

    Example:
        >>> class Printer:
        ...     def start(self, run): print(run.name)
        ...     def round(self, row): print(row["round"], row.get("accuracy"))
        ...     def end(self, summary): print("interrupted" if summary is None else summary["epsilon"])
        >>> isinstance(Printer(), Tracker)
        True
    """

    def start(self, run: RunStart) -> None:
        """Called once, before the first round."""

    def round(self, row: Mapping[str, Any]) -> None:
        """Called after each round with its public row (see `simulations.runs.rows.RoundRow`)."""

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Called once with the run's summary, or with None if the run was interrupted or failed."""


_BUNDLED: Registry[Any] = Registry(
    "tracker",
    {
        "tensorboard": "simulations.runs.trackers.tensorboard:TensorBoardTracker",
        "mlflow": "simulations.runs.trackers.mlflow:MlflowTracker",
        "wandb": "simulations.runs.trackers.wandb:WandbTracker",
    },
)


def names() -> tuple[str, ...]:
    """Bundled trackers, each of which needs the package of its name."""
    return _BUNDLED.names()


def is_installed(name: str) -> bool:
    """Whether the package of the bundled tracker `name` is installed."""
    return importlib.util.find_spec(name) is not None


def make(name: str) -> Tracker:
    """The tracker of this name.

    Args:
        name: one of `names()`, or "package.module:name" of a tracker, or of a class or function
            that makes one when it is called without arguments.

    Raises:
        ConfigError: the name is unknown, the package is not installed, the reference does not
            import, or the object is not a tracker.
    """
    if name in _BUNDLED and not is_installed(name):
        raise ConfigError(
            f"tracker {name!r} needs the package {name!r}, which is not installed: pip install "
            f"'fedlgm[{name}]'"
        )
    tracker = _BUNDLED.find(name)
    if isinstance(tracker, type) or (callable(tracker) and not isinstance(tracker, Tracker)):
        wrong = misfit(tracker)
        if wrong:
            raise ConfigError(f"tracker {name!r} cannot be made without arguments: {wrong}")
        with users_code(f"tracker {name!r}", tracker):
            tracker = tracker()
    return _require_tracker(tracker, repr(name))


def _require_tracker(tracker: object, what: str) -> Tracker:
    missing = [
        method
        for method in ("start", "round", "end")
        if not callable(getattr(tracker, method, None))
    ]
    if missing:
        raise ConfigError(
            f"tracker {what} has no method {missing[0]!r}: it needs start(run), round(row), "
            "end(summary)"
        )
    return tracker  # type: ignore[return-value]


def named_in(trackers: Sequence[str] | None) -> list[str]:
    """Names of a recipe's trackers; default: TensorBoard if it is installed."""
    if trackers is None:
        return ["tensorboard"] if is_installed("tensorboard") else []
    return list(trackers)


class Trackers:
    """All trackers of a run, as one.

    Args:
        members: trackers by the name that messages use.

    Raises:
        ConfigError: an object is not a tracker.
    """

    def __init__(self, named: Sequence[str] | None = (), objects: Iterable[Tracker] = ()) -> None:
        self._members = [(repr(name), make(name)) for name in named_in(named)]
        self._members += [
            (name := type(tracker).__name__, _require_tracker(tracker, name)) for tracker in objects
        ]

    def start(self, run: RunStart) -> None:
        """Start each tracker. If a tracker cannot start, the trackers that have started before are
        ended.

        Raises:
            RunError: a tracker cannot start; nothing has been released yet.
        """
        for position, (name, tracker) in enumerate(self._members):
            try:
                tracker.start(run)
            except Exception as error:
                self._members = self._members[:position]
                self.end(None)
                if isinstance(error, FedlgmError):
                    raise
                raise RunError(
                    f"tracker {name} cannot start: {raised_in(tracker, error)}"
                ) from error

    def round(self, row: Mapping[str, Any]) -> None:
        """Pass a finished round to each tracker."""
        for name, tracker in list(self._members):
            try:
                # A user's tracker may change its row; the other trackers and the run have their own
                # copies.
                tracker.round(row if is_bundled(tracker) else copy.deepcopy(dict(row)))
            except (
                Exception
            ) as error:  # the run goes on, because what has been released cannot be taken back
                self._members.remove((name, tracker))
                why = raised_in(tracker, error)
                _warn(
                    f"tracker {name} failed in round {row['round']} and gets no more rounds: {why}"
                )

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """End each tracker once, in the order in which they started."""
        members, self._members = self._members, []
        for name, tracker in members:
            try:
                tracker.end(None if summary is None else copy.deepcopy(dict(summary)))
            except Exception as error:
                _warn(f"tracker {name} failed at the end of the run: {raised_in(tracker, error)}")


def scalars(row: Mapping[str, Any], layers: Sequence[str]) -> dict[str, float]:
    """Figures of a public row by name, for charts; infinite values and NaN are dropped.

    In addition to the run's own figures (loss and the task's metrics, epsilon, claimed_epsilon,
    noise_norm) there are, for each released layer, `bound/LAYER` (s_j), `noise/LAYER` (root mean
    square norm of one party's noise), `snr/LAYER`, `share/LAYER`, `released_norm/LAYER` (norm of
    the released noisy mean) and, if the round released it as a query, `clipped/LAYER` (noisy share
    of clients that were clipped).

    Args:
        row: see `simulations.runs.rows.RoundRow`.
        layers: names of the layers, K.

    >>> row = {"round": 1, "epsilon": 2.0, "noise_norm": 1.5, "share": [0.25, 0.75], "sigma": [1.0, None]}
    >>> scalars(row, ["a", "b"])
    {'epsilon': 2.0, 'noise_norm': 1.5, 'share/a': 0.25}
    """
    figures = {name: row[name] for name in ("loss", "accuracy") if name in row}
    figures |= row.get("metrics") or {}
    figures |= {
        name: row[name] for name in ("epsilon", "claimed_epsilon", "noise_norm") if name in row
    }
    released = [sigma is not None for sigma in row.get("sigma", [0.0] * len(layers))]
    columns = {
        "bound": row.get("clip"),
        "noise": row.get("layer_noise"),
        "snr": row.get("snr"),
        "share": row.get("share"),
        "released_norm": row.get("released_norm"),
        "clipped": clipping_shares(row),
    }
    for kind, values in columns.items():
        for layer, value, shown in zip(layers, values or (), released, strict=False):
            if shown:
                figures[f"{kind}/{layer}"] = value
    return {name: float(value) for name, value in figures.items() if _is_number(value)}


def clipping_shares(row: Mapping[str, Any]) -> list[float] | None:
    """Noisy share of clients clipped in each layer, [K], if a round released it; it may lie outside
    [0, 1].
    """
    within = (row.get("queries") or {}).get("below-bound")
    return None if within is None else [1.0 - share for share in within]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")


def _warn(message: str) -> None:
    warnings.warn(Notice(message), stacklevel=3)
