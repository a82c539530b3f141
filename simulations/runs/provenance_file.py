"""A run's provenance, which a continued run must share, in a public file.

Hashes that may be those of private data lie in a private file beside it: whoever knows all examples but one would find
the last one by trying candidates for it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from fedlgm.errors import LedgerError, Notice, RunError
from fedlgm.files import PRIVATE
from simulations.config.own import Own
from simulations.runs import strict_json
from simulations.runs.provenance import FILES
from simulations.runs.rows import Provenance
from simulations.runs.shapes import misfit

_OF_PRIVATE = ("training file",)
"""Sources whose hash is that of private data."""


class ProvenanceFile:
    """Both files; `simulations.runs.provenance` describes their content.

    Args:
        path: the public file, in the run's folder.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._run = path, path.parent
        self._hashes = self._run / "private" / "objects.json"

    def read(self) -> Provenance:
        """The run's provenance; empty before it starts. A copy without `private/` lacks the hashes in it.

        Raises:
            RunError: a file is damaged.
        """
        if not self._path.is_file():
            return {}
        found, hashes = _read(self._path), _read(self._hashes)
        sources = {**hashes.get("sources", {}), **found.get("sources", {})}
        found.update(hashes)
        return {**found, "sources": sources} if sources else found

    def layers(self) -> dict[str, int]:
        """Sizes of the run's layers by name.

        Raises:
            LedgerError: the run has stored no sizes.
        """
        found = self.read().get("layers")
        if not found:
            raise LedgerError(
                f"{self._path} does not name the layers of the run's mechanism, so what was guaranteed is not known: "
                "restore the file from a backup"
            )
        return dict(found)

    def settle(self, provenance: Provenance) -> None:
        """Write the run's provenance, or check that the run continues with the same clients and objects.

        Raises:
            RunError: the run had other objects, or other clients (simulated ones or real nodes).
        """
        if not self._path.is_file():
            self._write(provenance)
            return
        stored = self.read()
        self.check_objects(provenance.get("objects", {}))
        for what, source in dict(stored.get("sources", {})).items():
            changed = dict(provenance.get("sources", {})).get(what)
            if what in FILES and (changed is None or changed["sha256"] != source["sha256"]):
                raise RunError(
                    f"{source['file']} is not the {what} that {self._run} began with (SHA-256 {source['sha256']}): "
                    "restore it"
                )
            if changed != source:
                warnings.warn(Notice(f"the source of the {what} has changed since the run started"), stacklevel=2)
        if stored.get("labels") != provenance.get("labels"):
            was, now = (", ".join(one.get("labels") or ["without names"]) for one in (stored, provenance))
            raise RunError(f"{self._run} was run with the classes {was}: it cannot be continued with {now}")
        if stored.get("clients") != provenance.get("clients"):
            raise RunError(
                f"{self._run} was run with {stored.get('clients')}: it cannot be continued with "
                f"{provenance.get('clients')}, whose data is not the same"
            )

    def _write(self, provenance: Provenance) -> None:
        public, hashes = provenance.copy(), Provenance()
        if public.get("objects"):
            hashes["objects"] = public.pop("objects")
        if "sources" in public:
            sources = public["sources"]
            public["sources"] = {what: source for what, source in sources.items() if what not in _OF_PRIVATE}
            if len(public["sources"]) < len(sources):
                hashes["sources"] = {what: sources[what] for what in _OF_PRIVATE if what in sources}
        if hashes:
            self._hashes.parent.mkdir(mode=0o700, exist_ok=True)
            strict_json.write(self._hashes, hashes, PRIVATE)
        strict_json.write(self._path, public)

    def check_objects(self, fingerprints: Mapping[str, str]) -> None:
        """Refuse Python objects other than those that the run was given.

        Raises:
            RunError: the message names the object that differs or is missing.
        """
        self.check_named(fingerprints)
        for what, fingerprint in dict(self.read().get("objects", {})).items():
            if fingerprints.get(what) != fingerprint:
                raise RunError(f"{self._run} was run with another {what} than this one, which cannot stand in for it")

    def check_named(self, given: Iterable[str]) -> None:
        """Refuse objects that replace parts that the run took from its recipe.

        Raises:
            RunError: the message names the object.
        """
        stored = self.read().get("objects")
        further = [] if stored is None else [what for what in given if what in vars(Own()) and what not in stored]
        if further:
            raise RunError(f"{self._run} was run with the {further[0]} of its recipe: it takes no other one")


def _read(file: Path) -> Provenance:
    """Content of a file; empty without it.

    Raises:
        RunError: the file is damaged.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file} is damaged: restore it from a backup ({error})") from error
    wrong = misfit(found, Provenance)
    if wrong:
        raise RunError(f"{file} is damaged: restore it from a backup ({wrong})")
    return cast(Provenance, found)
