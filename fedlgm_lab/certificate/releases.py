"""Stores the releases of a run for its certificate (`run.keep_releases`).

`releases/` is public. It holds the initial weights (float32) and every released sum (float64) as
raw little-endian numbers. The folder also holds a chain of hashes. Each head of the chain covers
the recipe, the code, the initial weights and the commitment to the noise, and for every release so
far the ledger's head, the plan and the released vector. None of these values can therefore be
changed later without detection by a party that has stored a head. `private/sums/` holds the sums
before the noise, which only an auditor may see.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from torch import Tensor, nn

from fedlgm.cache import version_of
from fedlgm.errors import RunError
from fedlgm.files import PRIVATE, PUBLIC, write_durably
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.ledger import SERVER, Ledger
from fedlgm.training.models import original
from fedlgm_lab.certificate.commitment import commitment_in, commits
from fedlgm_lab.certificate.verifier import chain
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder
from simulations.runs.row_file import RowFile

_VERSIONS = ("fedlgm", "dp-accounting", "torch", "numpy")


def round_file(round: int) -> str:
    """Return the name of the file with a round's vector.

    Example:
        >>> round_file(7)
        'round-000007.f64'
    """
    return f"round-{round:06d}.f64"


def layer_records(layers: LayerTable) -> list[Any]:
    """Describe each layer as [layer, size, [[tensor, size], ...]], in the order of the flat model.

    Example:
        >>> layer_records(LayerTable.from_sizes({"a": 4, "b": 1}))
        [['a', 4, [['a', 4]]], ['b', 1, [['b', 1]]]]
    """
    return [
        [layer.name, layer.size, [[slot.name, slot.size] for slot in layer.slots]]
        for layer in layers.layers
    ]


class ReleaseLog:
    """The stored releases of a run; a `ReleaseKeeper`.

    Args:
        folder: the run's folder.
        ledger: the run's ledger, in which a release is charged before it is stored; None if stored
            releases are only read.

    Attributes:
        rows: the start of the chain, and one row for each stored release.
    """

    def __init__(self, folder: Path, ledger: Ledger | None = None) -> None:
        self.public, self.private = folder / "releases", folder / "private" / "sums"
        self.chain = RowFile(self.public / "chain.jsonl", dict[str, Any])
        self.rows, self._ledger = list(self.chain), ledger

    def begin(
        self, owner: str, module: nn.Module, layers: LayerTable, noise: dict[str, Any] | None
    ) -> None:
        """Write the start of the chain, or check that the start on disk has the same content.

        Args:
            owner: identity of the ledger.
            module: the initial model.
            layers: layers of the model.
            noise: commitment and beacon; None if the seed is public or the clients add the noise.

        Raises:
            RunError: the run began with other weights, other code or another commitment.
        """
        weights = layers.flatten(module).numpy().astype("<f4").tobytes()
        trained = {slot.name for layer in layers.layers for slot in layer.slots}
        state = original(module).state_dict()
        software = {name: version_of(name) or "" for name in _VERSIONS}
        start = {
            "owner": owner,
            "initial": hashlib.sha256(weights).hexdigest(),
            "layers": layer_records(layers),
            "fixed": {name: _hash(state[name]) for name in state.keys() - trained},
            "noise": noise,
            "software": software | {"python": python_version(), "source": chain.code_digest()},
        }
        head = chain.first_head(start)
        if self.rows:
            self.chain.truncate(2**62)  # remove a row that a crash has cut short
            if self.rows[0]["head"] != head:
                raise RunError(
                    f"{self.chain.path} was begun with other code, weights or another commitment: "
                    "a certificate covers only one of each; continue with the earlier ones, or "
                    "start a new run"
                )
            return
        self.public.mkdir(exist_ok=True)
        write_durably(self.public / "initial.f32", weights, PUBLIC)
        self._add({"round": 0, "start": start, "head": head})

    def keep(
        self,
        round: int,
        plan: ReleasePlan,
        noisy: Tensor,
        key: str | None = None,
        exact: Tensor | None = None,
    ) -> None:
        """Store a release (see `ReleaseKeeper.keep`). A release that is repeated bit by bit is
        stored once.
        """
        assert self._ledger is not None
        released = noisy.cpu().numpy().astype("<f8").tobytes()
        # Plans of rounds with correlated noise differ only in their position, which follows from
        # the number of the round.
        text = replace(plan, position=None).to_json()
        record: dict[str, Any] = {
            "round": round,
            "plan": hashlib.sha256(text.encode()).hexdigest(),
            "released": hashlib.sha256(released).hexdigest(),
        }
        if any(record.items() <= earlier.items() for earlier in self.rows):
            return
        row, ledger = (
            self._ledger.head() if key is None else self._ledger.row_of(round, SERVER, key)
        )
        if exact is not None and self.rows[0]["start"]["noise"] is not None:
            sums = exact.cpu().numpy().astype("<f8").tobytes()
            self.private.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_durably(self.private / round_file(round), sums, PRIVATE)
        write_durably(self.public / round_file(round), released, PUBLIC)
        head = chain.next_head(
            self.rows[-1]["head"], round, ledger, record["plan"], record["released"]
        )
        stated = any(record["plan"] == earlier.get("plan") for earlier in self.rows)
        self._add(record | {"row": row, "head": head} | ({} if stated else {"text": text}))

    def _add(self, row: dict[str, Any]) -> None:
        self.chain.append(row)
        self.rows.append(row)


def release_log(assembly: Assembly, folder: RunFolder, ledger: Ledger) -> ReleaseLog:
    """Open the log of a run that begins or continues, after the run has committed to its noise (see
    `settled_root`).

    Args:
        assembly: the run's objects.
        folder: the run's folder.
        ledger: the run's ledger.

    Raises:
        RunError: see `ReleaseLog.begin`.
    """
    log, noise = ReleaseLog(folder.path, ledger), None
    if commits(assembly.recipe):
        noise = commitment_in(folder.path).statement | {
            "backend": assembly.model.numerics.noise_backend
        }
    log.begin(folder.owner(), assembly.model.module(), assembly.model.layers, noise)
    return log


def _hash(tensor: Tensor) -> str:
    """Compute the SHA-256 of a tensor's numbers as they are stored."""
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
