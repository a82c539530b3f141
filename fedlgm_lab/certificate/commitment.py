"""Commits a run to its noise before an auditor draws the beacon.

The root of a run's keys follows from a secret root of the operator and from a beacon. The operator
first publishes a hash of the root and only then sees the beacon, so neither the operator nor the
auditor can choose the noise. After the run, the secret root remains in the run's folder `private/`,
for the auditor.
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
"""Source of a beacon that the operator has drawn, because there was no auditor."""


class Commitment:
    """The secret root, its public commitment and the beacon of one run.

    Args:
        path: the secret file, which holds the root, the nonce and the beacon.
        public: the public file, which holds the commitment.
    """

    def __init__(self, path: Path, public: Path) -> None:
        self.path, self.public = path, public

    def settle(self, beacon: Path | None, seconds: float) -> None:
        """Commit to a root, and wait for the beacon. A commitment that already has its beacon does
        not change.

        Args:
            beacon: file into which the auditor writes the beacon. If None, the operator draws the
                beacon, which an auditor will not accept.
            seconds: longest time to wait for this file.

        Raises:
            RunError: no beacon arrived, the beacon is not signed for this commitment, or the secret
                root is missing.
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
        """The public values of a commitment that has its beacon: the commitment, and the beacon
        with its source and signature.
        """
        raw = self._read()
        public = {name: raw[name] for name in ("beacon", "by", "signature")}
        return {"commitment": self.commitment} | public

    def root(self) -> int:
        """Compute the root of the run's keys."""
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
    """Tell whether a file ends with a complete line; a file that is still being written may not."""
    return path.is_file() and path.read_bytes().endswith(b"\n")


def read_beacon(path: Path, commitment: str) -> dict[str, str]:
    """Read an auditor's signed answer to a commitment: beacon, public key and signature.

    Raises:
        RunError: the file holds no signed answer to this commitment.
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
    """Return the commitment of the run in a folder."""
    return Commitment(folder / "private" / "opening.json", folder / "releases" / "commitment.txt")


def commits(recipe: Recipe) -> bool:
    """Tell whether the server of a run commits to its noise. It does if it adds the noise and the
    run has no public seed.

    Example:
        >>> from simulations.config.recipe import load
        >>> commits(load("digits"))
        False
    """
    return recipe.run.seed is None and not recipe.noised_by.uploads_released


def settled_root(folder: Path, recipe: Recipe) -> Callable[[], int] | None:
    """Commit a run to its noise, and return a function that computes the root of the run's keys;
    None for a run that does not commit to its noise.

    Args:
        folder: the run's folder.
        recipe: the run's recipe.

    Raises:
        RunError: see `Commitment.settle`.
    """
    if not commits(recipe):
        return None
    commitment, beacon = commitment_in(folder), recipe.run.beacon
    answer = None if beacon is None else path_of("run.beacon", beacon)
    commitment.settle(answer, recipe.federation.wait_for_nodes)
    return commitment.root
