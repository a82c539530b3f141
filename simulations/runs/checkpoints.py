"""Checkpoints, which hold everything that later rounds depend on, in one safetensors file each."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlgm.errors import ConfigError, DiskError, PrivacyError, RunError
from fedlgm.files import explain_failure, replacing
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript

_KEPT = 2  # a crash on a failing disk could have cut the last checkpoint short


@dataclass(frozen=True)
class Checkpoint:
    """A run after some of its rounds.

    Attributes:
        transcript: the releases that later rounds depend on.
        optimizer: state of the server's optimizer.
        head: the ledger's head; empty without a ledger.
        noise: `NoiseRings.digest` of its rounds, if noise is correlated.
        keys: name of the keys that drew the participants, which reveals nothing about them.
    """

    transcript: Transcript
    optimizer: dict[str, Tensor]
    head: str = ""
    noise: str = ""
    keys: str = ""


class Checkpoints:
    """The newest checkpoints of a run.

    Args:
        path: folder of the checkpoints, made with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> list[Path]:
        """The checkpoints, the newest last."""
        return sorted(self.path.glob("round-*.safetensors"))

    def heads(self) -> list[str]:
        """Heads of the ledger that the checkpoints hold; empty for a checkpoint that has no head or
        cannot be read.
        """
        return [_metadata(file).get("ledger_head", "") for file in self.files()]

    def rounds(self) -> int:
        """Number of rounds of the newest checkpoint that states it; 0 without such a checkpoint."""
        said = (_metadata(file).get("rounds", "") for file in reversed(self.files()))
        return next((int(text) for text in said if text.isdigit()), 0)

    def plan(self) -> dict[str, Any]:
        """JSON form of the last plan, from the newest checkpoint that has one; otherwise empty."""
        texts = (_metadata(file).get("plan", "") for file in reversed(self.files()))
        try:
            plan: object = next((json.loads(text) for text in texts if text), {})
        except ValueError:
            return {}
        return plan if isinstance(plan, dict) else {}

    def multiplier(self) -> float | None:
        """Noise multiplier of the last plan; None if no checkpoint states it."""
        facts = self.plan().get("facts")
        stated = facts.get("noise_multiplier") if isinstance(facts, dict) else None
        return float(stated) if isinstance(stated, int | float) else None

    def write(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, atomically, and remove checkpoints that are no longer needed.

        Raises:
            DiskError: the checkpoint cannot be written.
        """
        transcript = checkpoint.transcript
        tensors = {f"models.{i}": model for i, model in enumerate(transcript.models)}
        tensors |= {f"optimizer.{name}": value for name, value in checkpoint.optimizer.items()}
        if transcript.mean is not None:
            tensors["mean"] = transcript.mean
        plan = transcript.plan.to_json() if transcript.plan else ""
        meta = {"rounds": str(transcript.rounds), "plan": plan, "ledger_head": checkpoint.head}
        meta |= {"noise": checkpoint.noise} if checkpoint.noise else {}
        meta |= {"keys": checkpoint.keys} if checkpoint.keys else {}
        target = self._file(transcript.rounds)
        try:
            self.path.mkdir(exist_ok=True)  # perhaps somebody removed it to save space
            with replacing(target) as partial:
                save_file(
                    {name: t.contiguous().clone() for name, t in tensors.items()},
                    partial,
                    metadata=meta,
                )
        except (SafetensorError, OSError) as error:
            what = f"cannot write the checkpoint {target}"
            raise DiskError(explain_failure(what, error)) from error
        for old in self.files()[:-_KEPT]:
            old.unlink()

    def latest(self, layers: LayerTable) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None.

        Args:
            layers: layers of the run's model.

        Raises:
            RunError: there are checkpoints, but none can be read, they belong to a model of another
                size, or the newest one holds no state that a run can have.
        """
        newest = self._newest(layers)
        if newest is None:
            return None
        meta, models, tensors = newest
        try:
            plan = ReleasePlan.from_json(layers, meta["plan"]) if meta["plan"] else None
        except (ConfigError, PrivacyError) as error:
            raise _damage_error(self._file(int(meta["rounds"])), str(error)) from error
        optimizer = {
            n.removeprefix("optimizer."): t
            for n, t in tensors.items()
            if n.startswith("optimizer.")
        }
        transcript = Transcript(int(meta["rounds"]), models, tensors.get("mean"), plan)
        problem = transcript.problem()
        if problem:
            raise _damage_error(self._file(transcript.rounds), problem)
        return Checkpoint(
            transcript,
            optimizer,
            meta.get("ledger_head", ""),
            meta.get("noise", ""),
            meta.get("keys", ""),
        )

    def model(self, layers: LayerTable) -> Tensor | None:
        """The model of the newest checkpoint that can be read, [D], or None. The run's mechanism is
        not needed.

        Args:
            layers: layers of the run's model, in any grouping.

        Raises:
            RunError: see `latest`.
        """
        newest = self._newest(layers)
        return None if newest is None else newest[1][-1]

    def into(self, module: nn.Module, layers: LayerTable) -> nn.Module:
        """The module, changed in place, with the model of the newest checkpoint, in evaluation
        mode.

        Raises:
            RunError: there is no checkpoint, or as in `latest`.
        """
        model = self.model(layers)
        if model is None:
            raise RunError(f"{self.path.parent} no longer has a checkpoint, so its model is lost")
        layers.load_(module, model)
        return module.eval()

    def _file(self, rounds: int) -> Path:
        return self.path / f"round-{rounds:06d}.safetensors"

    def _newest(
        self, layers: LayerTable
    ) -> tuple[dict[str, str], tuple[Tensor, ...], dict[str, Tensor]] | None:
        """Metadata, models and all tensors of the newest checkpoint that can be read."""
        files = self.files()
        for file in reversed(files):
            meta = _metadata(file)
            try:
                rounds, _ = int(meta["rounds"]), meta["plan"]
                tensors = load_file(file)
            except (SafetensorError, OSError, KeyError, ValueError):
                continue
            if file != self._file(rounds):
                raise _damage_error(file, f"it says that it was made after {rounds} rounds")
            models = tuple(
                tensors[f"models.{i}"] for i in range(sum(n.startswith("models.") for n in tensors))
            )
            if not models:
                raise _damage_error(file, "it has no model")
            if models[-1].numel() != layers.size:
                raise RunError(
                    f"the model of {self.path.parent} has {models[-1].numel():,} parameters, but "
                    f"the given model has {layers.size:,}: pass the architecture that the run "
                    "trained"
                )
            return meta, models, tensors
        if files:
            raise RunError(f"no checkpoint in {self.path} can be read")
        return None


def model_digest(model: Tensor) -> str:
    """SHA-256 of a flat float32 model."""
    return hashlib.sha256(model.to(torch.float32).contiguous().numpy().tobytes()).hexdigest()


def _damage_error(file: Path, problem: str) -> RunError:
    return RunError(
        f"the checkpoint {file} is damaged or was edited: {problem}; restore it from a backup, or "
        "delete it, and the run continues from the previous checkpoint"
    )


def _metadata(checkpoint: Path) -> dict[str, str]:
    """Metadata of a checkpoint; empty if it cannot be read."""
    try:
        with safe_open(checkpoint, framework="pt") as stored:  # type: ignore[no-untyped-call]
            return dict(stored.metadata() or {})
    except (SafetensorError, OSError):
        return {}
