"""The hashes that a run writes and a verifier recomputes: the chain of releases, the tree over the
noise keys, and the hash of the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rfc8785

from fedlgm.privacy.chain import digest

_CODE = ("clients", "fedlgm", "fedlgm_lab", "fedlgm_nodes", "simulations", "strategies")
"""Packages whose code a run executes."""


def first_head(start: dict[str, Any]) -> str:
    """Compute the head of a chain of releases before round 1, which covers the recipe, the initial
    weights, the code and the commitment.
    """
    return digest("fedlgm releases v1", rfc8785.dumps(start))


def next_head(before: str, round: int, ledger: str, plan: str, released: str) -> str:
    """Compute the head of a chain after one more release. It covers the previous head, the ledger's
    head after the last row that charges the release, and the SHA-256 of the plan and of the
    released vector.
    """
    return digest(before, round, ledger, plan, released)


def ledger_heads(owner: str, rows: list[dict[str, Any]], events: dict[str, str]) -> list[str]:
    """Compute the ledger's heads before the first row and after each row."""
    heads = [digest("", owner)]
    for row in rows:
        fields = [str(row["round"]), str(row["client"]), row["key"], events[row["event"]]]
        fields += [row["claim"], row["protects"], row["guarantee"]]
        while not fields[-1]:
            fields.pop()
        heads.append(digest(heads[-1], *fields))
    return heads


def merkle_root(leaves: Iterable[str]) -> str:
    """Compute the root of the hash tree over texts. A last node without a partner moves up
    unchanged.

    Example:
        >>> merkle_root(["a"]) == digest("leaf", "a"), merkle_root(["a", "b"]) == merkle_root(["b", "a"])
        (True, False)
    """
    level = [digest("leaf", leaf) for leaf in leaves] or [digest("leaf")]
    while len(level) > 1:
        pairs = [level[place : place + 2] for place in range(0, len(level), 2)]
        level = [digest("node", *pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def code_digest() -> str:
    """Compute the SHA-256 of the installed code of a run: all .py files, sorted by path."""
    base, fields = Path(__file__).parents[3], list[str | bytes]()
    for package in _CODE:
        for path in sorted((base / package).rglob("*.py")):
            fields += [path.relative_to(base).as_posix(), path.read_bytes()]
    return digest(*fields)
