"""Checks 3 to 14 of a certificate, in their order."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tomllib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785

from fedlgm.errors import FedlgmError
from fedlgm.privacy import spending
from fedlgm.privacy.chain import digest
from fedlgm.privacy.signed import ANCHOR_EVERY, anchor_text
from fedlgm_lab.certificate.verifier import evidence, replay
from fedlgm_lab.certificate.verifier.costs import Charges, epsilon_of, rates_of, read_charges
from fedlgm_lab.certificate.verifier.envelope import (
    NotCheckable,
    Refused,
    open_envelope,
)
from fedlgm_lab.certificate.verifier.plans import Plan, read_plan
from fedlgm_lab.certificate.verifier.statement import NOT_COVERED, PROTECTED_FROM, read_statement

UNANCHORED, UNREPLAYED, SIMULATION = "unanchored", "unreplayed", "simulation"
ACCEPTABLE = (UNANCHORED, UNREPLAYED, SIMULATION)
"""What a caller may accept: no anchors of a witness, a model that is not recomputed, a public
seed."""
_LARGEST = 1.001
"""Largest ratio of the stated epsilon to the computed one."""


@dataclass
class Case:
    """A statement, and what the caller holds to check it with.

    Attributes:
        statement: the statement.
        signer: public key that signed it, in hexadecimal.
        model: content of the model file.
        releases: folder of the released vectors; None if the caller has only their hashes.
        witnesses: public keys of the witnesses whom the caller trusts.
        accepts: shortcomings that the caller accepts, of `ACCEPTABLE`.
        codes: SHA-256 of code that the caller trusts beside the code installed here.
        notes: sentences on what was not checked.
    """

    statement: dict[str, Any]
    signer: str
    model: bytes
    releases: Path | None = None
    witnesses: Collection[str] = ()
    accepts: Collection[str] = ()
    codes: Collection[str] = ()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.predicate: dict[str, Any] = self.statement["predicate"]
        self.claim: dict[str, Any] = self.predicate["claim"]
        self.start: dict[str, Any] = self.predicate["start"]
        self.rounds: list[dict[str, Any]] = self.predicate["rounds"]
        self.charges: list[dict[str, Any]] = self.predicate["ledger"]["rows"]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Coordinates of each layer, [K]."""
        return np.array([size for _, size, _ in self.start["layers"]], dtype=np.int64)

    @cached_property
    def plans(self) -> list[Plan]:
        """Plan of each round, [T]."""
        texts, layers = self.predicate["plans"], len(self.sizes)
        if set(texts) != {entry["plan"] for entry in self.rounds}:
            raise Refused(5, "the plans of the certificate are not those of its rounds")
        plans = {name: read_plan(text, name, layers) for name, text in texts.items()}
        return [plans[entry["plan"]] for entry in self.rounds]

    @cached_property
    def composed(self) -> Charges:
        """Events of the charges, and their numbers."""
        counts = Counter(charge["event"] for charge in self.charges)
        return read_charges(counts.items(), self.predicate["events"])

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe's values."""
        text = self.predicate["recipe"]["text"]
        if hashlib.sha256(text.encode()).hexdigest() != self.predicate["recipe"]["sha256"]:
            raise Refused(3, "the recipe has another text than its hash says")
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise Refused(3, f"the recipe is not TOML ({error})") from None

    @cached_property
    def step(self) -> tuple[str, float, float]:
        """Name, learning rate and momentum of the server's step, by the recipe."""
        federation, training = self.recipe["federation"], self.recipe["training"]
        if self.recipe["privacy"].get("unit") == "example":
            name = training["optimizer"]
            name = "momentum" if name == "sgd" and training["momentum"] else name
            step = name, training["lr"], training["momentum"]
        else:
            step = (
                federation["server_optimizer"],
                federation["server_lr"],
                federation["server_momentum"],
            )
        if step[0] not in replay.STEPS or "server_schedule" in federation:
            raise NotCheckable(
                f"the server's step is {step[0]!r}; only {', '.join(replay.STEPS)} without a "
                "schedule can be repeated bit for bit"
            )
        return step


