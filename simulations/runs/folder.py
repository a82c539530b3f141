"""A run is a folder: recipe, metrics, ledger, checkpoints, TensorBoard events, report.

Files under `private/` (mode 0600) are for the run's operator alone: who took part shows in them, or they hold the keys
of its noise.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fedlgm.errors import LedgerError, RunError
from fedlgm.files import PUBLIC, open_private, write_durably
from fedlgm.keys import KeyRing
from fedlgm.layers import LayerTable
from fedlgm.privacy.ledger import Head, Ledger
from fedlgm.run_noise import RunNoise
from fedlgm.transcript import Transcript
from simulations.config import recipe as recipes
from simulations.config.recipe import Recipe
from simulations.runs import strict_json
from simulations.runs.agreement import check_summary
from simulations.runs.checkpoints import Checkpoint, Checkpoints
from simulations.runs.diverged_file import DivergedFile
from simulations.runs.key_file import KeyFile, name_of
from simulations.runs.noise_file import NoiseFile
from simulations.runs.provenance_file import ProvenanceFile
from simulations.runs.row_file import RowFile
from simulations.runs.rows import FullRow, RunSummary


class RunFolder:
    """One run's files under `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunFolder:
        """Make a new folder, which has its recipe as soon as it is there.

        Raises:
            RunError: it exists already (nothing is touched) or cannot be made.
        """
        cls.refuse_existing(path)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            (draft / "checkpoints").mkdir(parents=True)
            write_durably(cls(draft).recipe_file, recipe.to_toml().encode(), PUBLIC)
            draft.rename(path)
        except OSError as error:
            raise RunError(f"cannot create the run folder {path}: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return cls(path)

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Raise RunError if there is something at `path`."""
        if path.exists():
            raise RunError(f"{path} exists already: choose another --run-dir, or continue it with --resume {path}")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run.

        Raises:
            RunError: not a run folder.
        """
        folder = cls(path)
        if not folder.recipe_file.is_file():
            raise RunError(f"{path} is not a run folder (it has no recipe.toml)")
        return folder

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def ledger_file(self) -> Path:
        """The privacy ledger."""
        return self.path / "ledger.sqlite"

    @property
    def metrics_file(self) -> Path:
        """One JSON object per round."""
        return self.path / "metrics.jsonl"

    @property
    def result_file(self) -> Path:
        """The final summary, written once at the end."""
        return self.path / "result.json"

    @property
    def diagnostics_file(self) -> Path:
        """One JSON object per round that only the operator may see."""
        return self.path / "private" / "diagnostics.jsonl"

    @property
    def canaries_file(self) -> Path:
        """One JSON object per round of what the canaries of an audited run saw; it tells who of them was in."""
        return self.path / "private" / "canaries.jsonl"

    @property
    def provenance(self) -> ProvenanceFile:
        """What the run is made of: its clients, versions, sources of users' own objects."""
        return ProvenanceFile(self.path / "provenance.json")

    def private_file(self, name: str) -> Path:
        """A new, empty file that only the operator may read."""
        path = self.path / "private" / name
        open_private(path, "w").close()
        return path

    def append_private(self, name: str, line: str) -> None:
        """Add a line to a file that only the operator may read."""
        with open_private(self.path / "private" / name, "a") as file:
            file.write(line + "\n")

    def recipe(self) -> Recipe:
        """The run's own recipe."""
        return recipes.load(self.recipe_file)

    def owner(self) -> str:
        """Identity of the run for its ledger: the recipe's hash."""
        return hashlib.sha256(self.recipe_file.read_bytes()).hexdigest()

    def verify(self) -> None:
        """Check that what the run has spent is known, before anything is done or changed.

        Raises:
            LedgerError: the ledger is damaged or was changed, belongs to another recipe, or is missing or behind where
                rounds have been released; or the result of a finished run states another epsilon.
        """
        if self.ledger_file.exists():
            recipe, result = self.recipe(), self.result()
            with Ledger(self.ledger_file) as ledger:
                central = recipe.privacy.trust == "central"
                released = self._released()  # before the ledger is read: another process may be at work
                ledger.verify(self.anchors(), owner=self.owner(), contiguous=central)
                charged = ledger.rounds()
                if result is not None:
                    check_summary(result, recipe, ledger, str(self.result_file))
            if central and released > charged:
                raise LedgerError(
                    f"{self.ledger_file} has no charge for round {charged + 1}, but {released} rounds were released by "
                    f"{self.metrics_file.name}: it is an older copy; restore a newer one or start a new run"
                )
        elif self.checkpoints.files() or self._released():
            raise LedgerError(
                f"{self.path} has released rounds but no {self.ledger_file.name}: what they have spent is not known; "
                "restore the ledger from a backup or start a new run"
            )

    def _released(self) -> int:
        """The last round that was released, by the rows of metrics: a round's row follows its charge."""
        return max((int(row["round"]) for row in self._metrics if not row.get("skipped")), default=0)

    def anchors(self) -> list[Head]:
        """Heads of the ledger that checkpoints and the result hold."""
        kept = self.checkpoints.heads()
        if self.result_file.is_file():
            kept.append(str((self.result() or {}).get("ledger_head") or ""))
        return [Head.parse(text) for text in kept if text]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process from working on this run; the kernel lets go of it when this process ends.

        Raises:
            RunError: another process works on it.
        """
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another process is working on the run {self.path}: wait for it, or stop it") from None
            self._close()
            yield

    def _close(self) -> None:
        """Take everybody else's rights on private files: a copy of the folder may have come without its modes."""
        folder = self.diagnostics_file.parent
        for path in (folder, *folder.rglob("*")) if folder.is_dir() else ():
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077 and not path.is_symlink():
                with suppress(OSError):  # another owner's, or a file system without modes
                    path.chmod(mode & 0o700)

    @contextmanager
    def handed_over(self, objects: Any) -> Iterator[Path | None]:
        """Private file of Python objects for processes that Flower starts on this machine; None without objects."""
        if not objects:
            yield None
            return
        import cloudpickle

        path = self.path.resolve() / "private" / "objects.pkl"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_durably(path, cloudpickle.dumps(objects))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    # -- metrics -------------------------------------------------------------------------------------------------------

    @property
    def _metrics(self) -> RowFile:
        return RowFile(self.metrics_file)

    @property
    def _diagnostics(self) -> RowFile:
        return RowFile(self.diagnostics_file, private=True)

    @property
    def _canaries(self) -> RowFile:
        return RowFile(self.canaries_file, private=True)

    def append(self, row: Mapping[str, Any], private: Mapping[str, Any] | None = None) -> None:
        """Add one round's row, and the operator's own."""
        if private is not None:
            self._diagnostics.append(private)
        self._metrics.append(row)

    def rows(self, private: bool = False) -> list[FullRow]:
        """All complete rows; a row cut short by a crash is left out.

        Args:
            private: whether each row also holds what only the operator may see.
        """
        rows = list(self._metrics)  # first: a row's private part is written before it
        own = {row["round"]: row for row in self._diagnostics} if private else {}
        return [cast(FullRow, own.get(row["round"], {}) | row) for row in rows]

    def append_canaries(self, row: Mapping[str, Any]) -> None:
        """Add what the canaries saw of one round."""
        self._canaries.append(row)

    def canaries(self) -> list[dict[str, Any]]:
        """What the canaries saw, complete rows only; empty for a run that was not audited."""
        return list(self._canaries)

    def truncate(self, round: int) -> None:
        """Forget rows after `round`: those rounds are done again."""
        for file in (self._metrics, self._diagnostics, self._canaries):
            file.truncate(round)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final summary; the run's noise will not be drawn again, so its keys go."""
        write_durably(self.result_file, (strict_json.dumps(result, indent=2) + "\n").encode(), PUBLIC)
        self.forget_noise()

    def forget_noise(self) -> None:
        """Remove what the noise of a finished run could be drawn again from."""
        self._keys.forget()
        self.noise_file.unlink(missing_ok=True)

    @property
    def noise_file(self) -> Path:
        """Rings of the rounds' correlated noise, see `noise_file`; of runs without a seed, until they are finished."""
        return self.path / "private" / "noise"

    def run_noise(self, seed: int | None, checkpoint: Checkpoint | None) -> RunNoise:
        """The correlated noise of the run, as far as it has come.

        Raises:
            RunError: rounds were released whose noise cannot be drawn again: that of later rounds follows from it.
        """
        if seed is not None:
            return RunNoise()
        rings = NoiseFile(self.noise_file)
        if checkpoint is None or self._complete():
            return RunNoise(rings)
        if rings.digest(checkpoint.transcript.rounds) != checkpoint.noise:
            raise RunError(
                f"{self.noise_file} is not that of the rounds before the last checkpoint: restore it from a backup, or "
                "start a new run"
            )
        return RunNoise(rings)

    def _complete(self) -> bool:
        """Whether all rounds were released, so that no noise will be drawn any more."""
        return self.checkpoints.rounds() >= self.recipe().federation.rounds

    @property
    def _keys(self) -> KeyFile:
        return KeyFile(self.path / "private" / "keys")

    def keys(self, seed: int | None, checkpoint: Checkpoint | None = None) -> tuple[KeyRing, int]:
        """The run's key ring, and up to which row of the ledger releases cannot be repeated.

        A run without a seed keeps its root, from the operating system, in a private file until it is finished: a round
        that was released before an interruption is then released again as it was, and costs nothing more. If the file
        is lost, whatever was charged before is made with fresh noise and paid for again; a run whose rounds are one
        mechanism cannot go on then.

        Raises:
            RunError: the file is damaged, or gone where it is needed.
        """
        if seed is not None:
            return KeyRing.from_seed(seed), 0
        restricted = self.recipe().sampling.separation is not None
        file = self._keys
        if not file.path.is_file():
            charged = 0
            if self.ledger_file.is_file():
                with Ledger(self.ledger_file) as ledger:
                    charged = ledger.position()
            if charged and restricted and not self._complete():
                raise RunError(
                    f"{file.path} is gone: neither who may take part next nor the noise of the rounds that were "
                    "released can be known without it; restore it from a backup, or start a new run"
                )
            file.create(charged)
        try:
            ring, charged = file.read()
        except ValueError as error:
            lost = (
                "delete it, after which the run makes the releases since its last checkpoint once more with fresh "
                "noise, and pays for them"
            )
            raise RunError(
                f"{file.path} is damaged: restore it from a backup, or {'start a new run' if restricted else lost}"
            ) from error
        others = checkpoint is not None and checkpoint.keys not in ("", name_of(ring))
        if others and restricted and not self._complete():
            raise RunError(
                f"{file.path} is not that of the rounds before the last checkpoint: by other keys clients would "
                "take part sooner than they may; restore it from a backup, or start a new run"
            )
        return ring, charged

    def result(self) -> RunSummary | None:
        """The final summary of a finished run, else None.

        Raises:
            RunError: the file is damaged.
        """
        if not self.result_file.is_file():
            return None
        try:
            result = strict_json.loads(self.result_file.read_text(encoding="utf-8"))
        except ValueError:
            result = None
        if not isinstance(result, dict) or not result:
            raise RunError(f"{self.result_file} is damaged: delete it, and --resume writes it again")
        return cast(RunSummary, result)

    @property
    def diverged(self) -> DivergedFile:
        """How the run diverged, if that is how it ended last."""
        return DivergedFile(self.path / "diverged.json")

    def finished(self) -> RunSummary:
        """The summary of a finished run, after `verify`.

        Raises:
            RunError: the run is not finished, or the file is damaged.
            LedgerError: see `verify`.
        """
        result = self.result()
        if result is None:
            remedy = self.diverged.read() or f"continue it with `fedlgm simulate --resume {self.path}`"
            raise RunError(f"{self.path} is not finished: {remedy}")
        self.verify()
        return result

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Checkpoints:
        """What the run goes on from."""
        return Checkpoints(self.path / "checkpoints")

    def save(self, transcript: Transcript, optimizer: dict[str, Tensor]) -> None:
        """Checkpoint after `transcript.rounds` rounds, atomically."""
        head = noise = keys = ""
        if self.ledger_file.is_file():
            with Ledger(self.ledger_file) as ledger:
                head = str(ledger.head())
        if self.noise_file.is_file():
            noise = NoiseFile(self.noise_file).digest(transcript.rounds)
        if self._keys.path.is_file():
            keys = name_of(self.keys(None)[0])
        self.checkpoints.write(Checkpoint(transcript, optimizer, head, noise, keys))

    def latest(self, layers: LayerTable) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None; see `Checkpoints.latest`."""
        return self.checkpoints.latest(layers)
