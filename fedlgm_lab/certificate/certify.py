"""Issues the certificate of a finished run whose releases are stored."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import path_of, write_whole
from fedlgm.privacy.ledger import Ledger
from fedlgm.privacy.signed import STATEMENT_TYPE, envelope_of
from fedlgm_lab.certificate.releases import ReleaseLog
from fedlgm_lab.certificate.signing import load_key, read_anchors
from fedlgm_lab.certificate.verifier.case import Case, hash_of, population_of, words_of
from fedlgm_lab.certificate.verifier.chain import merkle_root
from fedlgm_lab.certificate.verifier.checks import check_model
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused
from fedlgm_lab.certificate.verifier.plans import read_plan
from fedlgm_lab.certificate.verifier.replay import ARITHMETIC
from fedlgm_lab.certificate.verifier.statement import NOT_COVERED, PREDICATE_TYPE
from simulations.config.recipe import Recipe
from simulations.exports.export import export
from simulations.runs.folder import RunFolder

_DIGITS = 6
_FIELDS = ("round", "client", "key", "event", "claim", "protects", "guarantee")


def certify(
    run: Path | str,
    key: Path | str,
    out: Path | str | None = None,
    anchors: Sequence[dict[str, Any]] = (),
) -> Path:
    """Write the certificate of a run, and its model file if there is none yet.

    Args:
        run: run folder.
        key: PEM file of the operator's private key (Ed25519).
        out: certificate to write; default: `certificate.json` in the run folder.
        anchors: heads of the run's chain of releases, signed by witnesses. The certificate also
            contains the heads that the run's nodes have signed (`releases/anchors.jsonl`).

    Returns:
        The path of the certificate. The model's file is `model.safetensors` in the run folder.

    Raises:
        ConfigError: the run did not store its releases, or the key is not an Ed25519 key.
        RunError: the run is not finished or cannot have a certificate, `out` exists and is not a
            certificate, or `out` cannot be written; the message gives the reason.
        LedgerError: the ledger is damaged, or does not match the run.
    """
    folder, signer = RunFolder.open(run), load_key(Path(key))
    recipe = folder.recipe()
    if not recipe.run.keep_releases:
        raise ConfigError(
            f"{folder.path} kept no releases, without which nobody can check a certificate: train "
            "again with run.keep_releases = true"
        )
    result = folder.verified_result()
    model = folder.path / "model.safetensors"
    if not model.is_file():
        export(folder.path)
    if not model.is_file():
        raise RunError(
            f"{folder.path} exports no single safetensors file, so it has no certificate"
        )
    try:
        statement = _statement(folder, recipe, dict(result), model, [*_of_nodes(folder), *anchors])
    except (Refused, NotCheckable) as error:
        raise RunError(f"{folder.path} has no certificate: {error}") from error
    target = folder.path / "certificate.json" if out is None else path_of("out", out)
    if target.exists() and not target.read_bytes().startswith(b'{"payload":'):
        raise RunError(f"{target} exists and is not a certificate: choose another file")
    content = envelope_of(statement, signer)
    write_whole(target, lambda path: path.write_bytes(content))
    return target


def _of_nodes(folder: RunFolder) -> list[dict[str, Any]]:
    """Read the anchors that the nodes of a deployment have signed."""
    file = folder.path / "releases" / "anchors.jsonl"
    return read_anchors(file) if file.is_file() else []


def _statement(
    folder: RunFolder,
    recipe: Recipe,
    result: dict[str, Any],
    model: Path,
    anchors: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    log = ReleaseLog(folder.path).rows
    if not log:
        raise RunError(f"{folder.path} has no kept releases: restore releases/ from a backup")
    if not math.isfinite(result["epsilon"]):
        raise Refused(3, "its releases are not private, so there is no epsilon to certify")
    start, entries = log[0]["start"], log[1:]
    _check_entries(entries, recipe.federation.rounds)
    texts = {entry["plan"]: entry["text"] for entry in entries if "text" in entry}
    plans = {name: read_plan(text, name, len(start["layers"])) for name, text in texts.items()}
    with Ledger(folder.ledger_file) as ledger:
        charged, head, owner = ledger.charged_texts(), str(ledger.head()), ledger.owner()
    rows = [dict(zip(_FIELDS, row, strict=True)) for row in charged]
    text = folder.recipe_file.read_text(encoding="utf-8")
    claimed, data = float(result["claimed_epsilon"]), model.read_bytes()
    predicate = {
        "claim": {
            **words_of(tomllib.loads(text), plans.values()),
            "epsilon": _round_up(float(result["epsilon"])),
            "claimed_epsilon": _round_up(claimed) if math.isfinite(claimed) else None,
        },
        "population": population_of(plans[entries[0]["plan"]]),
        "recipe": {"text": text, "sha256": folder.owner()},
        "start": start,
        "plans": texts,
        "events": {hash_of(row["event"]): row["event"] for row in rows},
        "ledger": {
            "owner": owner,
            "head": head,
            "rows": [row | {"event": hash_of(row["event"])} for row in rows],
        },
        "rounds": [
            {name: entry[name] for name in ("round", "row", "plan", "released", "head")}
            for entry in entries
        ],
        "keys_merkle_root": merkle_root(row["key"] for row in rows),
        "anchors": [dict(anchor) for anchor in anchors],
        "not_covered": NOT_COVERED[recipe.privacy.trust],
    }
    statement = {
        "_type": STATEMENT_TYPE,
        "predicateType": PREDICATE_TYPE,
        "subject": [
            {"name": model.name, "digest": {"sha256": hash_of(data)}},
            {"name": "flat", "digest": {"sha256": str(result["model_sha256"])}},
        ],
        "predicate": predicate,
    }
    predicate["arithmetic"] = _arithmetic(Case(statement, "", data, folder.path / "releases"))
    return statement


def _check_entries(entries: list[dict[str, Any]], planned: int) -> None:
    rounds = [entry["round"] for entry in entries]
    twice = next((number for number in rounds if rounds.count(number) > 1), None)
    if twice is not None:
        raise Refused(
            4,
            f"round {twice} was released twice with different noise, after an interruption; the "
            "format has one release of a round",
        )
    if rounds != list(range(1, planned + 1)):
        missing = next(n for n in range(1, planned + 1) if n not in rounds[:n])
        raise Refused(4, f"round {missing} released nothing or was not kept in its turn")


def _round_up(value: float) -> float:
    """Round a value up to six digits, so that machines whose rounding differs confirm it."""
    if value == 0:
        return 0.0
    scale = 10.0 ** (_DIGITS - 1 - math.floor(math.log10(value)))
    rounded = float(f"{math.ceil(value * scale) / scale:.12g}")
    return rounded if rounded >= value else float(f"{(math.ceil(value * scale) + 1) / scale:.12g}")


def _arithmetic(case: Case) -> str:
    """Find the rounding with which the releases reproduce the run's model."""
    for arithmetic in ARITHMETIC:
        case.predicate["arithmetic"] = arithmetic
        try:
            check_model(case)
        except Refused as error:
            problem = error
        else:
            return arithmetic
    raise problem
