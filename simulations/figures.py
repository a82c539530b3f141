"""A command's findings as a mapping, which is the base of the results of `simulate`, `recommend`
and `tune`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Figures(Mapping[str, Any]):
    """Named figures, read-only.

    Example:
        >>> dict(Figures({"epsilon": 8.0}))
        {'epsilon': 8.0}
    """

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self._figures = dict(figures)

    def __getitem__(self, key: str) -> Any:
        return self._figures[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)
