"""Checks 3 to 14 of a certificate, in their order."""

from __future__ import annotations

import hashlib
import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import dp_event

from fedlgm.errors import FedlgmError
from fedlgm.privacy.attackers import AttackRates, attack_rates
from fedlgm.privacy.signed import ANCHOR_EVERY, anchor_text
from fedlgm.privacy.spending import Spending, claimed_epsilon
from fedlgm_lab.certificate.verifier import chain, replay
from fedlgm_lab.certificate.verifier.envelope import (
    NotCheckable,
    Refused,
    is_signed,
    open_envelope,
    read_json,
    write_json,
)
from fedlgm_lab.certificate.verifier.plans import Plan, read_plan
from fedlgm_lab.certificate.verifier.statement import NOT_COVERED, PROTECTED_FROM, read_statement

UNANCHORED, UNREPLAYED, SIMULATION = "unanchored", "unreplayed", "simulation"
ACCEPTABLE = (UNANCHORED, UNREPLAYED, SIMULATION)
"""What a caller may accept: no anchors of a witness, a model that is not recomputed, a public
seed."""
SERVER = -1
"""Releasing party of the ledger's rows under central trust; clients are numbered from 0."""
_LARGEST = 1.001
"""Largest ratio of the stated epsilon to the computed one."""
_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of a recipe or an event that has another form."""


def hash_of(data: str | bytes) -> str:
    """SHA-256 of a text or of bytes, in hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def words_of(recipe: dict[str, Any], plans: Collection[Plan]) -> dict[str, Any]:
    """The words and figures of the claim, except epsilon, that follow from recipe and plans."""
    privacy, mechanism, seed = recipe["privacy"], recipe["mechanism"], recipe["run"].get("seed")
    proven = all(plan.status == "proven" for plan in plans)
    return {
        "unit": privacy.get("unit", "client"),
        "relation": next(iter(plans)).relation,
        "trust": privacy["trust"],
        "protected_from": PROTECTED_FROM[privacy["trust"]],
        "delta": privacy["delta"],
        "status": SIMULATION if seed is not None else "proven" if proven else "conditional",
        "mechanism": mechanism["name"],
        "variant": mechanism["variant"],
        "composition": privacy["accountant"],
        "audited_lower_bound": None,
        "seed": None if seed is None else str(seed),
    }


def population_of(plan: Plan) -> dict[str, Any]:
    """The population of the certificate, by a plan."""
    sampling = plan.sampling
    return {
        "size": sampling.population,
        "rate": sampling.rate,
        "sampling": sampling.scheme,
        "denominator": sampling.expected,
    }


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
        self.events: dict[str, str] = self.predicate["events"]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Coordinates of each layer, [K]."""
        return np.array([size for _, size, _ in self.start["layers"]], dtype=np.int64)

    @cached_property
    def plans(self) -> list[Plan]:
        """Plan of each round, [T]."""
        texts = self.predicate["plans"]
        if not self.rounds:
            raise Refused(4, "the certificate has no round")
        if set(texts) != {entry["plan"] for entry in self.rounds}:
            raise Refused(5, "the plans of the certificate are not those of its rounds")
        plans = {name: read_plan(text, name, len(self.sizes)) for name, text in texts.items()}
        return [plans[entry["plan"]] for entry in self.rounds]

    @cached_property
    def spending(self) -> Spending:
        """Charges of the server and of each client, with their numbers."""
        counts = Counter((row["client"], self.events[row["event"]]) for row in self.charges)
        return Spending.of([(*row, count) for row, count in counts.items()], SERVER)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe's values."""
        text = self.predicate["recipe"]["text"]
        if hash_of(text) != self.predicate["recipe"]["sha256"]:
            raise Refused(3, "the recipe has another text than its hash says")
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise Refused(3, f"the recipe is not TOML ({error})") from None

    @cached_property
    def step(self) -> tuple[str, float, float]:
        """Name, learning rate and momentum of the server's step, by the recipe."""
        federation, training = self.recipe["federation"], self.recipe["training"]
        step = tuple(federation[f"server_{name}"] for name in ("optimizer", "lr", "momentum"))
        if self.claim["unit"] == "example" and self.claim["trust"] == "central":
            step = tuple(training[name] for name in ("optimizer", "lr", "momentum"))
            if step[0] == "sgd" and step[2]:
                step = ("momentum", *step[1:])
        if step[0] not in replay.STEPS or "server_schedule" in federation:
            raise NotCheckable(
                f"the server's step is {step[0]!r}; only {', '.join(replay.STEPS)} without a "
                "schedule can be repeated bit for bit"
            )
        return step


