"""The command `fedlgm verify`, which reads the files, makes the checks and prints the outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path

from fedlgm.files import explain_failure
from fedlgm_lab.certificate.verifier.case import ACCEPTABLE, UNREPLAYED, Case, worst_rates
from fedlgm_lab.certificate.verifier.checks import verify
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
        accepts: see `Case`.
        codes: see `Case`.
        as_json: whether to print the outcome as a JSON object.

    Returns:
        The exit status: 0 if all checks hold, 2 if a check does not hold, 3 if a check cannot be
        made.
    """
    try:
        data = _read(certificate)
        if is_node_statement(data):
            return _end_node(data, model, None if key is None else public_key(key), as_json)
        if model is None:
            raise NotCheckable("name the model file that the certificate is for")
        unknown = sorted(set(accepts) - set(ACCEPTABLE))
        if unknown:
            raise NotCheckable(f"--accept takes {', '.join(ACCEPTABLE)}, not {unknown[0]!r}")
        if opened is not None and UNREPLAYED in accepts:
            raise NotCheckable("level 2 needs the released vectors: leave out --accept unreplayed")
        beside = certificate.parent / "releases"
        if releases is None and UNREPLAYED not in accepts and beside.is_dir():
            releases = beside
        case = verify(
            data,
            _read(model),
            key=None if key is None else public_key(key),
            releases=releases,
            witnesses=[public_key(path) for path in witnesses],
            accepts=accepts,
            codes=codes,
        )
        lines = describe(case)
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
        raise NotCheckable("the statement of a node has no model: leave the model file out")
    told = verify_node(data, key)
    print(json.dumps({"holds": True} | told) if as_json else "\n".join(describe_node(told)))
    return HOLDS


def _end(problem: str, status: int, as_json: bool) -> int:
    # the seller's certificate may have supplied parts of the text
    problem = "".join(c if c.isprintable() else "?" for c in problem)
    word = "does not hold" if status == REFUSED else "cannot be checked"
    if as_json:
        print(json.dumps({"holds": False, "status": status, "problem": problem}))
    else:
        print(f"{word}: {problem}", file=sys.stderr)
    return status


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NotCheckable(explain_failure(f"{path} cannot be read", error)) from None


def describe(case: Case) -> list[str]:
    """Describe the outcome in sentences, with what level 1 does not prove first."""
    claim, population = case.claim, case.predicate["population"]
    waived = " as far as it was checked" if case.notes else ""
    drawn = "client" if case.plans[0].steps else claim["unit"]
    units = "people" if case.plans[0].overlap > 1 else f"{claim['unit']}s"
    lines = [
        (
            f"Level 1 holds{waived}. It does not prove that the noise was added, nor that this is the "
            "only run."
        ),
        (
            f"The claim: epsilon {claim['epsilon']:.6g} at delta {claim['delta']:g} for one "
            f"{claim['unit']} ({claim['relation']}, {claim['trust']} trust), {claim['status']}, over "
            f"{len(case.rounds)} rounds of {population['sampling']} sampling at rate "
            f"{population['rate']:g} from {population['size']} {drawn}s."
        ),
        f"With all that was released, {worst_rates(case.spending).sentence(units)}.",
        f"Protected from {claim['protected_from']}.",
        f"The model's SHA-256 is {case.statement['subject'][0]['digest']['sha256']}.",
    ]
    if claim["seed"] is not None:
        lines.insert(0, "SIMULATION: the seed is public, so this model protects nobody.")
    return [
        *lines,
        *(f"Not checked: {note}" for note in case.notes),
        *(f"Not covered: {line}" for line in case.predicate["not_covered"]),
    ]
