"""People whose data lie at several nodes: each person counts at one node, and the other nodes leave
out the person's rows.

The operators agree outside of this library on pseudonyms, and on the one node that uses a person's
data. A node's policy names the column of pseudonyms, and a file with the pseudonyms of the people
who count at other nodes. Their rows are dropped as the table is read, so nothing that is made of
the data depends on them. Adding or removing a person then changes the data of one node only, and
the person's epsilon is the epsilon of this node's ledger, for any number of nodes and runs.

That holds only if a person never moves. The node therefore records, from before its first release,
who has counted here and who has counted elsewhere. It refuses data in which a person has moved.
Nobody can check that the operators' lists agree: a person whom no list names counts at every node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedlgm.errors import DataError
from fedlgm.files import path_of, write_durably
from fedlgm_nodes.policy import People
from fedlgm_nodes.protocol.messages import digest

_PSEUDONYM = re.compile(r"[0-9a-f]{64}")
"""Two spellings would be two people, so there is one form: a SHA-256 in lower case."""


@dataclass(frozen=True)
class Counted:
    """Where people count.

    Attributes:
        here: pseudonyms of the people whose rows this node uses.
        elsewhere: pseudonyms of the people on its list, who count at other nodes.
    """

    here: frozenset[str]
    elsewhere: frozenset[str]

    @property
    def digest(self) -> str:
        """Digest of the list; the order of its lines does not matter."""
        return digest("people elsewhere", *sorted(self.elsewhere))

    def settle(self, file: Path, released: bool) -> None:
        """Record who counts where, and refuse people who have moved between nodes since a release.

        Args:
            file: the node's file that records who counts where.
            released: whether its ledger has releases.

        Raises:
            DataError: a person who counted here is listed, a listed person counts here, or the
                releases were made before people were stated.
        """
        here, elsewhere = set(self.here), set(self.elsewhere)
        if released:
            if not file.exists():
                raise DataError(
                    f"data.people: there is no {file}, so nobody knows whose data this ledger's "
                    "releases used: restore it; if the policy stated no people until now, state "
                    "them for another data set, in a node's folder of its own"
                )
            kept = json.loads(file.read_bytes())
            here, elsewhere = here | set(kept["here"]), elsewhere | set(kept["elsewhere"])
        if moved := here & elsewhere:
            raise DataError(
                f"data.people: {len(moved)} people who counted at this node are listed as counting "
                "elsewhere, or the reverse; their releases at both nodes would add up: restore "
                "the list, and leave out the rows of people whose entry you cannot restore"
            )
        kept = {"here": sorted(here), "elsewhere": sorted(elsewhere)}
        write_durably(file, json.dumps(kept).encode())


def read_list(people: People, folder: Path) -> frozenset[str]:
    """The pseudonyms of the people who count at other nodes.

    Raises:
        DataError: the file is missing, or a line is not a pseudonym.
    """
    file = path_of("data.people.elsewhere", folder / people.elsewhere)
    if not file.is_file():
        raise DataError(
            f"data.people.elsewhere: there is no file {file}: list there the pseudonyms of the "
            "people whose data other nodes use, one on each line; it may be empty"
        )
    lines = file.read_text(encoding="utf-8", errors="replace").split()
    return frozenset(_checked(lines, f"data.people.elsewhere: {file}"))


def require_once(counted: Counted, rows: int) -> None:
    """Refuse several rows of one person where the budget protects single examples.

    Raises:
        DataError: a person has more than one row.
    """
    if rows > len(counted.here):
        raise DataError(
            f"data.people: {rows} rows of {len(counted.here)} people; with privacy.unit = 'example' "
            "each person may have one row: leave out the other rows, or protect all of the node's "
            "data (privacy.unit = 'client')"
        )


def pseudonyms(column: Iterable[object], name: str) -> list[str]:
    """The pseudonym of each row.

    Raises:
        DataError: a row has none.
    """
    return _checked(column, f"data.people: column {name!r}")


def _checked(values: Iterable[object], where: str) -> list[str]:
    checked = []
    for number, value in enumerate(values):
        if not isinstance(value, str) or not _PSEUDONYM.fullmatch(value):
            raise DataError(
                f"{where}: entry {number}, counted from 0, is not a pseudonym of 64 hexadecimal "
                "digits in lower case, such as a SHA-256"
            )
        checked.append(value)
    return checked