def check_claim(case: Case) -> None:
    """Check 3: the words and figures of the claim are those of recipe and plans."""
    claim, first = case.claim, case.plans[0]
    for name, value in words_of(case.recipe, case.plans).items():
        if claim[name] != value:
            raise Refused(3, f"the claim says {name} = {claim[name]!r}, but the run's is {value!r}")
    if (claim["unit"], claim["trust"]) != (first.unit, first.trust):
        raise Refused(3, f"the plans protect one {first.unit} under {first.trust} trust")
    commits = claim["seed"] is None and claim["trust"] == "central"
    if commits != (case.start["noise"] is not None):
        raise Refused(
            3, "only a server that adds secret noise commits to it, and such a server does"
        )
    population = first.sampling.population
    if not 0 < claim["delta"] <= 1 / (10 * population):
        raise Refused(
            3,
            f"delta = {claim['delta']:g} is above 1 / (10 x {population}): it would have to be at "
            f"most {1 / (10 * population):.3g}",
        )
    if case.predicate["not_covered"] != NOT_COVERED[claim["trust"]]:
        raise Refused(3, "the list of what is not covered was changed")
    if claim["seed"] is not None and SIMULATION not in case.accepts:
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
    first, right = case.plans[0], population_of(case.plans[0])
    if case.predicate["population"] != right:
        raise Refused(5, f"the population must be {right}, by the plans")
    federation, users = case.recipe["federation"], case.recipe["federation"].get("users")
    size, taken = first.sampling.population, first.sampling.participations
    if first.unit == "user":
        stated = len(set(users)) if isinstance(users, list) else users
    elif first.unit == "example" and first.steps is None:
        stated = size  # the examples of the data, which no recipe counts
        batch = case.recipe["training"]["batch_size"]
        if taken is None and not math.isclose(first.sampling.expected, batch, rel_tol=1e-9):
            raise Refused(5, "the plans divide by another batch than the recipe's")
    else:
        stated = federation["clients"]
    if (size, taken) != (stated, federation.get("participations")):
        raise Refused(5, "the plans are for another number of units or participations than planned")
    for entry, plan in zip(case.rounds, case.plans, strict=True):
        if plan.facts != first.facts or plan.protects != first.protects:
            raise Refused(5, f"the plan of round {entry['round']} is not for this run")
    if first.facts["rounds"] != len(case.rounds):
        raise Refused(5, f"the plans are for {first.facts['rounds']} rounds")
    for layer, size, slots in case.start["layers"]:
        if size != sum(part for _, part in slots):
            raise Refused(5, f"the tensors of layer {layer} do not have {size} numbers")
    never = ~np.any([plan.released for plan in case.plans], axis=0)
    if never.any() and case.releases is None:  # else check 13 compares it with its initial values
        layer = case.start["layers"][int(np.argmax(never))][0]
        raise Refused(5, f"no round releases layer {layer!r}, which the model file holds")


