"""The public seed of a bundled recipe, which belongs to the recipe's published data."""

from __future__ import annotations

from typing import Any

from fedlgm import data


class PublicSeed(int):
    """A seed that a bundled recipe states; every other seed was stated by the user, in a file or a
    call.

    Example:
        >>> PublicSeed(7, "digits") == 7
        True

    Attributes:
        published: name of the recipe's data, to which the seed belongs.
    """

    published: Any

    def __new__(cls, seed: int, published: Any = None) -> PublicSeed:
        """Make a seed. When a seed is copied or unpickled, `published` is set afterwards."""
        instance = super().__new__(cls, seed)
        instance.published = published
        return instance


def mark(raw: dict[str, Any]) -> None:
    """Mark the seed in the plain values of a bundled recipe; a seed of a recipe that it extends is
    marked already.
    """
    seed = _value(raw, "run", "seed")
    if isinstance(seed, int) and not isinstance(seed, PublicSeed):
        raw["run"]["seed"] = PublicSeed(seed, _value(raw, "data", "name"))


def drop(raw: dict[str, Any]) -> None:
    """Remove an inherited public seed if the data are not published, since noise from a public seed
    can be drawn again.

    Example:
        >>> raw = {"data": {"name": "table"}, "run": {"seed": PublicSeed(7, "digits")}}
        >>> drop(raw)
        >>> raw["run"]
        {}
    """
    seed, name = _value(raw, "run", "seed"), _value(raw, "data", "name")
    if isinstance(seed, PublicSeed) and name != seed.published and not data.is_bundled(name):
        del raw["run"]["seed"]


def _value(raw: dict[str, Any], section: str, key: str) -> Any:
    """A value of a recipe's plain values; None if there is none."""
    values = raw.get(section)
    return values.get(key) if isinstance(values, dict) else None
