"""A run is a folder: recipe, metrics, ledger, checkpoints, TensorBoard events, report."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedlgm.errors import LedgerError, RunError
from fedlgm.layers import LayerTable
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.ledger import Ledger
from fedlgm.transcript import Transcript
from simulations.config import recipe as recipes
from simulations.runs import strict_json
from simulations.config.recipe import Recipe

_KEPT = 2  # checkpoints; the last could be the one that a crash cut short on a failing disk


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the rounds after it depend on."""

    transcript: Transcript
    optimizer: dict[str, Tensor]


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
            _write(cls(draft).recipe_file, recipe.to_toml().encode())
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
        """One JSON object a round."""
        return self.path / "metrics.jsonl"

    @property
    def result_file(self) -> Path:
        """The final summary, written once at the end."""
        return self.path / "result.json"

    def recipe(self) -> Recipe:
        """The run's own recipe."""
        return recipes.load(self.recipe_file)

    def owner(self) -> str:
        """Identity of the run for its ledger: the recipe's hash."""
        return hashlib.sha256(self.recipe_file.read_bytes()).hexdigest()

    def verify(self) -> None:
        """Check that what the run has spent is known, before anything is done or changed.

        Raises:
            LedgerError: the ledger is damaged, belongs to another recipe, or is missing or behind where rounds have
                been released.
        """
        if self.ledger_file.exists():
            with Ledger(self.ledger_file, self.owner()) as ledger:
                shown = ledger.position()
            charged = max((int(meta.get("charged", 0)) for meta in map(_metadata, self._checkpoints())), default=0)
            if shown < charged:
                raise LedgerError(
                    f"{self.ledger_file} shows {shown} releases, there were {charged} when the last checkpoint was "
                    "written: it is an older copy; restore a newer one or start a new run"
                )
        elif self._checkpoints():
            raise LedgerError(
                f"{self.path} has checkpoints but no {self.ledger_file.name}: what its rounds have spent is not known; "
                "restore the ledger from a backup or start a new run"
            )

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
            yield

    # -- metrics -------------------------------------------------------------------------------------------------------

    def append(self, row: dict[str, Any]) -> None:
        """Add one round's row."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(strict_json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All complete rows; a row cut short by a crash is left out."""
        return list(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.metrics_file.is_file():
            return
        for line in self.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = strict_json.loads(line)
            except ValueError:
                return
            if not isinstance(row, dict) or "round" not in row:
                return
            yield row

    def truncate(self, round: int) -> None:
        """Forget rows after `round`: those rounds are done again."""
        kept = [row for row in self.rows() if row["round"] <= round]
        _write(self.metrics_file, "".join(strict_json.dumps(row) + "\n" for row in kept).encode())

    def finish(self, result: dict[str, Any]) -> None:
        """Write the final summary."""
        _write(self.result_file, (strict_json.dumps(result, indent=2) + "\n").encode())

    def result(self) -> dict[str, Any] | None:
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
        return result

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, transcript: Transcript, optimizer: dict[str, Tensor]) -> None:
        """Checkpoint after `transcript.rounds` rounds, atomically."""
        tensors = {f"models.{i}": model for i, model in enumerate(transcript.models)}
        tensors |= {f"optimizer.{name}": value for name, value in optimizer.items()}
        if transcript.mean is not None:
            tensors["mean"] = transcript.mean
        charged = 0
        if self.ledger_file.is_file():
            with Ledger(self.ledger_file) as ledger:
                charged = ledger.position()
        plan = transcript.plan.to_json() if transcript.plan else ""
        meta = {"rounds": str(transcript.rounds), "plan": plan, "charged": str(charged)}
        target = self.path / "checkpoints" / f"round-{transcript.rounds:06d}.safetensors"
        partial = target.with_suffix(".partial")
        try:
            save_file({name: t.contiguous().clone() for name, t in tensors.items()}, partial, metadata=meta)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(target)
        except (SafetensorError, OSError) as error:
            partial.unlink(missing_ok=True)
            raise RunError(f"cannot write the checkpoint {target}: {error}") from error
        for old in self._checkpoints()[:-_KEPT]:
            old.unlink()

    def latest(self, layers: LayerTable) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None.

        Raises:
            RunError: there are checkpoints, but none can be read.
        """
        files = self._checkpoints()
        for file in reversed(files):
            meta = _metadata(file)
            try:
                rounds, described, tensors = int(meta["rounds"]), meta["plan"], load_file(file)
            except (SafetensorError, OSError, KeyError, ValueError):
                continue
            models = tuple(tensors[f"models.{i}"] for i in range(sum(n.startswith("models.") for n in tensors)))
            plan = ReleasePlan.from_json(layers, described) if described else None
            optimizer = {n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")}
            return Checkpoint(Transcript(rounds, models, tensors.get("mean"), plan), optimizer)
        if files:
            raise RunError(f"no checkpoint in {self.path / 'checkpoints'} can be read")
        return None

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"))


def model_digest(model: Tensor) -> str:
    """SHA-256 of a flat float32 model."""
    return hashlib.sha256(model.to(torch.float32).contiguous().numpy().tobytes()).hexdigest()


def _metadata(checkpoint: Path) -> dict[str, str]:
    """What a checkpoint says of itself; nothing if it cannot be read."""
    try:
        with safe_open(checkpoint, framework="pt") as stored:  # type: ignore[no-untyped-call]
            return dict(stored.metadata() or {})
    except (SafetensorError, OSError):
        return {}


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
