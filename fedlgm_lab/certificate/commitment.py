"""The commitment of a run to its noise, before an auditor draws the beacon.

The root of a run's keys follows from a secret root of the operator and from a beacon. The operator
first publishes a hash of the root and only then sees the beacon, so neither the operator nor the
auditor can pick the noise. The secret root stays in the run's private folder after the run, for the
auditor.
"""

from __future__ import annotations

import json
import secrets
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlgm.errors import Notice, RunError
from fedlgm.files import PRIVATE, create_durably, explain_failure, path_of, write_durably
from fedlgm_lab.certificate.beacon import beacon_text, commitment_of, noise_root
from fedlgm_lab.certificate.verifier.envelope import is_signed
from simulations.config.recipe import Recipe

_POLL = 0.2  # seconds
OPERATOR = "operator"
"""Source of a beacon that no auditor drew."""


class Commitment:
    """The secret root, its public commitment and the beacon of one run.

    Args:
        path: the private file, which holds root, nonce and beacon.
        public: the file that holds the commitment.
    """

    def __init__(self, path: Path, public: Path) -> None:
        self.path, self.public = path, public

    def settle(self, beacon: Path | None, seconds: float) -> None:
        """Commit to a root, and wait for the beacon; a settled commitment is unchanged.

        Args:
            beacon: file in which the auditor answers; None draws a beacon here, which an auditor
                will not accept.
            seconds: longest time to wait for a missing file.

        Raises:
            RunError: no answer arrived, the answer is not to this commitment, or the secret root is
                missing.
        """
        if not self.path.is_file():
            if self.public.is_file():
                raise RunError(
                    f"{self.path} is gone: without it the run's noise cannot be opened to an "
                    "auditor; restore it from a backup, or start a new run"
                )
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh = {"root": secrets.token_hex(32), "nonce": secrets.token_hex(32)}
            create_durably(self.path, json.dumps(fresh).encode())
        raw = self._read()
        if "beacon" in raw:
            return
        commitment = self.commitment
        self.public.parent.mkdir(exist_ok=True)
        write_durably(self.public, f"commitment:{commitment}\n".encode(), 0o644)
        answer = {"beacon": secrets.token_hex(32), "by": OPERATOR, "signature": ""}
        if beacon is not None:
            self._wait(beacon, seconds)
            answer = read_beacon(beacon, commitment)
        write_durably(self.path, json.dumps(raw | answer).encode(), PRIVATE)

    @property
    def commitment(self) -> str:
        """The public commitment."""
        raw = self._read()
        return commitment_of(bytes.fromhex(raw["root"]), bytes.fromhex(raw["nonce"]))

    @property
    def statement(self) -> dict[str, str]:
        """The public values of a settled commitment: the commitment, and the beacon with its
        source.
        """
        raw = self._read()
        public = {name: raw[name] for name in ("beacon", "by", "signature")}
        return {"commitment": self.commitment} | public

    def root(self) -> int:
        """The root of the run's keys."""
        raw = self._read()
        return noise_root(bytes.fromhex(raw["root"]), bytes.fromhex(raw["beacon"]))

    def _read(self) -> dict[str, Any]:
        try:
            raw: dict[str, Any] = json.loads(self.path.read_text(encoding="ascii"))
            bytes.fromhex(raw["root"] + raw["nonce"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "restore it from a backup, or start a new run"
            raise RunError(explain_failure(f"{self.path} is damaged", error, remedy)) from error
        return raw

    def _wait(self, path: Path, seconds: float) -> None:
        until = time.monotonic() + seconds
        if not _is_complete(path):
            text = f"the noise is committed to, commitment:{self.commitment} ({self.public})"
            warnings.warn(
                Notice(f"{text}; waiting {seconds:g} seconds for the auditor's beacon in {path}"),
                stacklevel=4,
            )
        while not _is_complete(path):
            if time.monotonic() > until:
                raise RunError(
                    f"run.beacon: no beacon arrived in {path}: raise federation.wait_for_nodes, or "
                    "leave run.beacon out"
                )
            time.sleep(_POLL)


def _is_complete(path: Path) -> bool:
    """Whether a file has its last line; a file that is being written may have none."""
    return path.is_file() and path.read_bytes().endswith(b"\n")


def read_beacon(path: Path, commitment: str) -> dict[str, str]:
    """An auditor's signed answer to a commitment: beacon, public key and signature.

    Raises:
        RunError: the file holds no such answer.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        answer = {name: str(raw[name]) for name in ("beacon", "by", "signature")}
        sized = len(bytes.fromhex(answer["beacon"])) == 32
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"run.beacon: {path} is not an auditor's beacon"
        raise RunError(explain_failure(what, error)) from error
    text = beacon_text(commitment, answer["beacon"])
    if not (sized and is_signed(answer["by"], answer["signature"], text)):
        raise RunError(
            f"run.beacon: {path} is not a signed answer to commitment:{commitment}; the auditor "
            "makes one with `fedlgm anchor`"
        )
    return answer


def commitment_in(folder: Path) -> Commitment:
    """The commitment of the run in a folder."""
    return Commitment(folder / "private" / "opening.json", folder / "releases" / "commitment.txt")


def commits(recipe: Recipe) -> bool:
    """Whether the server of a run commits to its noise: it adds the noise, and no seed is public.

    Example:
        >>> from simulations.config.recipe import load
        >>> commits(load("digits"))
        False
    """
    return recipe.run.seed is None and not recipe.noised_by.uploads_released


def settled_root(folder: Path, recipe: Recipe) -> Callable[[], int] | None:
    """A function for the root of a run's keys, after the run has committed to it; None for a run
    that does not commit to its noise.

    Args:
        folder: the run's folder.
        recipe: its recipe.

    Raises:
        RunError: see `Commitment.settle`.
    """
    if not commits(recipe):
        return None
    commitment, beacon = commitment_in(folder), recipe.run.beacon
    answer = None if beacon is None else path_of("run.beacon", beacon)
    commitment.settle(answer, recipe.federation.wait_for_nodes)
    return commitment.root