def check_claim(case: Case) -> None:
    """Check 3: the words and figures of the claim are those of recipe and plans."""
    claim, recipe, privacy = case.claim, case.recipe, case.recipe["privacy"]
    if not case.rounds:
        raise Refused(4, "the certificate has no round")
    first, seed = case.plans[0], recipe["run"].get("seed")
    status = "conditional" if any(plan.status != "proven" for plan in case.plans) else "proven"
    mechanism = recipe["mechanism"]
    right = {
        "unit": privacy.get("unit", "client"),
        "relation": first.facts["relation"],
        "trust": privacy["trust"],
        "protected_from": PROTECTED_FROM,
        "delta": privacy["delta"],
        "status": status if seed is None else SIMULATION,
        "mechanism": mechanism["name"],
        "variant": mechanism["variant"],
        "composition": privacy["accountant"],
        "seed": None if seed is None else str(seed),
    }
    for name, value in right.items():
        if claim[name] != value:
            raise Refused(3, f"the claim says {name} = {claim[name]!r}, but the run's is {value!r}")
    if claim["unit"] != first.guarantee["unit"] or claim["trust"] != "central":
        raise Refused(3, f"the plans protect one {first.guarantee['unit']} under central trust")
    if (case.start["noise"] is None) != (seed is not None):
        raise Refused(3, "a run without a public seed has a commitment to its noise, others none")
    if not 0 < claim["delta"] <= 1 / (10 * first.population):
        raise Refused(
            3,
            f"delta = {claim['delta']:g} is above 1 / (10 x {first.population} {claim['unit']}s): "
            f"it would have to be at most {1 / (10 * first.population):.3g}",
        )
    if case.predicate["not_covered"] != NOT_COVERED:
        raise Refused(3, "the list of what is not covered was changed")
    if seed is not None and SIMULATION not in case.accepts:
        raise Refused(
            3, "the run was seeded: anyone can draw its noise again, so it protects nobody"
        )


def check_rounds(case: Case) -> None:
    """Check 4: every round of the recipe, once and in order."""
    planned = case.recipe["federation"]["rounds"]
    for number, entry in enumerate(case.rounds, start=1):
        if entry["round"] != number:
            raise Refused(4, f"entry {number} is round {entry['round']}; it must be {number}")
    if len(case.rounds) != planned:
        raise Refused(4, f"the certificate has {len(case.rounds)} rounds, but the recipe {planned}")


def check_plans(case: Case) -> None:
    """Check 5: plans are for these layers and this population; a layer that no round releases
    has its initial values.
    """
    first, population = case.plans[0], case.predicate["population"]
    sampling = first.facts["sampling"]
    right = {
        "size": first.population,
        "rate": first.rate,
        "sampling": sampling["scheme"],
        "denominator": first.rate * first.population,
    }
    if population != right:
        raise Refused(5, f"the population must be {right}, by the plans, not {population}")
    federation, users = case.recipe["federation"], case.recipe["federation"].get("users")
    stated = {
        "client": federation["clients"],
        "user": len(set(users)) if isinstance(users, list) else users,
        "example": first.population,  # of the data, which no recipe counts
    }[case.claim["unit"]]
    if first.population != stated:
        raise Refused(
            5, f"the plans are for another number of {case.claim['unit']}s than the recipe"
        )
    if case.claim["unit"] == "example" and not math.isclose(
        population["denominator"], case.recipe["training"]["batch_size"], rel_tol=1e-9
    ):
        raise Refused(5, "the plans divide by another batch than the recipe's")
    for entry, plan in zip(case.rounds, case.plans, strict=True):
        differs = [name for name in first.facts if plan.facts.get(name) != first.facts[name]]
        if differs or plan.protects != first.protects or plan.facts["rounds"] != len(case.rounds):
            raise Refused(5, f"the plan of round {entry['round']} is not for this run")
        for layer, size, slots in case.start["layers"]:
            if size != sum(part for _, part in slots):
                raise Refused(5, f"the tensors of layer {layer} do not have {size} numbers")
    never = ~np.any([plan.released for plan in case.plans], axis=0)
    if never.any() and case.releases is None:  # else check 13 compares it with its initial values
        layer = case.start["layers"][int(np.argmax(never))][0]
        raise Refused(5, f"no round releases layer {layer!r}, which the model file holds")