def check_events(case: Case) -> None:
    """Check 6: every round is charged with the event that follows from its plan."""
    texts, rows, central = case.events, case.charges, case.claim["trust"] == "central"
    if set(texts) != {row["event"] for row in rows}:
        raise Refused(6, "the events of the certificate are not those of its ledger")
    for name, text in texts.items():
        if hash_of(text) != name:
            raise Refused(6, f"event {name[:8]} has another text than its hash says")
        read_json(text.encode(), 6, f"event {name[:8]}", write_json)
    for place, row in enumerate(rows, start=1):
        if row["protects"] != case.plans[0].protects:
            raise Refused(6, f"row {place} of the ledger protects {row['protects']!r}")
        if (row["client"] == SERVER) != (central or row["round"] == 0):
            raise Refused(6, f"row {place} of the ledger is not of a party that adds noise")
    for entry, plan in zip(case.rounds, case.plans, strict=True):
        number, last, cost = entry["round"], entry["row"], plan.event(entry["round"])
        places = [last] if central else charged_rows(case, number)
        for place in places:
            if not 1 <= place <= min(last, len(rows)) or rows[place - 1]["round"] != number:
                raise Refused(6, f"round {number} is not charged before its release, in row {last}")
            stated = texts[rows[place - 1]["event"]]
            if stated != cost:
                raise Refused(6, f"round {number} is charged with {stated}, but its plan: {cost}")
    lasts = [entry["row"] for entry in case.rounds]
    if lasts != sorted(lasts) or lasts[-1] > len(rows) or (central and len({*lasts}) < len(lasts)):
        raise Refused(6, "two rounds have one charge, or charges in another order")


def charged_rows(case: Case, number: int) -> list[int]:
    """Places of a round's rows in the ledger, from 1."""
    return [place for place, row in enumerate(case.charges, start=1) if row["round"] == number]


def check_keys(case: Case) -> None:
    """Check 7: no two charges have the same noise."""
    counts = Counter(row["key"] for row in case.charges)
    for row in case.charges:
        if counts[row["key"]] > 1:
            raise Refused(7, f"round {row['round']} has the noise of another release")


def check_chain(case: Case) -> None:
    """Check 8: the heads of the ledger and of the releases follow from what they cover."""
    ledger, owner = case.predicate["ledger"], case.predicate["recipe"]["sha256"]
    if not ledger["owner"] == case.start["owner"] == owner:
        raise Refused(8, "ledger and releases belong to another recipe")
    heads = chain.ledger_heads(owner, case.charges, case.events)
    if ledger["head"] != f"{len(case.charges)}:{heads[-1]}":
        raise Refused(8, f"the ledger's head must be {len(case.charges)}:{heads[-1]}")
    head = chain.first_head(case.start)
    for entry in case.rounds:
        facts = heads[entry["row"]], entry["plan"], entry["released"]
        head = chain.next_head(head, entry["round"], *facts)
        if entry["head"] != head:
            raise Refused(8, f"the head of round {entry['round']} must be {head}")


def check_merkle_root(case: Case) -> None:
    """Check 9: the root of the hash tree over the noise keys of the ledger."""
    root = chain.merkle_root(row["key"] for row in case.charges)
    if case.predicate["keys_merkle_root"] != root:
        raise Refused(9, f"the root over the noise keys must be {root}")


def check_anchors(case: Case) -> None:
    """Check 10: named witnesses saw this chain at least every five rounds, the last included."""
    heads = {entry["round"]: entry["head"] for entry in case.rounds}
    seen = {0}
    for anchor in case.predicate["anchors"]:
        number, text = anchor["round"], anchor_text(anchor["round"], anchor["head"])
        if not is_signed(anchor["by"], anchor["signature"], text):
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
    """Check 11: the stated epsilon is that of the charges, of the client who spent most."""
    claim = case.claim
    rows = Counter((r["client"], case.events[r["event"]], r["claim"]) for r in case.charges)
    try:
        right = case.spending.epsilon(claim["delta"], claim["composition"])
        claims = [(*row, count) for row, count in rows.items()]
        claimed = claimed_epsilon(claims, claim["delta"], claim["composition"])
    except (FedlgmError, *_FORM) as error:
        raise Refused(11, f"the charges cannot be composed ({error})") from None
    for name, computed in (("epsilon", right), ("claimed_epsilon", claimed)):
        stated = math.inf if claim[name] is None else claim[name]
        if not (computed <= stated <= computed * _LARGEST or stated == computed):
            raise Refused(11, f"{name} is stated as {stated:.6g}, but it is {computed:.6g}")


