"""The command: reads the files, makes the checks, prints the outcome and returns the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedlgm_lab.certificate.verifier import checks
from fedlgm_lab.certificate.verifier.checks import UNREPLAYED
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused, public_key
from fedlgm_lab.certificate.verifier.node import describe_node, is_node_statement, verify_node

HOLDS, REFUSED, NOT_CHECKABLE = 0, 2, 3


def run_checks(
    certificate: Path,
    model: Path | None = None,
    *,
    key: Path | None = None,
    releases: Path | None = None,
    opened: Path | None = None,
    witnesses: Collection[Path] = (),
    accepts: Collection[str] = (),
    codes: Collection[str] = (),
    as_json: bool = False,
) -> int:
    """Check a certificate and print the outcome.

    Args:
        certificate: the certificate's file.
        model: the model's file; None for a node's statement of its ledger, which has no model.
        key: PEM file of the signer's public key.
        releases: folder of the released vectors; default: `releases` beside the certificate.
        opened: private folder of the run, for level 2, which imports PyTorch.
        witnesses: PEM files of the witnesses' public keys.
        accepts: shortcomings that the caller accepts, of `checks.ACCEPTABLE`.
        codes: SHA-256 of code that the caller trusts.
        as_json: print one JSON object.

    Returns:
        0 if all checks hold, 2 if one does not, 3 if one cannot be made.
    """
    try:
        data = _read(certificate)
        if is_node_statement(data):
            return _end_node(data, model, None if key is None else public_key(key), as_json)
        if model is None:
            raise NotCheckable("name the model file that the certificate is for")
        unknown = sorted(set(accepts) - set(checks.ACCEPTABLE))
        if unknown:
            raise NotCheckable(f"--accept takes {', '.join(checks.ACCEPTABLE)}, not {unknown[0]!r}")
        if opened is not None and UNREPLAYED in accepts:
            raise NotCheckable("level 2 needs the released vectors: leave out --accept unreplayed")
        beside = certificate.parent / "releases"
        if releases is None and UNREPLAYED not in accepts and beside.is_dir():
            releases = beside
        case = checks.verify(
            data,
            _read(model),
            key=None if key is None else public_key(key),
            releases=releases,
            witnesses=[public_key(path) for path in witnesses],
            accepts=accepts,
            codes=codes,
        )
        lines = checks.describe(case)
        figures = {"holds": True, "level": 1, "claim": case.claim, "notes": case.notes}
        if opened is not None:
            from fedlgm_lab.certificate.auditor import audit

            lines = [*audit(case, opened).lines(), *lines[1:]]
            figures["level"] = 2
    except Refused as error:
        return _end(str(error), REFUSED, as_json)
    except NotCheckable as error:
        return _end(str(error), NOT_CHECKABLE, as_json)
    print(json.dumps(figures) if as_json else "\n".join(lines))
    return HOLDS


def _end_node(data: bytes, model: Path | None, key: str | None, as_json: bool) -> int:
    if model is not None:
        raise NotCheckable(
            "a node's statement of its ledger has no model: leave the model file out"
        )
    told = verify_node(data, key)
    print(json.dumps({"holds": True} | told) if as_json else "\n".join(describe_node(told)))
    return HOLDS


def _end(problem: str, status: int, as_json: bool) -> int:
    problem = "".join(c if c.isprintable() else "?" for c in problem)  # a seller's words
    word = "does not hold" if status == REFUSED else "cannot be checked"
    if as_json:
        outcome: dict[str, Any] = {"holds": False, "status": status, "problem": problem}
        print(json.dumps(outcome))
    else:
        print(f"{word}: {problem}", file=sys.stderr)
    return status


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NotCheckable(f"{path} cannot be read: {error.strerror}") from None
