"""The open attempt at a round's secure sum, kept on the server's disk so that a server that was
killed can continue it without charging the nodes again.

A node repeats its answers to the steps of one attempt, and is charged again for another attempt. A
resumed server therefore asks the questions of the open attempt again. It needs the following values
for these questions, and writes them to the file in two stages:

* before any node is charged: the attempt's nonce, round, plan, model and clients, and the cohort's
  adverts and shares. A server that is killed earlier begins another attempt, which costs nothing
  more;
* before any node is asked to agree or to unmask: the set of survivors, and the sum of their masked
  vectors.

One attempt thus has one set of public keys and one set of survivors, whenever the server is killed.
Nodes do not rely on this, because they refuse a second set.

The file holds nothing that the server and the processes that relay its messages have not seen. Its
keys and signatures are public, its shares are sealed for nodes, and masks hide its sum. The shares
with which nodes unmask are never written. The file names the participants of a round, so only the
operator may read it. It is deleted once the round's row and checkpoint are on disk.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlgm.errors import RunError
from fedlgm.files import write_durably
from fedlgm.wording import first_problem

_KEY_BYTES = 16


class LostAttempt(RunError):
    """An attempt of an earlier process cannot be continued. The current process has charged nothing
    for it.
    """


class OpenAttempt(BaseModel):
    """An attempt whose nodes may have been charged.

    Attributes:
        key: identity of the run's releases, hexadecimal digits. With the same identity, a continued
            run makes the same ledger entries and draws the same cohorts.
        round: number, from 1.
        plan: JSON text of its plan.
        model: SHA-256 of the global model.
        nonce: the nonce of all questions of the attempt.
        clients: clients that are asked, ascending.
        lost: client -> why it takes no further part.
        adverts: client -> its advert as plain values, for the members of the cohort.
        shared: client -> (receiver -> sealed shares, commitment), for all clients that shared their
            secrets.
        sent: survivor -> its signature of the statement that it has sent its vector; empty until
            the set of survivors is fixed.
        total: bytes of the sum of the survivors' masked vectors, in 32-bit words.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64"
    )
    key: str = Field(pattern=f"^[0-9a-f]{{{2 * _KEY_BYTES}}}$")
    round: int
    plan: str
    model: str
    nonce: str
    clients: list[int]
    lost: dict[int, str]
    adverts: dict[int, dict[str, Any]]
    shared: dict[int, tuple[dict[int, str], str]]
    sent: dict[int, str] = {}
    total: bytes = b""


class AttemptFile:
    """The file of a run's open attempt.

    Args:
        path: the file, which need not exist.

    Attributes:
        key: identity of the releases of this process, see `OpenAttempt`. If an attempt is
            continued, this is the identity of that attempt.
        found: attempt of an earlier process; None once it is continued or given up, and if there is
            none.

    Raises:
        RunError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.found = (
                OpenAttempt.model_validate_json(path.read_bytes()) if path.is_file() else None
            )
        except ValidationError as error:
            raise RunError(
                f"the open attempt {path} is damaged ({first_problem(error)}): delete it, and the "
                "same command begins its round again, for which the nodes are charged once more"
            ) from error
        self.key = (
            secrets.token_bytes(_KEY_BYTES) if self.found is None else bytes.fromhex(self.found.key)
        )

    def write(self, attempt: OpenAttempt) -> None:
        """Write the attempt in place of the previous one, and return once it is on disk."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        write_durably(self._path, attempt.model_dump_json().encode())

    def close(self) -> None:
        """Delete the file of the attempt, once its round is recorded."""
        self._path.unlink(missing_ok=True)
        self.found = None

    def give_up(self) -> None:
        """Delete the file of the attempt, and draw another identity for later releases."""
        self.close()
        self.key = secrets.token_bytes(_KEY_BYTES)
