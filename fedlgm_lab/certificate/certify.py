"""Issues the certificate of a finished run that kept its releases."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import path_of, write_whole
from fedlgm.privacy.ledger import SERVER, Ledger
from fedlgm.privacy.signed import STATEMENT_TYPE, envelope_of
from fedlgm_lab.certificate.releases import ReleaseLog
from fedlgm_lab.certificate.signing import load_key, read_anchors
from fedlgm_lab.certificate.verifier import replay
from fedlgm_lab.certificate.verifier.checks import merkle_root
from fedlgm_lab.certificate.verifier.envelope import (
    PREDICATE_TYPE,
    NotCheckable,
    Refused,
)
from fedlgm_lab.certificate.verifier.plans import Plan, read_plan
from fedlgm_lab.certificate.verifier.statement import NOT_COVERED, PROTECTED_FROM
from simulations.config.kept_releases import server_step_of
from simulations.config.recipe import Recipe
from simulations.exports.export import export
from simulations.runs.folder import RunFolder

_DIGITS = 6


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
        out: file to write; default: `certificate.json` in the run folder.
        anchors: signed heads of the run's releases, from witnesses, in addition to those of the
            run's nodes (`releases/anchors.jsonl`).

    Returns:
        The certificate's file. The model's file is `model.safetensors` in the run folder.

    Raises:
        ConfigError: the recipe did not keep releases, or the key is not one.
        RunError: the run is not finished, or has no certificate; the message gives the reason.
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
    """Anchors that the nodes of a deployment have signed."""
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
    ledger = _ledger(folder)
    events = {_sha(event): event for event in ledger.pop("events")}
    data, flat = model.read_bytes(), str(result["model_sha256"])
    _check_model(data, start, flat)
    return {
        "_type": STATEMENT_TYPE,
        "predicateType": PREDICATE_TYPE,
        "subject": [
            {"name": model.name, "digest": {"sha256": hashlib.sha256(data).hexdigest()}},
            {"name": "flat", "digest": {"sha256": flat}},
        ],
        "predicate": {
            "claim": _claim(recipe, result, list(plans.values())),
            "population": _population(plans[entries[0]["plan"]]),
            "recipe": {
                "text": folder.recipe_file.read_text(encoding="utf-8"),
                "sha256": folder.owner(),
            },
            "start": start,
            "plans": texts,
            "events": events,
            "ledger": ledger,
            "rounds": [
                {name: entry[name] for name in ("round", "row", "plan", "released", "head")}
                for entry in entries
            ],
            "arithmetic": _arithmetic(folder, start, entries, plans, flat),
            "keys_merkle_root": merkle_root(
                [ledger["rows"][entry["row"] - 1]["key"] for entry in entries]
            ),
            "anchors": [dict(anchor) for anchor in anchors],
            "not_covered": NOT_COVERED,
        },
    }


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


def _claim(recipe: Recipe, result: dict[str, Any], plans: list[Plan]) -> dict[str, Any]:
    proven = all(plan.status == "proven" for plan in plans)
    seed = recipe.run.seed
    claimed = float(result["claimed_epsilon"])
    return {
        "unit": recipe.unit,
        "relation": plans[0].facts["relation"],
        "trust": recipe.privacy.trust,
        "protected_from": PROTECTED_FROM,
        "epsilon": _round_up(float(result["epsilon"])),
        "delta": recipe.privacy.delta,
        "status": "simulation" if seed is not None else "proven" if proven else "conditional",
        "mechanism": recipe.mechanism.name,
        "variant": recipe.mechanism.variant,
        "composition": recipe.privacy.accountant,
        "claimed_epsilon": _round_up(claimed) if math.isfinite(claimed) else None,
        "audited_lower_bound": None,
        "seed": None if seed is None else str(seed),
    }


def _round_up(value: float) -> float:
    """A number with six digits that is not below the value, so that other machines agree."""
    if value == 0:
        return 0.0
    scale = 10.0 ** (_DIGITS - 1 - math.floor(math.log10(value)))
    rounded = float(f"{math.ceil(value * scale) / scale:.12g}")
    return rounded if rounded >= value else float(f"{(math.ceil(value * scale) + 1) / scale:.12g}")


def _population(plan: Plan) -> dict[str, Any]:
    return {
        "size": plan.population,
        "rate": plan.rate,
        "sampling": plan.facts["sampling"]["scheme"],
        "denominator": plan.rate * plan.population,
    }


def _ledger(folder: RunFolder) -> dict[str, Any]:
    with Ledger(folder.ledger_file) as ledger:
        charged, head, owner = ledger.charged_texts(), str(ledger.head()), ledger.owner()
    rows, events = [], []
    for number, client, name, event, claim, protects, guarantee in charged:
        if client != SERVER:
            raise NotCheckable("clients released themselves, under local or distributed trust")
        fields = {"claim": claim, "protects": protects, "guarantee": guarantee}
        rows.append({"round": number, "key": name, "event": _sha(event), **fields})
        events.append(event)
    return {"owner": owner, "head": head, "rows": rows, "events": events}


def _check_model(data: bytes, start: dict[str, Any], flat: str) -> None:
    vector = replay.flat_model(data, start["layers"], start["fixed"])
    if hashlib.sha256(vector.astype("<f4").tobytes()).hexdigest() != flat:
        raise Refused(12, "model.safetensors is not the run's model: delete it and certify again")


def _arithmetic(
    folder: RunFolder,
    start: dict[str, Any],
    entries: list[dict[str, Any]],
    plans: dict[str, Plan],
    flat: str,
) -> str:
    """The rounding with which the releases give the run's model."""
    sizes = np.array([size for _, size, _ in start["layers"]], dtype=np.int64)
    rounds = [(entry["round"], entry["released"]) for entry in entries]
    order = [plans[entry["plan"]] for entry in entries]
    for arithmetic in replay.ARITHMETIC:
        vectors = replay.read_vectors(folder.path / "releases", start["initial"], rounds)
        model = replay.replay(vectors, order, sizes, server_step_of(folder.recipe()), arithmetic)
        if hashlib.sha256(model.astype("<f4").tobytes()).hexdigest() == flat:
            return arithmetic
    raise Refused(13, "the run's model does not follow from its releases")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
