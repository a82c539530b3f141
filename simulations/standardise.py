"""Mean and standard deviation of private tables, as one release. Runs on these tables include its
cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedlgm import data as data_sets
from fedlgm import privacy
from fedlgm.aggregation import BoundedSum
from fedlgm.data import DataSet
from fedlgm.data.spent import Spent, division_name
from fedlgm.data.tables import Column
from fedlgm.errors import ConfigError, DataError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.privacy.ledger import Ledger
from fedlgm.privacy.reuse import require_rounds
from strategies.releaser import Releaser

# Smallest variance, in units of the square of half a column's range. With noise, a variance may be
# smaller than this, or negative.
_LEAST = 1e-3
_LARGEST = 1e30  # largest end of a range, because rows are float32


@dataclass(frozen=True)
class Standardised:
    """Released statistics, and the data that they standardise.

    Attributes:
        data: data for `simulate(data=...)`. The ledger of a run on them holds the statistics, which
            are part of its epsilon. Other training on these arrays counts the statistics only after
            `data.spent.charge(ledger)`.
        mean: released mean of each column, float64 [d].
        deviation: released standard deviation of each column, float64 [d].
        epsilon: epsilon of all releases on the ledger of the statistics, at the given delta.
    """

    data: DataSet
    mean: np.ndarray
    deviation: np.ndarray
    epsilon: float

    def rows(self, x: Any) -> np.ndarray:
        """Further rows [m, d], standardised, float32; for predictions."""
        return ((np.asarray(x, np.float64) - self.mean) / self.deviation).astype(np.float32)


def standardise(
    data: Any,
    *,
    low: Any,
    high: Any,
    epsilon: float,
    delta: float,
    ledger: Path | str,
    users: Any = None,
    unit: Literal["example", "client"] = "example",
    continue_ledger: bool = False,
) -> Standardised:
    """Release the mean and variance of every column under (epsilon, delta); standardise with them.

    A unit contributes its row or, if it is a client, the mean of its rows. This row is scaled to
    [-1, 1] by the public ranges and clipped. The squares of the row are also contributed. Both
    vectors are bounded (max(1, sqrt(d) / 2) and max(1, sqrt(d) / 4)), summed, charged and noised
    like a round of training, under add-or-remove-one; the number of units is public. Keys come from
    the operating system.

    The charge is durable before anything noisy exists. A second call with the same ledger needs
    `continue_ledger=True`. A run on the result calibrates its noise to the budget that remains, and
    composes both costs.

    Args:
        data: tables or arrays, as for `simulate`; one input [n, d].
        low: smallest plausible value of each column, a number or [d]. It is public knowledge, not
            the private minimum.
        high: largest plausible value of each column.
        epsilon: epsilon of the release; a tenth of the run's epsilon is usual.
        delta: delta of the release, below the run's delta.
        ledger: SQLite file that records the cost of statistics of these data.
        users: as for `simulate`.
        unit: unit of protection, which must be the same as the run's.
        continue_ledger: whether the ledger may hold earlier statistics of these data, whose cost
            then adds up.

    Raises:
        ConfigError: the ranges or the unit do not fit.
        DataError: the inputs are not a table, or private statistics have already standardised them.
        LedgerError: the ledger belongs to other data, or holds statistics and `continue_ledger` is
            not set.

    Example:
        >>> import tempfile
        >>> x = np.random.default_rng(0).normal(50, 10, size=(2000, 2))
        >>> found = standardise(
        ...     {"train": (x, np.arange(2000) % 2), "test": (x, np.arange(2000) % 2)}, low=0, high=100,
        ...     epsilon=1.0, delta=1e-6, ledger=tempfile.mkdtemp() + "/statistics.sqlite",
        ... )
        >>> bool(abs(found.mean - 50).max() < 3), bool(abs(found.deviation - 10).max() < 4), found.epsilon <= 1
        (True, True, True)
    """
    original = data_sets.load(data if users is None else data_sets.with_users(data, users))
    x = original.train_x
    if isinstance(x, tuple) or x.ndim != 2 or x.dtype.kind != "f":
        raise DataError(
            "standardise takes tables: one array of real numbers [n, d] (x.astype(float)) for each "
            "part"
        )
    if original.spent is not None:
        raise DataError(
            "these data are standardised with private statistics already: standardise the original "
            "data"
        )
    low, high = (_range(name, value, x.shape[1]) for name, value in (("low", low), ("high", high)))
    if not (low < high).all():
        raise ConfigError(
            "low must lie below high in every column: give plausible ranges that are public"
        )
    middle, half = (low + high) / 2, (high - low) / 2
    rows = _of_units(np.clip((x - middle) / half, -1, 1), original, unit)
    plan = _plan(len(rows), x.shape[1], epsilon, delta, unit)
    total = BoundedSum.empty(plan)
    total.add(torch.from_numpy(rows))
    with Ledger(
        ledger, owner=f"statistics of {len(rows)} {unit}s with {x.shape[1]} columns"
    ) as book:
        if not continue_ledger:
            require_rounds(book, 0, [(plan.event, 1)], epsilon=epsilon, delta=delta)
        moments = (
            Releaser(KeyRing.from_seed(None), book)
            .mean(total, plan, book.rounds() + 1)
            .double()
            .numpy()
        )
        whose = (len(rows), division_name(_clients(original))) if unit == "client" else (0, "")
        spent, cost = (
            Spent(tuple(book.worst_profile()), book.protects(), *whose),
            book.epsilon(delta),
        )
    first, second = np.split(moments, 2)
    result = Standardised(
        original, middle + half * first, half * np.sqrt(np.maximum(second - first**2, _LEAST)), cost
    )
    columns = None if original.columns is None else _add_constants(original.columns, result)
    return replace(
        result,
        data=replace(
            original,
            train_x=result.rows(x),
            test_x=result.rows(original.test_x),
            spent=spent,
            columns=columns,
        ),
    )


def _add_constants(columns: tuple[Column, ...], constants: Standardised) -> tuple[Column, ...]:
    """The columns, each with the two constants that turn a value of the table into an input of the
    model.
    """
    new_columns: list[Column] = []
    for column, mean, deviation in zip(
        columns, constants.mean.tolist(), constants.deviation.tolist(), strict=True
    ):
        first, scale = column.get("mean", 0.0), column.get("deviation", 1.0)
        new_columns.append({**column, "mean": first + scale * mean, "deviation": scale * deviation})
    return tuple(new_columns)


def _range(name: str, value: Any, columns: int) -> np.ndarray:
    try:
        bounds = np.broadcast_to(np.asarray(value, np.float64), (columns,))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} must be a number, or one for each of the {columns} columns"
        ) from error
    if not (np.abs(bounds) < _LARGEST).all():
        raise ConfigError(f"{name} must be finite in every column, and smaller than {_LARGEST:g}")
    return bounds


def _of_units(scaled: np.ndarray, data: DataSet, unit: str) -> np.ndarray:
    """Contributions (values, then squares) of the units, float64 [units, 2 d]."""
    if unit == "example":
        return np.concatenate([scaled, scaled**2], axis=1)
    if unit != "client":
        raise ConfigError(f"unit must be 'example' or 'client', got {unit!r}")
    parts = _clients(data)
    # A client without rows also counts, with a contribution of zero, because the number of clients
    # that have rows is private.
    zero = np.zeros(2 * scaled.shape[1])
    return np.stack(
        [_of_units(scaled[part], data, "example").mean(0) if len(part) else zero for part in parts]
    )


def _clients(data: DataSet) -> list[np.ndarray]:
    """Rows of each client, as the data name them."""
    if data.clients is not None:
        return list(data.clients)
    if data.train_user is None:
        raise ConfigError("unit='client' needs the client of each row: name them with users=")
    return [np.flatnonzero(data.train_user == user) for user in np.unique(data.train_user)]


def _plan(
    units: int, columns: int, epsilon: float, delta: float, unit: Literal["example", "client"]
) -> ReleasePlan:
    layers = LayerTable.from_sizes({"mean": columns, "second moment": columns})
    clip = np.maximum(1.0, np.sqrt(columns) / np.array([2.0, 4.0]))
    multiplier = privacy.calibrate(epsilon, delta, steps=1)
    facts = RunFacts(multiplier, Sampling("poisson", units, 1.0), epsilon=epsilon, delta=delta)
    words = Guarantee(
        "proven", "every contribution is bounded before noise is added to the sum", unit=unit
    )
    return ReleasePlan(layers, clip, multiplier * np.sqrt(2) * clip, facts, words)
