"""The search of a study, which tries the same values for every method, on separate seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlgm.errors import ConfigError
from simulations.config.grids import values_to_try

FIRST_SEED = 1000
"""Number of a search's first repetition; the repetitions of the final runs begin at 0."""
LEAST_SEEDS = 3

Point = tuple[Any, ...]
Shift = tuple[str, int]
"""A searched key, and the direction of its neighbouring value: lower (-1) or higher (1)."""


@dataclass(frozen=True)
class Search:
    """The values, by recipe key, that a search tries for every method and cell of a grid.

    Attributes:
        axes: values by key, in ascending order if they are numbers.
        seeds: number of repetitions of each value.
    """

    axes: Mapping[str, Sequence[Any]]
    seeds: int = LEAST_SEEDS

    @classmethod
    def of(cls, search: Any, seeds: int, grid: Mapping[str, Any]) -> Search:
        """Check and order the values of a study's search.

        Raises:
            ConfigError: the values are not lists of different values, a key belongs to the grid, or
                there are too few seeds.
        """
        if not isinstance(search, Mapping) or not search:
            raise ConfigError(f"search must be a mapping {{recipe key: values}}, got {search!r}")
        if seeds < LEAST_SEEDS:
            raise ConfigError(
                f"a search needs at least {LEAST_SEEDS} seeds, got {seeds}: fewer would select "
                "noise"
            )
        axes = {}
        for key, values in search.items():
            if key in grid:
                raise ConfigError(
                    f"{key!r} is in the grid and in the search: it can only be in one of them"
                )
            choices = list(dict.fromkeys(values_to_try(f"search[{key!r}]", values, least=2)))
            axes[key] = (
                sorted(choices)
                if all(isinstance(value, (int, float)) for value in choices)
                else choices
            )
        return cls(axes, seeds)

    @property
    def repetitions(self) -> range:
        """Numbers of the search's repetitions."""
        return range(FIRST_SEED, FIRST_SEED + self.seeds)

    def at(self, point: Mapping[str, Any]) -> Point:
        """Return a run's values of the searched keys."""
        return tuple(point[key] for key in self.axes)

    def best(self, scores: Mapping[Point, float], better: str) -> Point | None:
        """Find the point with the best mean figure, or the first of several equally good points;
        points whose figure is NaN are ignored, and the result is None if no other point is left.
        """
        valid = {point: score for point, score in scores.items() if not math.isnan(score)}
        sign = 1 if better == "higher" else -1
        return max(valid, key=lambda point: sign * valid[point]) if valid else None

    def shifts(self) -> list[Shift]:
        """List the steps to the neighbouring values of each key."""
        return [(key, step) for key in self.axes for step in (-1, 1)]

    def neighbour(self, point: Point, shift: Shift) -> Point | None:
        """Return the point one step away; None if the step leads beyond the lowest or highest
        value.
        """
        place = list(self.axes).index(shift[0])
        values = list(self.axes[shift[0]])
        index = values.index(point[place]) + shift[1]
        return (
            (*point[:place], values[index], *point[place + 1 :])
            if 0 <= index < len(values)
            else None
        )

    def edges(self, point: Point) -> list[str]:
        """List the keys of which the point has the lowest or highest value."""
        return [
            key
            for key, value in zip(self.axes, point, strict=True)
            if value in (self.axes[key][0], self.axes[key][-1])
        ]
