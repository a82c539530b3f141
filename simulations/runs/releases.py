"""The releases that a run keeps for its certificate (`run.keep_releases`).

`releases/` is public. It holds the initial weights (float32) and every released sum (float64), as
raw little-endian numbers, and a chain of hashes: a head covers the recipe, the code, the initial
weights, the commitment to the noise, and for every release so far the ledger's head, the plan and
the released vector. A head that others keep therefore fixes all of them. `private/sums/` holds the
sums before the noise, which only an auditor may see.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import rfc8785
from torch import Tensor

from fedlgm.cache import version_of
from fedlgm.errors import RunError
from fedlgm.files import PRIVATE, PUBLIC, write_durably
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy import evidence
from fedlgm.privacy.ledger import SERVER, Ledger

_VERSIONS = ("fedlgm", "dp-accounting", "torch", "numpy")


def round_file(round: int) -> str:
    """Name of a round's file of numbers.

    Example:
        >>> round_file(7)
        'round-000007.f64'
    """
    return f"round-{round:06d}.f64"


def layer_records(layers: LayerTable) -> list[Any]:
    """[layer, size, [[tensor, size], ...]] of each layer, in the order of the flat model.

    Example:
        >>> layer_records(LayerTable.from_sizes({"a": 4, "b": 1}))
        [['a', 4, [['a', 4]]], ['b', 1, [['b', 1]]]]
    """
    return [
        [layer.name, int(layer.size), [[slot.name, int(slot.size)] for slot in layer.slots]]
        for layer in layers.layers
    ]


class ReleaseLog:
    """The kept releases of a run; a `ReleaseKeeper`.

    Args:
        folder: the run's folder.
        ledger: the run's ledger, whose rows are charged before a release is kept; None reads only.
    """

    def __init__(self, folder: Path, ledger: Ledger | None = None) -> None:
        self.public, self.private = folder / "releases", folder / "private" / "sums"
        self.chain_file = self.public / "chain.jsonl"
        self._ledger, self._plans, self._rows = ledger, set[str](), self.rows()
        self._plans.update(row["plan"] for row in self._rows[1:])

    def begin(
        self, owner: str, initial: Tensor, layers: LayerTable, noise: dict[str, Any] | None
    ) -> None:
        """Write the start of the chain, or check that the one on disk has the same content.

        Args:
            owner: identity of the ledger.
            initial: initial model, float32 [D].
            layers: layers of the model.
            noise: commitment and beacon; None if the seed is public.

        Raises:
            RunError: the run was begun with other weights, code or commitment.
        """
        weights = initial.detach().cpu().numpy().astype("<f4").tobytes()
        software = {name: version_of(name) or "" for name in _VERSIONS}
        start = {
            "owner": owner,
            "initial": hashlib.sha256(weights).hexdigest(),
            "layers": layer_records(layers),
            "noise": noise,
            "software": software | {"python": _python(), "source": evidence.code_digest()},
        }
        head = evidence.first_head(rfc8785.dumps(start))
        if self._rows:
            if self._rows[0]["head"] != head:
                raise RunError(
                    f"{self.chain_file} was begun with other code, weights or another commitment: "
                    "a certificate covers one of them; continue with those, or start a new run"
                )
            return
        self.public.mkdir(exist_ok=True)
        write_durably(self.public / "initial.f32", weights, PUBLIC)
        self._append({"round": 0, "start": start, "head": head})

    def keep(self, round: int, plan: ReleasePlan, key: str, exact: Tensor, noisy: Tensor) -> None:
        """See `ReleaseKeeper.keep`. A release that is repeated with the same bits is kept once."""
        assert self._ledger is not None
        released = noisy.detach().cpu().numpy().astype("<f8").tobytes()
        row, ledger = self._ledger.row_of(round, SERVER, key)
        text = plan.to_json()
        record = {
            "round": round,
            "row": row,
            "plan": hashlib.sha256(text.encode()).hexdigest(),
            "released": hashlib.sha256(released).hexdigest(),
        }
        if any(record.items() <= earlier.items() for earlier in self._rows):
            return
        if self._rows[0]["start"]["noise"] is not None:  # an auditor never opens a public seed
            sums = exact.detach().cpu().numpy().astype("<f8").tobytes()
            self.private.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_durably(self.private / round_file(round), sums, PRIVATE)
        write_durably(self.public / round_file(round), released, PUBLIC)
        before, facts = self._rows[-1]["head"], (record["plan"], record["released"])
        head = evidence.next_head(before, round, ledger, *facts)  # type: ignore[arg-type]
        shown = {} if record["plan"] in self._plans else {"text": text}
        self._plans.add(str(record["plan"]))
        self._append(record | shown | {"head": head})

    def rows(self) -> list[dict[str, Any]]:
        """The start of the chain, and one row for each kept release; without a last row that a
        crash truncated.
        """
        if not self.chain_file.is_file():
            return []
        rows = []
        for line in self.chain_file.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def _append(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        lines = "".join(json.dumps(each) + "\n" for each in self._rows[-1:])
        complete = not self.chain_file.is_file() or self.chain_file.read_bytes().endswith(b"\n")
        if not complete or len(self._rows) == 1:  # a row that a crash truncated is written anew
            lines = "".join(json.dumps(each) + "\n" for each in self._rows)
            write_durably(self.chain_file, lines.encode(), PUBLIC)
            return
        with self.chain_file.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def _python() -> str:
    import platform

    return platform.python_version()
