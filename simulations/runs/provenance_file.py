"""A run's provenance in a public file, which a continued run must share."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

from fedlgm.errors import LedgerError, Notice, OtherObjectsError, RunError
from fedlgm.files import create_durably
from simulations.config.own import FIXED, Own
from simulations.runs import strict_json
from simulations.runs.provenance import FILES, TRAINING_FILE
from simulations.runs.rows import Provenance
from simulations.runs.shapes import read_json

_KEYED = "hmac-sha256:"
"""Beginning of a hash that is keyed. Earlier versions stored all hashes without a key."""


class ProvenanceFile:
    """The file; `simulations.runs.provenance` describes its content.

    A reader who knows all examples but one could test a guess of the last example against a hash of
    private data, and no noise covers the hash. Hashes that may depend on data are therefore keyed,
    and the key is a private file.

    Args:
        path: the file, in the run's folder.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._run = path, path.parent
        self._key_file = path.parent / "private" / "provenance.key"

    def read(self) -> Provenance:
        """The run's provenance; empty before it starts.

        Raises:
            RunError: the file is damaged.
        """
        if not self._path.is_file():
            return {}
        return cast(Provenance, read_json(self._path, Provenance, "restore it from a backup"))

    def layers(self) -> dict[str, int]:
        """Sizes of the run's layers by name.

        Raises:
            LedgerError: the run has stored no sizes.
        """
        sizes = self.read().get("layers")
        if not sizes:
            raise LedgerError(
                f"{self._path} does not name the layers of the run's mechanism, so the "
                "guarantee is not known: restore the file from a backup"
            )
        return dict(sizes)

    def settle(self, provenance: Provenance) -> None:
        """Write the run's provenance, or check that the run continues with the same clients and
        objects.

        Raises:
            RunError: the run had other objects, or other clients (simulated ones or real nodes).
        """
        if not self._path.is_file():
            strict_json.write(self._path, self._without_data(provenance))
            return
        stored = self.read()
        self.check_objects(provenance.get("objects", {}))
        for what, source in stored.get("sources", {}).items():
            changed = provenance.get("sources", {}).get(what)
            same = changed is not None and self._agrees(source["sha256"], changed["sha256"])
            if what in FILES and not same:
                digest = (
                    "" if source["sha256"].startswith(_KEYED) else f" (SHA-256 {source['sha256']})"
                )
                raise RunError(
                    f"{source['file']} is not the {what} that {self._run} began with{digest}: "
                    "restore it"
                )
            if not same or {**source, "sha256": ""} != {**(changed or {}), "sha256": ""}:
                warnings.warn(
                    Notice(f"the source of the {what} has changed since the run started"),
                    stacklevel=2,
                )
        if stored.get("labels") != provenance.get("labels"):
            was, now = (
                ", ".join(record.get("labels") or ["without names"])
                for record in (stored, provenance)
            )
            raise RunError(
                f"{self._run} was run with the classes {was}: it cannot be continued with {now}"
            )
        if stored.get("columns", provenance.get("columns")) != provenance.get("columns"):
            raise RunError(
                f"{self._run} was run with other columns, in another order, or standardised "
                "otherwise: pass the same tables"
            )
        if "rows" in stored and not self._agrees(stored["rows"], provenance.get("rows", "")):
            raise RunError(
                f"{self._run} was run with other examples, or with another division of them: restore the data"
            )
        if stored.get("clients") != provenance.get("clients"):
            raise RunError(
                f"{self._run} was run with {stored.get('clients')}: it cannot be continued with "
                f"{provenance.get('clients')}, whose data are not the same"
            )

    def check_objects(self, fingerprints: Mapping[str, str]) -> None:
        """Refuse Python objects other than those that the run was given.

        Raises:
            OtherObjectsError: the message names the object that differs or is missing.
        """
        self.check_named(fingerprints)
        for what, fingerprint in self.read().get("objects", {}).items():
            if not self._agrees(fingerprint, fingerprints.get(what, "")):
                weights = (
                    " (its initial weights are part of it: a new module draws others)"
                    if what == "model"
                    else ""
                )
                raise OtherObjectsError(
                    f"{self._run} was run with another {what}; pass the same {what}{weights}"
                )

    def check_named(self, given: Iterable[str]) -> None:
        """Refuse objects that replace parts that the run took from its recipe.

        Raises:
            OtherObjectsError: the message names the object.
        """
        stored = self.read().get("objects")
        further = (
            []
            if stored is None
            else [what for what in given if what in vars(Own()) and what not in stored]
        )
        if further:
            raise OtherObjectsError(
                f"{self._run} was run with the {further[0]} of its recipe, and cannot be continued "
                "with another"
            )

    def _without_data(self, provenance: Provenance) -> Provenance:
        """The provenance, with keyed hashes of all that may hold or depend on private data."""
        objects, sources = dict(provenance.get("objects", {})), dict(provenance.get("sources", {}))
        hidden, file = [what for what in objects if what != FIXED], sources.get(TRAINING_FILE)
        if not hidden and file is None and "rows" not in provenance:
            return provenance
        self._key_file.parent.mkdir(mode=0o700, exist_ok=True)
        # the key of a run that was ended before it wrote its provenance
        with suppress(FileExistsError):
            create_durably(self._key_file, secrets.token_bytes(32))
        objects |= {what: self._hash_with_key(objects[what]) for what in hidden}
        if file is not None:
            sources[TRAINING_FILE] = {**file, "sha256": self._hash_with_key(file["sha256"])}
        hashed: Provenance = {**provenance, "objects": objects, "sources": sources}
        if "rows" in provenance:
            hashed["rows"] = self._hash_with_key(provenance["rows"])
        return hashed

    def _agrees(self, stored: str, plain: str) -> bool:
        """Whether a plain hash agrees with a stored one, which may be keyed.

        Raises:
            RunError: the key of the stored hash is missing.
        """
        return stored == (self._hash_with_key(plain) if stored.startswith(_KEYED) else plain)

    def _hash_with_key(self, plain: str) -> str:
        try:
            key = self._key_file.read_bytes()
        except OSError as error:
            raise RunError(
                f"{self._key_file} is gone: the objects and files of the run cannot be compared "
                "without it; restore it from a backup"
            ) from error
        return _KEYED + hmac.new(key, plain.encode(), hashlib.sha256).hexdigest()