def check_events(case: Case) -> None:
    """Check 6: every round is charged with the event that follows from its plan."""
    texts = case.predicate["events"]
    if set(texts) != {charge["event"] for charge in case.charges}:
        raise Refused(6, "the events of the certificate are not those of its ledger")
    for name, text in texts.items():
        if hashlib.sha256(text.encode()).hexdigest() != name:
            raise Refused(6, f"event {name[:8]} has another text than its hash says")
    computed = {id(plan): plan.event() for plan in case.plans}
    for entry, plan in zip(case.rounds, case.plans, strict=True):
        number, row = entry["round"], entry["row"]
        if not 1 <= row <= len(case.charges) or case.charges[row - 1]["round"] != number:
            raise Refused(6, f"the ledger has no charge for round {number} in row {row}")
        charge = case.charges[row - 1]
        if texts[charge["event"]] != computed[id(plan)]:
            raise Refused(
                6,
                f"round {number} is charged with {texts[charge['event']]}, but its plan costs "
                f"{computed[id(plan)]}",
            )
        if charge["protects"] != plan.protects:
            raise Refused(6, f"the charge of round {number} protects {charge['protects']!r}")
    if len({entry["row"] for entry in case.rounds}) != len(case.rounds):
        raise Refused(6, "two rounds have one charge")


def check_keys(case: Case) -> None:
    """Check 7: no two charges have the same noise."""
    counts = Counter(charge["key"] for charge in case.charges)
    for charge in case.charges:
        if counts[charge["key"]] > 1:
            raise Refused(7, f"round {charge['round']} has the noise of another release")


def ledger_heads(case: Case) -> list[str]:
    """The ledger's head before the first row and after each row."""
    ledger, texts = case.predicate["ledger"], case.predicate["events"]
    heads = [digest("", ledger["owner"])]
    for charge in case.charges:
        fields = [str(charge["round"]), "-1", charge["key"], texts[charge["event"]]]
        fields += [charge["claim"], charge["protects"], charge["guarantee"]]
        while not fields[-1]:
            fields.pop()
        heads.append(digest(heads[-1], *fields))
    return heads


def check_chain(case: Case) -> None:
    """Check 8: the heads of the ledger and of the releases follow from what they cover."""
    ledger, owner = case.predicate["ledger"], case.predicate["recipe"]["sha256"]
    if not ledger["owner"] == case.start["owner"] == owner:
        raise Refused(8, "ledger and releases belong to another recipe")
    heads = ledger_heads(case)
    if ledger["head"] != f"{len(case.charges)}:{heads[-1]}":
        raise Refused(8, f"the ledger's head must be {len(case.charges)}:{heads[-1]}")
    head = evidence.first_head(rfc8785.dumps(case.start))
    for entry in case.rounds:
        number = entry["round"]
        head = evidence.next_head(
            head, number, heads[entry["row"]], entry["plan"], entry["released"]
        )
        if entry["head"] != head:
            raise Refused(8, f"the head of round {number} must be {head}")


