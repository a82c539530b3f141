"""A run's folder, with recipe, metrics, ledger, checkpoints, TensorBoard events and report.

Files under `private/` (mode 0600) are only for the run's operator: they show who took part, or hold
the keys of its noise.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from fedlgm import mechanisms
from fedlgm.data.class_names import default_names
from fedlgm.errors import ConfigError, LedgerError, RunError
from fedlgm.files import Under, close_folder, disk_errors, open_private, path_of
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.charge import Charge, Head
from fedlgm.privacy.cost import Cost
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.privacy.ledger import Ledger
from simulations import tools
from simulations.config import recipe as recipes
from simulations.config.recipe import Recipe
from simulations.runs import strict_json
from simulations.runs.agreement import check_rows, check_summary
from simulations.runs.checkpoints import Checkpoint, Checkpoints
from simulations.runs.diverged_file import DivergedFile
from simulations.runs.key_file import KeyFile, name_of
from simulations.runs.noise_file import NoiseFile
from simulations.runs.protection import guarantee_of, settled_multiplier
from simulations.runs.provenance_file import ProvenanceFile
from simulations.runs.row_file import RowFile
from simulations.runs.rows import CanaryRow, FullRow, PrivateRow, RoundRow, RunSummary
from simulations.runs.shapes import misfit
from simulations.runs.statement import statement_of

SEARCH = "search.json"
"""Terms of a search, which only the folder of a search has."""
_LOCK = ".lock"


class Worker(NamedTuple):
    """The process that works on a run.

    Attributes:
        pid: its number. If it runs in a container, this is the number in the container.
        runs: whether it runs; otherwise it was killed.
    """

    pid: int
    runs: bool


class RunFolder:
    """One run's files.

    Args:
        path: the folder.
        made_with: parent folders that were made together with the folder; None if the folder
            existed before.
    """

    def __init__(self, path: Path, made_with: tuple[Path, ...] | None = None) -> None:
        self.path, self.made_with = path, made_with
        # clients, versions, sources of users' objects
        self.provenance = ProvenanceFile(path / "provenance.json")
        # the run continues from the newest checkpoint
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.diverged = DivergedFile(path / "diverged.json")  # divergence of the last attempt
        self.metrics = RowFile(path / "metrics.jsonl", RoundRow)
        # Further rows of each round, only for the operator. In an audited run they show which
        # canaries were in.
        self.diagnostics = RowFile(self.private / "diagnostics.jsonl", PrivateRow, private=True)
        self.canaries = RowFile(self.private / "canaries.jsonl", CanaryRow, private=True)
        self._keys = KeyFile(self.private / "keys")
        self._held = False  # whether this object holds the lock

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run.

        Raises:
            ConfigError: the value is not a path, or the system refuses it.
            RunError: the folder is not a run's; it may be the folder of a search.
        """
        path = path_of("run", path)
        folder = cls(path)
        if (path / SEARCH).is_file():
            raise RunError(
                f"{path} is the folder of a search, not of a run: {SEARCH} states its cost"
            )
        if not folder.recipe_file.is_file():
            inner = min(path.glob("*/recipe.toml"), default=None)
            hint = "" if inner is None else f"; did you mean {inner.parent}, which is in it?"
            raise RunError(f"{path} is not a run folder (it has no recipe.toml){hint}")
        return folder

    recipe_file = Under("recipe.toml")
    """The resolved recipe."""
    ledger_file = Under("ledger.sqlite")
    """The privacy ledger."""
    result_file = Under("result.json")
    """The final summary, written once at the end."""
    audit_file = Under("private/audit.json")
    """Audit of a run by its canaries, which depends on values before the noise and is therefore not
    released."""

    private = Under("private")
    """The folder of the operator's files."""
    _noise_file = Under("private/noise")

    def private_file(self, name: str) -> Path:
        """A new, empty file that only the operator may read."""
        path = self.private / name
        open_private(path, "w").close()
        return path

    def append_private(self, name: str, line: str) -> None:
        """Add a line to a file that only the operator may read."""
        with open_private(self.private / name, "a") as file:
            file.write(line + "\n")

    def recipe(self) -> Recipe:
        """The run's own recipe.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            return recipes.load(self.recipe_file)
        except ConfigError as error:
            raise ConfigError(f"{self.recipe_file} is not the recipe of a run: {error}") from error

    def labels(self) -> list[str] | None:
        """Names of the classes, in the order of the model's outputs; None if the data have no
        names.
        """
        return (
            self.provenance.read().get("labels")
            or list(default_names(self.recipe().data.name))
            or None
        )

    def owner(self) -> str:
        """Identity of the run for its ledger: the recipe's hash."""
        return hashlib.sha256(self.recipe_file.read_bytes()).hexdigest()

    def verify(self) -> None:
        """Check the run's spending, before anything is changed; the errors are those of
        `checked_ledger`.
        """
        if self.ledger_file.exists() or self.begun():
            with self.checked_ledger():
                pass

    @contextmanager
    def checked_ledger(self) -> Iterator[Ledger]:
        """The run's ledger, opened for reading once and checked.

        Raises:
            LedgerError: the ledger is damaged or was changed, belongs to another recipe, or is
                missing or behind although rounds have been released; or the result of a finished
                run states another epsilon.
        """
        if not self.ledger_file.exists() and self.begun():
            raise LedgerError(
                f"{self.path} has released rounds but no {self.ledger_file.name}: their cost is "
                "not known; restore the ledger from a backup or start a new run"
            )
        recipe, result = self.recipe(), self.result()
        with Ledger(self.ledger_file) as ledger:
            # Rows are read before the ledger, because another process may be at work.
            released = self._last_released_round()
            ledger.verify(
                self.anchors(),
                owner=self.owner(),
                contiguous=not recipe.noised_by.uploads_released,
            )
            if result is not None:
                self._check_result(result, recipe, ledger)
            if released > ledger.rounds():
                raise LedgerError(
                    f"{self.ledger_file} has no charge for round {released}, which was released by "
                    f"{self.metrics.path.name}: it is an older copy; restore a newer one or start "
                    "a new run"
                )
            yield ledger

    def _check_result(self, result: RunSummary, recipe: Recipe, ledger: Ledger) -> None:
        """Refuse figures of a finished run that do not follow from its recipe and ledger."""
        guarantee, multiplier = self.guarantee_in(ledger), self._multiplier(ledger)
        recorded = max((row["round"] for row in self.metrics), default=0)
        where = str(self.result_file)
        check_summary(result, recipe, ledger, guarantee, multiplier, recorded, where)
        check_rows(self.metrics, recipe, ledger, str(self.metrics.path))

    def begun(self) -> bool:
        """Whether the run has charged or recorded a round."""
        if (
            self._last_released_round()
            or self.checkpoints.files()
            or self.result_file.is_file()
            or self.diverged.read()
        ):
            return True
        if not self.ledger_file.is_file():
            return False
        try:
            with Ledger(self.ledger_file) as ledger:
                return ledger.rounds() > 0
        except LedgerError:
            return True

    def _last_released_round(self) -> int:
        """The last released round, from the rows, since a round's row follows its charge.

        If clients release their uploads, nothing was released in a round in which nobody took part.
        """
        central = not self.recipe().noised_by.uploads_released
        return max(
            (
                row["round"]
                for row in self.rows(private=True)
                if not row.get("skipped") and (central or row.get("present"))
            ),
            default=0,
        )

    def guarantee_in(self, ledger: Ledger) -> Guarantee:
        """The run's guarantee, from its recipe and ledger and not from the summary, which may have
        been edited.

        Raises:
            LedgerError: the mechanism's guarantee is not known.
        """
        recipe = self.recipe()
        first, multiplier = _first(ledger), self._multiplier(ledger)
        if not mechanisms.is_own(recipe.mechanism.name):
            amplified = first is None or Cost.of(first.event).rate < 1
            return guarantee_of(
                recipe, self.provenance.layers(), amplified=amplified, multiplier=multiplier
            )
        stated = ledger.guarantee()
        if stated is None and first is not None:
            raise LedgerError(
                f"{self.ledger_file} does not state what the run's own mechanism guaranteed, "
                "because an earlier version of fedlgm wrote it: run it again"
            )
        plan = self.checkpoints.plan()
        if stated is None and "guarantee" not in plan:
            raise LedgerError(
                f"{self.path} has released nothing, and no checkpoint has a plan of its mechanism"
            )
        return stated or Guarantee(**plan["guarantee"])

    def _multiplier(self, ledger: Ledger) -> float | None:
        """Noise multiplier of the run; None if neither ledger nor checkpoints state it."""
        stated, first = self.checkpoints.multiplier(), _first(ledger)
        if first is None:
            return stated
        return settled_multiplier(
            self.recipe(), self.provenance.layers, stated, first, str(self.path)
        )

    def anchors(self) -> list[Head]:
        """Heads of the ledger that checkpoints and the result hold."""
        return [
            Head.parse(head)
            for head in (*self.checkpoints.heads(), (self.result() or {}).get("ledger_head"))
            if head
        ]

    def writing(self) -> AbstractContextManager[None]:
        """The context of every block that writes the run's files. It raises DiskError if the system
        refuses a file.
        """
        return disk_errors(self.path, "run")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock this run against all other processes. The operating system releases the lock when
        this process ends.

        Blocks of one object can be nested; an inner block holds the same lock.

        Raises:
            RunError: another process works on it, or as in `writing`.
        """
        if self._held:
            yield
            return
        with self.writing(), ExitStack() as held:
            try:
                file = held.enter_context((self.path / _LOCK).open("a"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                close_folder(self.private)  # a copy of the run's folder may have lost modes
            except BlockingIOError:
                raise RunError(
                    f"another process is working on the run {self.path}: wait for it, or stop it"
                ) from None
            held.callback(file.truncate, 0)
            file.truncate(0)
            with suppress(OSError):  # a full disk
                os.write(file.fileno(), str(os.getpid()).encode())
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def worker(self) -> Worker | None:
        """The process that holds the lock, or that was killed while it held it; None if there is
        none.

        The number of a killed process stays in the file. Only if the file holds a number does this
        method take the lock, for a moment. Other processes are therefore not refused needlessly.
        """
        file = self.path / _LOCK
        with suppress(OSError), file.open() as lock:
            if not (pid := lock.read()).isdecimal():
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Worker(int(pid), True)
            if file.read_text() == pid:  # otherwise the process has ended in the meantime
                return Worker(int(pid), False)
        return None

    # -- metrics -------------------------------------------------------------------------------------------------------

    def append(self, row: Mapping[str, Any], private: Mapping[str, Any] | None = None) -> None:
        """Add one round's row, and the operator's row."""
        if private is not None:
            self.diagnostics.append(private)
        self.metrics.append(row)

    def rows(self, private: bool = False) -> list[FullRow]:
        """All complete rows, without a row that was truncated by a crash.

        Args:
            private: whether each row also holds the operator's figures.
        """
        # public rows are read first, because a row's private part is written before its public part
        rows = list(self.metrics)
        private_rows = {row["round"]: row for row in self.diagnostics} if private else {}
        return [cast(FullRow, private_rows.get(row["round"], {}) | row) for row in rows]

    def every_row(self, result: RunSummary, private: bool = False) -> list[FullRow]:
        """`rows` of a finished run, for figures that need all of them.

        Raises:
            RunError: rows are missing.
        """
        rows = self.rows(private)
        if len(rows) != result["rounds"]:
            raise RunError(
                f"{self.metrics.path} has rows of {len(rows)} rounds, but the run had "
                f"{result['rounds']}: restore it from a backup"
            )
        return rows

    def audit_summary(self) -> RunSummary:
        """The canaries' audit of a finished run, only for its operator; empty for a run that was
        not audited.

        Raises:
            RunError: the file is damaged.
        """
        return _summary(self.audit_file) or {}

    def truncate(self, round: int) -> None:
        """Remove rows after `round`, because those rounds are repeated."""
        for file in (self.metrics, self.diagnostics, self.canaries):
            file.truncate(round)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final summary. The run's noise will not be drawn again, so its keys are
        removed.
        """
        strict_json.write(self.result_file, result)
        self.forget_noise()

    def forget_noise(self) -> None:
        """Remove the keys from which the noise of a finished run could be drawn again."""
        self._keys.forget()
        self._noise_file.unlink(missing_ok=True)

    def run_noise(self, seed: int | None, checkpoint: Checkpoint | None) -> RunNoise:
        """The run's correlated noise so far.

        Raises:
            RunError: the noise of released rounds, on which later noise depends, cannot be drawn
                again.
        """
        if seed is not None:
            return RunNoise()
        rings = NoiseFile(self._noise_file)
        if checkpoint is not None and not self._complete():
            rings.require(checkpoint.transcript.rounds, checkpoint.noise)
        return RunNoise(rings)

    def _complete(self) -> bool:
        """Whether the run has ended or all rounds have been released, so that no more noise will be
        drawn.
        """
        return (
            self.result_file.is_file()
            or self.checkpoints.rounds() >= self.recipe().federation.rounds
        )

    def keys(self, seed: int | None, checkpoint: Checkpoint | None = None) -> tuple[KeyRing, int]:
        """The run's key ring, and the last row of the ledger whose release cannot be repeated.

        A run without a seed keeps its root, from the operating system, in a private file until it
        is finished. A round that was released before an interruption is then released again
        unchanged, at no further cost. If the file is lost, earlier charged rounds are released
        again with fresh noise and charged again; a run whose rounds are one mechanism cannot
        continue.

        Raises:
            RunError: the file is damaged, or missing although it is needed.
        """
        if seed is not None:
            return KeyRing.from_seed(seed), 0
        recipe = self.recipe()
        scheduled = recipe.sampling.scheduled or recipe.federation.participations is not None
        needed = scheduled and not self._complete()
        if recipe.run.keep_releases:
            self._keys = KeyFile(self._keys.path, tools.settled_root(self.path, recipe))
        return self._keys.load_or_create(
            self._ledger_position(), needed, checkpoint.keys if checkpoint is not None else None
        )

    def _ledger_position(self) -> int:
        """Position of the ledger."""
        if not self.ledger_file.is_file():
            return 0
        with Ledger(self.ledger_file) as ledger:
            return ledger.position()

    def result(self) -> RunSummary | None:
        """The final summary of a finished run, otherwise None; it names the folder where it is now.

        Raises:
            RunError: the file is damaged.
        """
        summary = _summary(self.result_file)
        if summary is not None:
            summary["run"] = str(self.path)
        return summary

    def verified_result(self) -> RunSummary:
        """The summary of a finished run after `verify`, with its guarantee's sentence and its
        statement derived again.

        Raises:
            RunError: the run is not finished, or the file is damaged.
            LedgerError: as in `verify`.
        """
        result = self.result()
        if result is None:
            remedy = (
                self.diverged.read() or f"continue it with `fedlgm simulate --resume {self.path}`"
            )
            raise RunError(f"{self.path} is not finished: {remedy}")
        checked, recipe = result.copy(), self.recipe()
        with self.checked_ledger() as ledger:
            guarantee = self.guarantee_in(ledger)
            checked["statement"] = statement_of(
                recipe, ledger, guarantee, result["rounds"], result["noise_backend"]
            )
        checked["guarantee"] = guarantee.sentence(noise_reproducible=recipe.run.seed is not None)
        return checked

    def final_summary(self) -> RunSummary | None:
        """The summary of a finished run for its operator, after `verify`; None if the run is not
        finished.

        Its checkpoints may have been removed since, and its keys have been removed.
        """
        if self.result() is None:
            return None
        summary = self.verified_result()
        summary.update(self.audit_summary())
        self.forget_noise()
        return summary

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, transcript: Transcript, optimizer: dict[str, Tensor]) -> None:
        """Checkpoint after `transcript.rounds` rounds, atomically."""
        head = noise = keys = ""
        if self.ledger_file.is_file():
            with Ledger(self.ledger_file) as ledger:
                head = str(ledger.head())
        if self._noise_file.is_file():
            noise = NoiseFile(self._noise_file).digest(transcript.rounds)
        if self._keys.path.is_file():
            keys = name_of(self.keys(None)[0])
        self.checkpoints.write(Checkpoint(transcript, optimizer, head, noise, keys))


def _first(ledger: Ledger) -> Charge | None:
    """The first charge of the run's rounds; round 0 is before the run."""
    return next((charge for charge in ledger.charges() if charge.round > 0), None)


def _summary(file: Path) -> RunSummary | None:
    if not file.is_file():
        return None
    try:
        summary = strict_json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        summary = None
    wrong = misfit(summary, RunSummary) if summary else "it is empty or not JSON"
    if wrong:
        raise RunError(
            f"{file} is damaged ({wrong}): delete it and the run's result.json, and --resume "
            "writes both again"
        )
    return cast(RunSummary, summary)
