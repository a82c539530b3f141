"""Numbering of the users to whom examples belong. Under user-level privacy, or if each client is a
user, every name counts as one unit of privacy.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from fedlgm.data.names import describe_missing, missing, refuse_masked, spelled_once
from fedlgm.errors import DataError, Notice

_EXACT = 2.0**53
"""From this number on, floats cannot represent every whole number."""


def user_numbers(users: Any, count: int) -> np.ndarray:
    """Number the users from 0 in the order of their names, and return the number of each example's
    user, int64 [count].

    Names that differ only in case, spaces, zeros or the form of their characters cause a notice. If
    two such names belong to one person, this person counts as two units of privacy, and the
    reported epsilon is too small for this person.

    Args:
        users: numbers or names, [count].
        count: number of examples.

    Raises:
        DataError: an example has no user, numbers and names are mixed, or two spellings would
            become the same user.

    Example:
        >>> user_numbers(["ben", "ann", "ben"], 3).tolist()
        [1, 0, 1]
    """
    if isinstance(users, str):
        raise DataError(
            f"users = {users!r} names a column, which arrays do not have: give the user of each "
            "training example [n]"
        )
    refuse_masked(users, "users")
    try:
        ids = np.asarray(users)
        if ids.dtype.kind in "US" and not isinstance(users, np.ndarray):
            ids = np.asarray(users, dtype=object)  # NumPy would turn numbers, and NaN, into names
    except ValueError as error:
        raise DataError(
            f"users must name the user of each of the {count} training examples, got lists of "
            "several lengths; lists of the examples of each client are data['clients']"
        ) from error
    if ids.shape != (count,):
        raise DataError(
            f"users must name the user of each of the {count} training examples, got shape "
            f"{ids.shape}"
        )
    if (lost := missing(ids)).any():
        raise DataError(
            f"users: {describe_missing(lost, 'user')}: leave these examples out, or name their users"
        )
    if ids.dtype.kind == "f" and (np.abs(ids) >= _EXACT).any():
        raise DataError(
            "users: floats from 2**53 on may stand for several numbers: give users as integers, or "
            "as text"
        )
    try:
        if ids.dtype == object:
            spelled_once({str(name): name for name in ids}, "users")
        unique, index = np.unique(ids, return_inverse=True)
    except TypeError as error:
        raise DataError(f"users must all be numbers or all be names: {error}") from error
    _check_names([name for name in unique.tolist() if isinstance(name, str)])
    return index.astype(np.int64)


def _check_names(names: Sequence[str]) -> None:
    """Refuse empty names, and warn about pairs of names that may belong to the same person."""
    seen: dict[str, str] = {}
    for name in names:
        plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        with suppress(InvalidOperation):
            plain = str(Decimal(plain).normalize())  # equal for `007` and `7`, `1e5` and `100000`
        if not plain:
            raise DataError(f"users: training examples with the name {name!r} have no user")
        if (other := seen.setdefault(plain, name)) != name:
            warnings.warn(
                Notice(
                    f"users {other!r} and {name!r} count as two users: if they are one person, use "
                    "one name, because epsilon is stated for one user"
                ),
                stacklevel=2,
            )
            return
