"""The witness of a node's ledger, which is a file with the ledger's position in another folder or
on another disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from fedlgm.errors import LedgerError
from fedlgm.files import explain_failure, write_durably
from fedlgm_nodes.protocol.messages import record_of


class Seen(NamedTuple):
    """The position of a ledger that a witness records.

    Attributes:
        ledger: identity of the ledger.
        seq: number of its releases.
        head: head of the hash chain after the last release.
        agreed: number of its agreements in secure sums.
    """

    ledger: str
    seq: int
    head: str
    agreed: int


def read(path: Path) -> Seen:
    """Read the position that a witness records.

    Raises:
        LedgerError: the witness is missing or damaged.
    """
    try:
        seen = record_of(Seen, json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise LedgerError(
            f"the witness {path} is gone: the ledger's last position is unknown"
        ) from None
    except (OSError, ValueError) as error:
        raise LedgerError(explain_failure(f"the witness {path} cannot be read", error)) from error
    if seen is None:
        raise LedgerError(f"the witness {path} cannot be read: not a witness")
    return seen


def write(path: Path, seen: Seen) -> None:
    """Write a position to the witness, and return once it is on disk.

    Raises:
        LedgerError: the file cannot be written.
    """
    try:
        write_durably(path, json.dumps(seen._asdict()).encode())
    except OSError as error:
        raise LedgerError(
            explain_failure(f"the witness {path} cannot be written", error)
        ) from error
