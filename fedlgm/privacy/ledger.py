"""The durable privacy ledger: an SQLite file that is charged before anything noisy leaves the
process.

Every row is one release. A release that is repeated after a crash with the same noise key and
inputs has the same bits and the same row; a release that is repeated with fresh noise has a second
row. The ledger may show more than was released (after a crash between charge and release), never
less.

In a run whose rounds are not charged one by one (`fedlgm.privacy.whole_run`), a row's event is the
cost that its round adds to the cost of the run's earlier rounds.

All rows of a ledger protect the same unit under the same neighbouring relation, because epsilons of
different units or relations do not add up. Either all rows state the same protection or none states
one; the ledger refuses other rows.

Rows are chained by hash: a row's head covers this row, all rows before it and the run that owns the
ledger. Heads are copied to checkpoints, results and terminals. Anyone who has such a copy can
detect that a row up to this head was edited, deleted or reordered. The chain has no secret, so it
cannot detect an attacker who replaces the ledger and every copy of its heads.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, get_args

from fedlgm import privacy
from fedlgm.errors import LedgerError
from fedlgm.files import path_of, transaction
from fedlgm.privacy import ledger_file
from fedlgm.privacy.chain import digest
from fedlgm.privacy.charge import Charge, Draft, Head
from fedlgm.privacy.guarantee import Claim, Guarantee, Status
from fedlgm.privacy.ledger_file import connect, create, prepare, remedy
from fedlgm.privacy.spending import Spending, claimed_epsilon

_COUNTED = "(round <= ? OR number <= ?)"
SERVER = -1  # the releasing party under central trust; clients are numbered from 0


class Ledger:
    """Append-only record of releases on disk, from which epsilon is computed.

    `charge` a release before anything noisy leaves the process, then `release` it. `epsilon(delta)`
    composes all rows. The neighbouring relation and the unit are taken from the charged plans
    (`protects`).

    Example:
        >>> import tempfile
        >>> from fedlgm.privacy.events import gaussian_event
        >>> path = Path(tempfile.mkdtemp()) / "ledger.sqlite"
        >>> with Ledger(path, owner="a run") as ledger:
        ...     ledger.charge(gaussian_event(2.0), round=1, key="noise 1")
        ...     round(ledger.epsilon(1e-5), 3), ledger.head().rows
        (1.993, 1)

    Args:
        path: SQLite file, created if missing (write-ahead log, full synchronisation).
        owner: identity of the run that charges (for example a hash of its recipe); the ledger of
            another owner is refused. None opens any ledger for reading.

    Raises:
        LedgerError: the file is not a ledger, is damaged, or belongs to another run.
    """

    def __init__(self, path: Path | str, owner: str | None = None) -> None:
        self.path, self._reading = path_of("ledger", path), owner is None
        # for each protection, the number of first rows that are known to state it
        self._alike: dict[str, int] = {}
        if owner is None and not self.path.is_file():
            raise LedgerError(f"there is no ledger at {self.path}")
        with self._translate_errors():
            if owner is not None and not self.path.exists():
                create(self.path, owner)
            self._db = connect(self.path, reading=owner is None)
            try:
                prepare(self._db, self.path, owner)
            except BaseException:
                self._db.close()
                raise

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, OverflowError) as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be used ({error}); {remedy(error, self.path)}"
            ) from error

    def charge(
        self,
        event: privacy.DpEvent,
        *,
        round: int,
        key: str,
        client: int = SERVER,
        claim: Claim | None = None,
        protects: str = "",
        guarantee: Guarantee | None = None,
    ) -> None:
        """Record one release, and return only after the row is on disk.

        Args:
            event: proven cost of the release.
            round: round number, from 1; 0 for a release before the run.
            key: fingerprint of the noise key; the same key in the same round is the same release.
            client: the releasing client under local trust, `SERVER` under central trust.
            claim: the charge that the method's authors would state, if it differs from the event
                (see `Claim`).
            protects: unit and relation of the event (`ReleasePlan.protects`); "" if no row of the
                ledger states it.
            guarantee: the guarantee of a user's mechanism, because no recipe states it; otherwise
                None.

        Raises:
            ConfigError: an argument is outside its range, or the event has an impossible number.
            LedgerError: the row cannot be written; the key has been charged for this round at
                another cost; or earlier rows state another unit or relation, or no protection
                although this row states one.
        """
        self.charge_each(
            event,
            round=round,
            keys={client: key},
            claim=claim,
            protects=protects,
            guarantee=guarantee,
        )

    def charge_each(
        self,
        event: privacy.DpEvent,
        *,
        round: int,
        keys: Mapping[int, str],
        claim: Claim | None = None,
        protects: str = "",
        guarantee: Guarantee | None = None,
    ) -> None:
        """Record one release of each of several clients. When this method returns, all rows are on
        disk; if it raises an error, none is.

        Many rows take about as long to write as one row.

        Args:
            event: the proven cost of each release.
            round: round number, from 1.
            keys: fingerprint of the noise key of each client, in the order of the rows.
            claim: see `charge`.
            protects: see `charge`.
            guarantee: see `charge`.

        Raises:
            LedgerError: the same noise was charged for another release; or see `charge`.
        """
        draft = Draft.of(event, round, keys, claim, protects, guarantee)
        with self._translate_errors(), transaction(self._db):
            count, head = self.head()
            self._refuse_unlike(draft.protects, count)
            for client, key in draft.keys.items():
                row = (
                    draft.round,
                    client,
                    key,
                    draft.event,
                    draft.claim,
                    draft.protects,
                    draft.guarantee,
                )
                query = "SELECT event FROM charges WHERE round = ? AND client = ? AND key = ?"
                charged = self._db.execute(query, row[:3]).fetchone()
                if charged is None:
                    count, head = count + 1, _head(head, row)
                    self._db.execute(
                        "INSERT INTO charges (number, round, client, key, event, claim, "
                        "protects, guarantee, head) VALUES (?,?,?,?,?,?,?,?,?)",
                        (count, *row, head),
                    )
                elif charged[0] != draft.event:
                    raise LedgerError(
                        f"round {round} of {self.path} was charged with the same noise for another "
                        "release: a run cannot be repeated under a changed plan; start a new run"
                    )
        self._alike[draft.protects] = count

    def _refuse_unlike(self, protects: str, rows: int) -> None:
        """Refuse a protection other than the protection of the first `rows` rows. Rows that were
        compared before are skipped, because they never change.
        """
        rows_compared = self._alike.get(protects, 0)
        if rows <= rows_compared:
            return
        query = "SELECT protects FROM charges WHERE number > ? AND protects <> ? LIMIT 1"
        other = self._db.execute(query, (rows_compared, protects)).fetchone()
        if other is not None:
            ours, theirs = (
                f"protects ({text})" if text else "states no protection"
                for text in (protects, other[0])
            )
            raise LedgerError(
                f"the ledger {self.path} holds a release that {theirs}, but this one {ours}: "
                "epsilons add up only if both releases protect the same unit under the same "
                "relation; state unit and relation for both (protects), or use another ledger"
            )

    def owner(self) -> str:
        """Identity of the run that charges."""
        return self._meta("owner")

    def identity(self) -> str:
        """A name that is different for every ledger, even of the same owner; empty for a ledger of
        an earlier version.
        """
        return self._meta("identity")

    def _meta(self, key: str) -> str:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", key)
        return str(rows[0][0]) if rows else ""

    def head(self) -> Head:
        """The ledger's current head."""
        rows = self._rows("SELECT number, head FROM charges ORDER BY number DESC LIMIT 1")
        return Head(int(rows[0][0]), str(rows[0][1])) if rows else Head(0, digest("", self.owner()))

    def verify(
        self, anchors: Iterable[Head] = (), *, owner: str | None = None, contiguous: bool = False
    ) -> Head:
        """Check the whole ledger against its own hashes, its owner and heads that were stored
        elsewhere.

        Args:
            anchors: heads that were stored in checkpoints, in results or by people.
            owner: the run's identity according to its recipe; None skips this check.
            contiguous: whether every round between the first and the last charged one must be
                present.

        Returns:
            The head, if all checks pass.

        Raises:
            LedgerError: rows were edited, deleted or reordered, a round has no charge although it
                must have one, the recipe was changed, or the ledger is older than an anchor; the
                message names the problem.
        """
        name, value = f"the ledger {self.path}", digest("", self.owner())
        if owner is not None and owner != self.owner():
            raise LedgerError(
                f"{name} does not belong to the recipe beside it: the recipe was changed after the "
                "run started, or the file comes from another run"
            )
        heads, rounds = [value], set()
        rows = self._rows(
            "SELECT number, head, round, client, key, event, claim, protects, guarantee FROM "
            "charges ORDER BY number"
        )
        for expected, (number, head, *fields) in enumerate(rows, start=1):
            value = _head(value, fields)
            if number != expected or head != value:
                raise LedgerError(
                    f"{name} was changed: row {expected} (round {fields[0]}) does not follow from "
                    "the rows before it"
                )
            heads.append(value)
            rounds.add(int(fields[0]))
        for count, anchor in anchors:
            if count >= len(heads):
                raise LedgerError(
                    f"{name} shows {len(rows)} releases, but there were {count} when a checkpoint "
                    "or result was written: rows were deleted, or the file is an older copy; "
                    "restore a newer copy or start a new run"
                )
            if heads[count] != anchor:
                raise LedgerError(
                    f"{name} was changed: its first {count} rows are not those that were charged"
                )
        missing = sorted(set(range(min(rounds, default=0), max(rounds, default=-1) + 1)) - rounds)
        if contiguous and missing:
            raise LedgerError(
                f"{name} has no charge for round {missing[0]}, though later rounds were released"
            )
        return Head(len(rows), value)

    def charges(self) -> Iterator[Charge]:
        """Yield all rows, ordered by round and client."""
        with self._translate_errors():
            rows = self._db.execute(
                "SELECT round, client, event, claim, protects FROM charges ORDER BY round, client, "
                "key"
            )
            for round_, client, event, claim, protects in rows:
                yield Charge(
                    round_,
                    client,
                    privacy.events.decode(json.loads(event)),
                    json.loads(claim),
                    protects,
                )

    def protects(self) -> str:
        """Unit and relation that the rows state, as in "client, add-remove"; "" if none does."""
        return str(self._rows("SELECT MAX(protects) FROM charges")[0][0] or "")

    def guarantee(self) -> Guarantee | None:
        """The weakest guarantee that a row states, or the last of several that are equally weak;
        None if no row states a guarantee.
        """
        query = "SELECT guarantee FROM charges WHERE guarantee <> '' GROUP BY guarantee ORDER BY MAX(number) DESC"
        with self._translate_errors():
            stated = [Guarantee(**json.loads(text)) for (text,) in self._rows(query)]
        return min(stated, key=lambda each: -get_args(Status).index(each.status), default=None)

    def epsilon(
        self, delta: float, accountant: str = "pld", through: int | None = None, abandoned: int = 0
    ) -> float:
        """Proven epsilon at `delta` of all charges; under local trust, the largest epsilon of any
        participant.

        Args:
            delta: target delta.
            accountant: "pld" or "rdp"; RDP at `accountants.ORDERS` if a search (`selection_event`)
                was charged.
            through: last round to count; default: all.
            abandoned: number of rows at the beginning of the ledger that count whatever their round
                is, so that abandoned attempts are included.
        """
        with self._translate_errors():
            return self._spending(through, abandoned).epsilon(delta, accountant)

    def client_epsilons(self, delta: float, accountant: str = "pld") -> dict[int, float]:
        """Proven epsilon at `delta` of each charged client, by number; empty under central
        trust.
        """
        with self._translate_errors():
            return self._spending().client_epsilons(delta, accountant)

    def _spending(self, through: int | None = None, abandoned: int = 0) -> Spending:
        query = (
            f"SELECT client, event, COUNT(*) FROM charges WHERE {_COUNTED} GROUP BY client, event"
        )
        return Spending.of(self._rows(query, _last(through), abandoned), SERVER)

    def profiles(self) -> list[list[tuple[privacy.DpEvent, int]]]:
        """Charged events with counts. Under local trust there is one list for each participant
        whose events are not part of another participant's events.
        """
        with self._translate_errors():
            return self._spending().worst()

    def worst_profile(self) -> list[tuple[privacy.DpEvent, int]]:
        """Charged events with counts, where each count is the largest of any participant.

        These events include every participant's events, for composition with other ledgers.
        """
        most: dict[tuple[bool, str], int] = {}
        for shared, event, count in self._rows(
            "SELECT client < 0, event, COUNT(*) FROM charges GROUP BY client, event"
        ):
            most[bool(shared), event] = max(most.get((bool(shared), event), 0), int(count))
        return [
            (privacy.events.decode(json.loads(event)), count) for (_, event), count in most.items()
        ]

    def claimed_epsilon(
        self, delta: float, accountant: str = "pld", through: int | None = None, abandoned: int = 0
    ) -> float:
        """Epsilon as the methods' authors would state it. A row without a claim counts with its
        charged event.

        A claim {"epsilon": e} is summed over a participant's rows; a claim {"event": ...} is
        composed by the accountant. The arguments are those of `epsilon`.
        """
        query = f"SELECT client, event, claim, COUNT(*) FROM charges WHERE {_COUNTED} GROUP BY client, event, claim"
        with self._translate_errors():
            return claimed_epsilon(self._rows(query, _last(through), abandoned), delta, accountant)

    def rounds(self, through: int | None = None) -> int:
        """Last charged round in the first `through` rows (default: in all rows); 0 for an empty
        ledger.
        """
        query = "SELECT COALESCE(MAX(round), 0) FROM charges WHERE number <= ?"
        return int(self._rows(query, _last(through))[0][0])

    def has_repeated_rounds(self) -> bool:
        """Whether the same party released a round more than once, with different noise."""
        query = "SELECT 1 FROM charges WHERE round > 0 GROUP BY round, client HAVING COUNT(*) > 1 LIMIT 1"
        return bool(self._rows(query))

    def position(self) -> int:
        """Number of rows, which is also the number of the last row."""
        return self.head().rows

    def participations(self) -> dict[int, int]:
        """Number of rows of each client under local trust."""
        return dict(
            self._rows("SELECT client, COUNT(*) FROM charges WHERE client >= 0 GROUP BY client")
        )

    def noise_keys(self) -> set[tuple[int, int, str]]:
        """Triples (round, client, fingerprint of the noise key) of all rows."""
        return set(self._rows("SELECT round, client, key FROM charges"))

    def keys_of(self, round: int, after: int = 0) -> list[str]:
        """Fingerprints of the noise keys with which the server released a round after row `after`,
        in the order of the releases.
        """
        query = (
            "SELECT key FROM charges WHERE round = ? AND client = ? AND number > ? ORDER BY number"
        )
        return [key for (key,) in self._rows(query, round, SERVER, after)]

    def row_of(self, round: int, client: int, key: str) -> tuple[int, str]:
        """Number and head of the row that charges a release.

        Raises:
            LedgerError: the release was not charged.
        """
        query = "SELECT number, head FROM charges WHERE round = ? AND client = ? AND key = ?"
        rows = self._rows(query, round, client, key)
        if not rows:
            raise LedgerError(f"{self.path} has no charge for this release of round {round}")
        return int(rows[0][0]), str(rows[0][1])

    def charged_texts(self) -> list[Any]:
        """Fields of all rows that the heads cover, in order: round, client, key, event, claim,
        protects, guarantee.
        """
        return self._rows(
            "SELECT round, client, key, event, claim, protects, guarantee FROM charges ORDER BY "
            "number"
        )

    def since(self, round: int) -> list[tuple[int, int, str]]:
        """Triples (round, client, key) of all clients' rows from `round` on. These are the releases
        that an interrupted run had already charged.
        """
        return self._rows(
            "SELECT round, client, key FROM charges WHERE round >= ? AND client >= 0", round
        )

    def _rows(self, query: str, *values: int | str) -> list[Any]:
        with self._translate_errors():
            return self._db.execute(query, values).fetchall()

    def hold(self) -> AbstractContextManager[None]:
        """Within the block, keep other runs from holding this ledger, including runs of other
        processes.

        A run holds its ledger from the check for other runs' rounds until the run's last charge.
        The operating system releases the lock when the process ends.

        Raises:
            LedgerError: another run holds the ledger.
        """
        return ledger_file.hold(self.path)

    def close(self) -> None:
        """Write the write-ahead log into the ledger's file, and close the file."""
        with closing(self._db), self._translate_errors():
            if not self._reading:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _head(before: str, row: Sequence[object]) -> str:
    """Head after a row. The hash omits empty fields at the end of the row, so that rows without a
    protection or a guarantee have the same hash as in earlier versions.
    """
    fields = [str(field) for field in row]
    while not fields[-1]:
        fields.pop()
    return digest(before, *fields)


def _last(through: int | None) -> int:
    return 2**62 if through is None else through
