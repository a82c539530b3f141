"""One certified run of a few rounds, and certificates that were tampered with and made to fit."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import simulations
from fedlgm.privacy.signed import envelope_of
from fedlgm_lab.certificate import signing
from fedlgm_lab.certificate.certify import _round_up, certify
from fedlgm_lab.certificate.verifier import chain, checks
from fedlgm_lab.certificate.verifier.case import Case
from fedlgm_lab.certificate.verifier.plans import read_plan
from simulations.exports.export import export

ROUNDS = 7
SMALL = [
    f"federation.rounds={ROUNDS}",
    "federation.clients=60",
    "federation.rate=0.2",
    "training.epochs=1",
    "model.hidden=[6]",
    "privacy.epsilon=1",  # grids of losses are wider where noise is smaller
    "run.seed=none",
    "run.evaluate_every=7",
    "run.keep_releases=true",
]


@dataclass
class Certified:
    """A certified run with the keys of operator and witness."""

    run: Path
    operator: Ed25519PrivateKey
    witness: Ed25519PrivateKey
    model: bytes
    statement: dict[str, Any]

    @property
    def releases(self) -> Path:
        return self.run / "releases"

    def copy(self) -> dict[str, Any]:
        """The statement, to change."""
        return copy.deepcopy(self.statement)

    def sign(self, statement: dict[str, Any]) -> bytes:
        """The certificate that the operator signs."""
        return envelope_of(statement, self.operator)

    def verify(self, certificate: bytes, model: bytes | None = None, **more: Any) -> Case:
        """All checks of level 1, by a caller who names both keys."""
        given: dict[str, Any] = {
            "key": signing.public_hex(self.operator),
            "releases": self.releases,
            "witnesses": [signing.public_hex(self.witness)],
        } | more
        return checks.verify(certificate, self.model if model is None else model, **given)


def answer(out: Path, public: Path, witness: Ed25519PrivateKey) -> threading.Thread:
    """A thread in which an auditor answers a commitment as soon as it is there."""

    def wait() -> None:
        while not public.is_file() or not public.read_text().endswith("\n"):
            time.sleep(0.05)
        line = json.dumps(signing.sign_head(public.read_text(), witness)) + "\n"
        partial = out.with_suffix(".partial")
        partial.write_text(line)
        partial.rename(out)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def anchors_of(run: Path, witness: Ed25519PrivateKey, rounds: Sequence[int]) -> list[Any]:
    """A witness's anchors of these rounds."""
    rows = [
        json.loads(line) for line in (run / "releases" / "chain.jsonl").read_text().split("\n")[:-1]
    ]
    return [signing.sign_head(f"{rows[n]['round']}:{rows[n]['head']}", witness) for n in rounds]


def certified_run(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    beacon: bool = True,
    recipe: str = "digits",
    basis: Sequence[str] = SMALL,
    model: Any = None,
    data: Any = None,
) -> Certified:
    """Train, anchor and certify a small run in a folder."""
    signing.create_key(folder / "operator.pem")
    signing.create_key(folder / "witness.pem")
    operator = signing.load_key(folder / "operator.pem")
    witness = signing.load_key(folder / "witness.pem")
    run, settings = folder / "run", [*basis, *overrides]
    if beacon:
        settings.append(f"run.beacon='{folder / 'beacon.json'}'")
        answer(folder / "beacon.json", run / "releases" / "commitment.txt", witness)
    result = simulations.simulate(recipe, overrides=settings, run_dir=run, model=model, data=data)
    if data is not None:
        export(run, module=result.model())
    last = len((run / "releases" / "chain.jsonl").read_text().splitlines()) - 1
    anchored = anchors_of(run, witness, [5, last])
    path = certify(run, folder / "operator.pem", anchors=anchored)
    return Certified(
        run, operator, witness, (run / "model.safetensors").read_bytes(), statement_in(path)
    )


def statement_in(path: Path) -> dict[str, Any]:
    """The statement in a certificate's file."""
    statement: dict[str, Any] = json.loads(
        base64.b64decode(json.loads(path.read_text())["payload"])
    )
    return statement


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fit(statement: dict[str, Any], epsilon: bool = True) -> dict[str, Any]:
    """The statement with hashes, events, heads, Merkle root and epsilon computed anew, as an
    operator can; it cannot renew a witness's anchors."""
    predicate = statement["predicate"]
    renamed = {old: _sha(text) for old, text in predicate["plans"].items()}
    predicate["plans"] = {_sha(text): text for text in predicate["plans"].values()}
    owner = _sha(predicate["recipe"]["text"])
    predicate["recipe"]["sha256"] = predicate["start"]["owner"] = owner
    predicate["ledger"]["owner"] = owner
    texts, charges = dict(predicate["events"]), predicate["ledger"]["rows"]
    by_clients = predicate["claim"]["trust"] != "central"
    for entry in predicate["rounds"]:
        entry["plan"] = renamed.get(entry["plan"], entry["plan"])
        if entry["plan"] in predicate["plans"] and entry["row"] <= len(charges):
            layers = len(predicate["start"]["layers"])
            plan = read_plan(predicate["plans"][entry["plan"]], entry["plan"], layers)
            text = plan.event(entry["round"])
            texts[_sha(text)] = text
            rows = [row for row in charges if row["round"] == entry["round"]]
            for row in rows if by_clients else [charges[entry["row"] - 1]]:
                row |= {"event": _sha(text), "protects": plan.protects}
    used = {charge["event"] for charge in charges}
    predicate["events"] = {name: text for name, text in texts.items() if name in used}
    used = {entry["plan"] for entry in predicate["rounds"]}
    predicate["plans"] = {n: text for n, text in predicate["plans"].items() if n in used}
    heads = chain.ledger_heads(owner, charges, predicate["events"])
    predicate["ledger"]["head"] = f"{len(charges)}:{heads[-1]}"
    head = chain.first_head(predicate["start"])
    for entry in predicate["rounds"]:
        entry["row"] = min(entry["row"], len(charges))
        facts = (heads[entry["row"]], entry["plan"], entry["released"])
        head = entry["head"] = chain.next_head(head, entry["round"], *facts)
    predicate["keys_merkle_root"] = chain.merkle_root(row["key"] for row in charges)
    if epsilon:
        claim = predicate["claim"]
        spending = Case(statement, "", b"").spending
        spent = spending.epsilon(claim["delta"], claim["composition"])
        claim["epsilon"] = claim["claimed_epsilon"] = _round_up(spent)
    return statement


def edit_plans(statement: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    """Change the plan of every round, with its name."""
    predicate = statement["predicate"]
    for name, text in list(predicate["plans"].items()):
        raw = json.loads(text)
        change(raw)
        new = json.dumps(raw)
        del predicate["plans"][name]
        predicate["plans"][_sha(new)] = new
        for entry in predicate["rounds"]:
            if entry["plan"] == name:
                entry["plan"] = _sha(new)