def check_model(case: Case) -> None:
    """Checks 12 and 13: the model file is the subject, and its parameters follow from initial
    weights, released vectors and the server's step.
    """
    subject, fixed = case.statement["subject"], case.start["fixed"]
    if len(subject) != 2 or subject[1]["name"] != "flat":
        raise Refused(12, "the subject must be a model file and its flat parameters")
    flat = replay.flat_model(case.model, case.start["layers"], fixed)
    for entry, content in zip(subject, (case.model, flat.astype("<f4").tobytes()), strict=True):
        if entry["digest"]["sha256"] != hash_of(content):
            raise Refused(
                12, f"the model has the SHA-256 {hash_of(content)}, but the certificate has another"
            )
    if fixed:
        case.notes.append(
            f"12: {len(fixed)} tensors of the model were not trained in this run: ask what they "
            "were made from"
        )
    arithmetic, step = case.predicate["arithmetic"], case.step
    if arithmetic not in replay.ARITHMETIC:
        raise Refused(13, f"the arithmetic must be one of {', '.join(replay.ARITHMETIC)}")
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
    vectors = replay.read_vectors(case.releases, case.start["initial"], case.rounds)
    charged = {row["round"] for row in case.charges}
    model = replay.replay(vectors, case.plans, case.sizes, step, arithmetic, charged)
    wrong = int(np.count_nonzero(model.view(np.uint32) != flat.view(np.uint32)))
    if wrong:
        raise Refused(
            13,
            f"{wrong} of {len(flat)} parameters do not follow from the releases: the model must "
            "be the initial weights plus the server's steps on the released vectors",
        )


def check_code(case: Case) -> None:
    """Check 14: the run's code is that of this installation, or one that the caller names."""
    stated, local = case.start["software"]["source"], chain.code_digest()
    if stated not in {local, *case.codes}:
        raise Refused(
            14,
            f"the run's code has the SHA-256 {stated}, but the code installed here has {local}: "
            "install the release that trained the model, or name its hash (--code)",
        )


CHECKS = (
    *(check_claim, check_rounds, check_plans, check_events, check_keys, check_chain),
    *(check_merkle_root, check_anchors, check_epsilon, check_model, check_code),
)
"""Checks 3 to 14, in their order."""


def verify(certificate: bytes, model: bytes, *, key: str | None = None, **held: Any) -> Case:
    """Make the checks 1 to 14.

    Args:
        certificate: content of the certificate's file.
        model: content of the model's file.
        key: public key of the signer, in hexadecimal.
        **held: releases, witnesses, accepts and codes of a `Case`.

    Returns:
        The checked case.

    Raises:
        Refused: a check does not hold.
        NotCheckable: it cannot be checked here, or the caller does not name the signer.
    """
    payload, signer = open_envelope(certificate, key)
    case = Case(read_statement(payload), signer, model, **held)
    try:
        for check in CHECKS:
            check(case)
    except _FORM as error:
        raise Refused(
            3, f"recipe or plans have another form than this version's ({error})"
        ) from None
    if key is None:
        raise NotCheckable(
            f"check 1: everything else holds, but who signed? The certificate is signed by {signer}: "
            "name the seller's public key (--key)"
        )
    return case


def worst_rates(spending: Spending) -> AttackRates:
    """Bounds on all attacks on one unit: those of the client who spent most."""
    composed = [
        dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(*pair) for pair in profile])
        for profile in spending.worst()
    ]
    return max(map(attack_rates, composed), key=lambda rates: rates.tpr(0.01))


def describe(case: Case) -> list[str]:
    """The outcome in sentences, of which the first states what level 1 does not prove."""
    claim, population = case.claim, case.predicate["population"]
    waived = " as far as it was checked" if case.notes else ""
    drawn = "client" if case.plans[0].steps else claim["unit"]
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
        f"With all that was released, {worst_rates(case.spending).sentence(claim['unit'] + 's')}.",
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
