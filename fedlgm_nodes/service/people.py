"""People whose data lie at several nodes. Each person counts at one node, and the other nodes leave
out the person's rows.

The operators agree outside of this library on pseudonyms, and on the one node that uses a person's
data. A node's policy names the column of pseudonyms, and a file with the pseudonyms of the people
who count at other nodes. The node drops the rows of these people when it reads the table, so no
release depends on the dropped rows. Adding or removing a person then changes the data of only one
node, and the person's epsilon is the epsilon of that node's ledger, for any number of nodes and
runs.

This holds only if no person ever moves from one node to another. The node therefore records, from
before its first release, who has counted at this node and who has counted elsewhere, and refuses
data in which a person has moved. The library cannot check that the operators' lists agree. A person
whom no list names counts at every node that has rows of this person.
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
"""The only accepted form of a pseudonym, a SHA-256 in lower case, because two spellings would count
as two people.
"""


@dataclass(frozen=True)
class Counted:
    """The people who count at this node and at other nodes.

    Attributes:
        here: pseudonyms of the people whose rows this node uses.
        elsewhere: pseudonyms of the people on this node's list, who count at other nodes.
    """

    here: frozenset[str]
    elsewhere: frozenset[str]

    @property
    def digest(self) -> str:
        """Digest of the list of people who count elsewhere, whatever the order of its lines."""
        return digest("people elsewhere", *sorted(self.elsewhere))

    def settle(self, file: Path, released: bool) -> None:
        """Record who counts where, and refuse people who have moved between nodes since a release.

        Args:
            file: the node's file that records who counts where.
            released: whether the node's ledger has releases.

        Raises:
            DataError: a person who counted at this node is now on the list, a person who was on the
                list now counts at this node, or there are releases but no file.
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
    """Read the pseudonyms of the people who count at other nodes.

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
    """Refuse several rows of one person. This is for budgets that protect single examples.

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
    """The pseudonyms in a column, one for each row.

    Raises:
        DataError: a value is not a pseudonym.
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