def merkle_root(leaves: list[str]) -> str:
    """Root of the hash tree over texts; an odd last node is moved up unchanged.

    Example:
        >>> merkle_root(["a"]) == digest("leaf", "a"), merkle_root(["a", "b"]) == merkle_root(["b", "a"])
        (True, False)
    """
    level = [digest("leaf", leaf) for leaf in leaves] or [digest("leaf")]
    while len(level) > 1:
        pairs = [level[place : place + 2] for place in range(0, len(level), 2)]
        level = [digest("node", *pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def check_merkle_root(case: Case) -> None:
    """Check 9: the root of the hash tree over the rounds' noise keys."""
    root = merkle_root([case.charges[entry["row"] - 1]["key"] for entry in case.rounds])
    if case.predicate["keys_merkle_root"] != root:
        raise Refused(9, f"the root over the noise keys must be {root}")


def check_anchors(case: Case) -> None:
    """Check 10: named witnesses saw this chain at least every five rounds, the last included."""
    heads = {entry["round"]: entry["head"] for entry in case.rounds}
    seen = {0}
    for anchor in case.predicate["anchors"]:
        number, text = anchor["round"], anchor_text(anchor["round"], anchor["head"])
        if not evidence.is_signed(anchor["by"], anchor["signature"], text):
            raise Refused(10, f"the anchor of round {number} is not signed by {anchor['by']}")
        if heads.get(number) != anchor["head"]:
            raise Refused(10, f"a witness saw another chain in round {number}")
        if anchor["by"] in case.witnesses and anchor["by"] != case.signer:
            seen.add(number)
    if UNANCHORED in case.accepts:
        case.notes.append(
            "10: anchors of a named witness were not required: the operator may have rewritten "
            "the whole run before it signed"
        )
        return
    if not case.witnesses:
        raise NotCheckable(
            "check 10: nobody but the operator vouches for the chain: name the witness whose "
            "anchors you trust (--witness), or accept that rounds may have been rewritten "
            "(--accept unanchored)"
        )
    order = sorted(seen)
    if order[-1] != len(case.rounds):
        raise Refused(10, f"no named witness saw the last round, {len(case.rounds)}")
    for before, after in itertools.pairwise(order):
        if after - before > ANCHOR_EVERY:
            raise Refused(10, f"no named witness saw a round from {before + 1} to {after - 1}")


def check_epsilon(case: Case) -> None:
    """Check 11: the stated epsilon is that of the charges."""
    claim, texts = case.claim, case.predicate["events"]
    right = epsilon_of(case.composed, claim["delta"], claim["composition"])
    try:
        rows = Counter((charge["event"], charge["claim"]) for charge in case.charges)
        claimed = spending.claimed_epsilon(
            [(-1, texts[event], said, count) for (event, said), count in rows.items()],
            claim["delta"],
            claim["composition"],
        )
    except (FedlgmError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(11, f"the charges cannot be composed ({error})") from None
    for name, computed in (("epsilon", right), ("claimed_epsilon", claimed)):
        stated = math.inf if claim[name] is None else claim[name]
        if not (computed <= stated <= computed * _LARGEST or stated == computed):
            raise Refused(11, f"{name} is stated as {stated:.6g}, but it is {computed:.6g}")


def check_model(case: Case) -> np.ndarray:
    """Check 12: the model file is the subject; returns its parameters, [D]."""
    subject, given = case.statement["subject"], hashlib.sha256(case.model).hexdigest()
    names = [entry["name"] for entry in subject]
    if len(subject) != 2 or names[1] != "flat":
        raise Refused(12, "the subject must be a model file and its flat parameters")
    if subject[0]["digest"]["sha256"] != given:
        raise Refused(
            12,
            f"the model file has the SHA-256 {given}, but the certificate is for "
            f"{subject[0]['digest']['sha256']}",
        )
    if case.start["fixed"]:
        case.notes.append(
            f"12: {len(case.start['fixed'])} tensors of the model were not trained in this run: "
            "ask what they were made from"
        )
    flat = replay.flat_model(case.model, case.start["layers"], case.start["fixed"])
    if hashlib.sha256(flat.astype("<f4").tobytes()).hexdigest() != subject[1]["digest"]["sha256"]:
        raise Refused(12, "the parameters of the model file have another hash")
    return flat


def check_replay(case: Case, flat: np.ndarray) -> None:
    """Check 13: the model follows from initial weights, released vectors and the server's step."""
    arithmetic = case.predicate["arithmetic"]
    if arithmetic not in replay.ARITHMETIC:
        raise Refused(13, f"the arithmetic must be one of {', '.join(replay.ARITHMETIC)}")
    step = case.step
    if case.releases is None:
        if UNREPLAYED not in case.accepts:
            raise NotCheckable(
                "check 13: nothing but the seller's word links the model to the run: name the "
                "folder of the released vectors (--releases), or accept that the model may be any "
                "(--accept unreplayed)"
            )
        case.notes.append(
            "13: the model was not recomputed: nothing but the seller's word links it to the run"
        )
        return
    rounds = [(entry["round"], entry["released"]) for entry in case.rounds]
    vectors = replay.read_vectors(case.releases, case.start["initial"], rounds)
    model = replay.replay(vectors, case.plans, case.sizes, step, arithmetic)
    wrong = int(np.count_nonzero(model.view(np.uint32) != flat.view(np.uint32)))
    if wrong:
        raise Refused(
            13,
            f"{wrong} of {len(flat)} parameters do not follow from the releases: the model must "
            "be the initial weights plus the server's steps on the released vectors",
        )


def check_code(case: Case) -> None:
    """Check 14: the run's code is that of this installation, or one that the caller names."""
    stated, local = case.start["software"]["source"], evidence.code_digest()
    if stated not in {local, *case.codes}:
        raise Refused(
            14,
            f"the run's code has the SHA-256 {stated}, but the code installed here has {local}: "
            "install the release that trained the model, or name its hash (--code)",
        )


def verify(
    certificate: bytes,
    model: bytes,
    *,
    key: str | None = None,
    releases: Path | None = None,
    witnesses: Collection[str] = (),
    accepts: Collection[str] = (),
    codes: Collection[str] = (),
) -> Case:
    """Make the checks 1 to 14.

    Args:
        certificate: content of the certificate's file.
        model: content of the model's file.
        key: public key of the signer, in hexadecimal.
        releases: see `Case`.
        witnesses: see `Case`.
        accepts: see `Case`.
        codes: see `Case`.

    Returns:
        The checked case.

    Raises:
        Refused: a check does not hold.
        NotCheckable: it cannot be checked here, or the caller does not name the signer.
    """
    payload, signer = open_envelope(certificate, key)
    statement = read_statement(payload)
    case = Case(statement, signer, model, releases, witnesses, accepts, codes)
    try:
        for check in (check_claim, check_rounds, check_plans, check_events, check_keys):
            check(case)
        for check in (check_chain, check_merkle_root, check_anchors, check_epsilon):
            check(case)
        check_replay(case, check_model(case))
        check_code(case)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:  # a recipe or plan of another shape
        raise Refused(
            3, f"recipe or plans have another form than this version's ({error})"
        ) from None
    if key is None:
        raise NotCheckable(
            f"check 1: everything else holds, but who signed? The certificate is signed by {signer}: "
            "name the seller's public key (--key)"
        )
    return case


def describe(case: Case) -> list[str]:
    """The outcome in sentences, of which the first states what level 1 does not prove."""
    claim, population = case.claim, case.predicate["population"]
    waived = " as far as it was checked" if case.notes else ""
    lines = [
        (
            f"Level 1 holds{waived}. It does not prove that the noise was added, nor that this is the "
            "only run."
        ),
        (
            f"The claim: epsilon {claim['epsilon']:.6g} at delta {claim['delta']:g} for one "
            f"{claim['unit']} ({claim['relation']}, {claim['trust']} trust), {claim['status']}, over "
            f"{len(case.rounds)} rounds of {population['sampling']} sampling at rate "
            f"{population['rate']:g} from {population['size']} {claim['unit']}s."
        ),
        f"With all that was released, {rates_of(case.composed).sentence(claim['unit'] + 's')}.",
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


def figures(case: Case) -> dict[str, Any]:
    """The outcome for `--json`."""
    return json.loads(
        json.dumps({"holds": True, "level": 1, "claim": case.claim, "notes": case.notes})
    )
