"""Checks 3 to 14 of a certificate, in their order."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np

from fedlgm.errors import FedlgmError
from fedlgm.privacy.signed import ANCHOR_EVERY, anchor_text
from fedlgm.privacy.spending import claimed_epsilon
from fedlgm_lab.certificate.verifier import chain, replay
from fedlgm_lab.certificate.verifier.case import (
    SERVER,
    SIMULATION,
    UNANCHORED,
    UNREPLAYED,
    Case,
    hash_of,
    population_of,
    words_of,
)
from fedlgm_lab.certificate.verifier.envelope import (
    NotCheckable,
    Refused,
    is_signed,
    must,
    open_envelope,
    read_json,
    write_json,
)
from fedlgm_lab.certificate.verifier.statement import NOT_COVERED, read_statement

LARGEST = 1.001
"""Largest ratio of the stated epsilon to the computed one."""
_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors that a recipe or an event of an unexpected form can raise."""


def check_claim(case: Case) -> None:
    """Make check 3: the words and figures of the claim follow from the recipe and the plans."""
    claim, first = case.claim, case.plans[0]
    for name, right in words_of(case.recipe, case.plans).items():
        problem = f"the claim says {name} = {claim[name]!r}, but the run has {right!r}"
        must(3, claim[name] == right, problem)
    protected = f"the plans protect one {first.unit} under {first.trust} trust"
    must(3, (claim["unit"], claim["trust"]) == (first.unit, first.trust), protected)
    commits = claim["seed"] is None and claim["trust"] == "central"
    by = "a server that adds secret noise commits to it, and nobody else does"
    must(3, commits == (case.start["noise"] is not None), by)
    largest = 1 / (10 * first.sampling.population)
    at_most = f"delta = {claim['delta']:g} would have to be at most {largest:.3g}, 1 / (10 n)"
    must(3, 0 < claim["delta"] <= largest, at_most)
    covered = case.predicate["not_covered"] == NOT_COVERED[claim["trust"]]
    must(3, covered, "the list of statements that are not covered was changed")
    secret = claim["seed"] is None or SIMULATION in case.accepts
    must(3, secret, "the run was seeded: anyone can draw its noise again, so it protects nobody")


def check_rounds(case: Case) -> None:
    """Make check 4: the certificate has every round of the recipe, once and in order."""
    planned = case.recipe["federation"]["rounds"]
    for number, entry in enumerate(case.rounds, start=1):
        problem = f"entry {number} is round {entry['round']}; it must be {number}"
        must(4, entry["round"] == number, problem)
    problem = f"the certificate has {len(case.rounds)} rounds, but the recipe {planned}"
    must(4, len(case.rounds) == planned, problem)


def check_plans(case: Case) -> None:
    """Make check 5: the plans are for these layers and this population, and every layer is
    released, or check 13 compares it with its initial values.
    """
    first, right = case.plans[0], population_of(case.plans[0])
    must(5, case.predicate["population"] == right, f"the population must be {right}, by the plans")
    federation, users = case.recipe["federation"], case.recipe["federation"].get("users")
    size, taken = first.sampling.population, first.sampling.participations
    if first.unit == "user":
        stated = len(set(users)) if isinstance(users, list) else users
    elif first.unit == "example" and first.steps is None:
        stated = size  # the number of the data's examples, which no recipe states
        batch = case.recipe["training"]["batch_size"]
        divides = taken or math.isclose(first.sampling.expected, batch, rel_tol=1e-9)
        must(5, divides, "the plans divide by another batch size than the recipe states")
    else:
        stated = federation["clients"]
    planned = (size, taken) == (stated, federation.get("participations"))
    must(5, planned, "the recipe has another number of units or participations than the plans")
    for entry, plan in zip(case.rounds, case.plans, strict=True):
        same = plan.facts == first.facts and plan.protects == first.protects
        must(5, same, f"the plan of round {entry['round']} is not for this run")
    rounds = first.facts["rounds"]
    must(5, rounds == len(case.rounds), f"the plans are for {rounds} rounds")
    for layer, size, slots in case.start["layers"]:
        fits = size == sum(part for _, part in slots)
        must(5, fits, f"the tensors of layer {layer} do not have {size} numbers")
    released = np.any([plan.released for plan in case.plans], axis=0)
    layer = case.start["layers"][int(np.argmin(released))][0]
    # Check 13 compares a layer that is never released with its initial values.
    held = released.all() or case.releases is not None
    must(5, held, f"no round releases layer {layer!r}, which the model file holds")


def check_events(case: Case) -> None:
    """Make check 6: every round is charged with the event that follows from its plan."""
    texts, rows, central = case.events, case.charges, case.claim["trust"] == "central"
    used = {row["event"] for row in rows}
    must(
        6, set(texts) == used, "the events of the certificate differ from the events of its ledger"
    )
    check_texts(texts)
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows, start=1):
        places.setdefault(row["round"], []).append(place)
        protects = row["protects"] == case.plans[0].protects
        must(6, protects, f"row {place} of the ledger protects {row['protects']!r}")
        noised = (row["client"] == SERVER) == (central or row["round"] == 0)
        must(6, noised, f"row {place} of the ledger is not of a party that adds noise")
    for entry, plan in zip(case.rounds, case.plans, strict=True):
        number, last, cost = entry["round"], entry["row"], plan.event(entry["round"])
        charged = places.get(number, [])
        if central:
            must(6, last in charged, f"the ledger has no charge for round {number} in row {last}")
            charged = [last]
        for place in charged:
            must(6, place <= last, f"row {place} of the ledger is later than round {number}")
            stated = texts[rows[place - 1]["event"]]
            must(6, stated == cost, f"round {number} is charged with {stated}, but costs {cost}")
    order = [0, *(entry["row"] for entry in case.rounds), len(rows)]
    must(6, order == sorted(order), "rounds are charged in another order, or not at all")


def check_texts(events: dict[str, str]) -> None:
    """Refuse a text of an event that does not have the stated hash, or that has another form."""
    for name, text in events.items():
        named = hash_of(text) == name
        must(6, named, f"event {name[:8]} has another text than its hash says")
        read_json(text.encode(), 6, f"event {name[:8]}", write_json)


def check_keys(case: Case) -> None:
    """Make check 7: no two charges have the same noise."""
    counts = Counter(row["key"] for row in case.charges)
    for row in case.charges:
        once = counts[row["key"]] == 1
        must(7, once, f"round {row['round']} has the noise of another release")


def check_chain(case: Case) -> None:
    """Make check 8: the heads of the ledger and of the releases follow from the values that they
    cover.
    """
    ledger, owner = case.predicate["ledger"], case.predicate["recipe"]["sha256"]
    owned = ledger["owner"] == case.start["owner"] == owner
    must(8, owned, "ledger and releases belong to another recipe")
    heads = chain.ledger_heads(owner, case.charges, case.events)
    right = f"{len(case.charges)}:{heads[-1]}"
    must(8, ledger["head"] == right, f"the ledger's head must be {right}")
    head = chain.first_head(case.start)
    for entry in case.rounds:
        facts = heads[entry["row"]], entry["plan"], entry["released"]
        head = chain.next_head(head, entry["round"], *facts)
        must(8, entry["head"] == head, f"the head of round {entry['round']} must be {head}")


def check_merkle_root(case: Case) -> None:
    """Make check 9: the root of the hash tree follows from the noise keys in the ledger."""
    root = chain.merkle_root(row["key"] for row in case.charges)
    right = case.predicate["keys_merkle_root"] == root
    must(9, right, f"the root over the noise keys must be {root}")


def check_anchors(case: Case) -> None:
    """Make check 10: named witnesses saw this chain at least every five rounds and in the last
    round.

    Raises:
        Refused: an anchor is missing, is not signed, or belongs to another chain.
        NotCheckable: no witness is named, and `unanchored` is not accepted.
    """
    heads, seen = {entry["round"]: entry["head"] for entry in case.rounds}, {0}
    for anchor in case.predicate["anchors"]:
        number, text = anchor["round"], anchor_text(anchor["round"], anchor["head"])
        signed = is_signed(anchor["by"], anchor["signature"], text)
        must(10, signed, f"the anchor of round {number} is not signed by {anchor['by']}")
        same = heads.get(number) == anchor["head"]
        must(10, same, f"a witness saw another chain in round {number}")
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
    last = len(case.rounds)
    must(10, max(seen) == last, f"no named witness saw the last round, {last}")
    for before, after in itertools.pairwise(sorted(seen)):
        gap = f"no named witness saw a round from {before + 1} to {after - 1}"
        must(10, after - before <= ANCHOR_EVERY, gap)


def check_epsilon(case: Case) -> None:
    """Make check 11: both stated epsilons follow from the charges, for the client that has spent
    most.

    Raises:
        Refused: the charges cannot be composed, or give another epsilon.
    """
    claim, delta, name = case.claim, case.claim["delta"], case.claim["composition"]
    rows = Counter((r["client"], case.events[r["event"]], r["claim"]) for r in case.charges)
    try:
        right = case.spending.epsilon(delta, name)
        claimed = claimed_epsilon([(*row, count) for row, count in rows.items()], delta, name)
    except (FedlgmError, *_FORM) as error:
        raise Refused(11, f"the charges cannot be composed ({error})") from None
    for name, computed in (("epsilon", right), ("claimed_epsilon", claimed)):
        stated = math.inf if claim[name] is None else claim[name]
        close = computed <= stated <= computed * LARGEST or stated == computed
        must(11, close, f"{name} is stated as {stated:.6g}, but it is {computed:.6g}")


def check_model(case: Case) -> None:
    """Make checks 12 and 13: the model file is the subject, and its parameters follow from the
    initial weights, the released vectors and the server's steps.

    Raises:
        Refused: the file is not this model, or its parameters do not follow.
        NotCheckable: no released vectors are given, and `unreplayed` is not accepted.
    """
    subject, fixed = case.statement["subject"], case.start["fixed"]
    named = len(subject) == 2 and subject[1]["name"] == "flat"
    must(12, named, "the subject must be a model file and its flat parameters")
    flat = replay.flat_model(case.model, case.start["layers"], fixed)
    for entry, content in zip(subject, (case.model, flat.astype("<f4").tobytes()), strict=True):
        stated, right = entry["digest"]["sha256"], hash_of(content)
        must(12, stated == right, f"the model has the SHA-256 {right}, not {stated}")
    if fixed:
        case.notes.append(
            f"12: {len(fixed)} tensors of the model were not trained in this run: ask what they "
            "were made from"
        )
    arithmetic, step = case.predicate["arithmetic"], case.step
    known = ", ".join(replay.ARITHMETIC)
    must(13, arithmetic in replay.ARITHMETIC, f"the arithmetic must be one of {known}")
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
    must(
        13,
        wrong == 0,
        f"{wrong} of {len(flat)} parameters do not follow from the releases: the model must be the "
        "initial weights plus the server's steps on the released vectors",
    )


def check_code(case: Case) -> None:
    """Make check 14: the run's code is the installed code, or code that the caller trusts."""
    stated, local = case.start["software"]["source"], chain.code_digest()
    must(
        14,
        stated in {local, *case.codes},
        f"the run's code has the SHA-256 {stated}, but the code installed here has {local}: install "
        "the release that trained the model, or name its hash (--code)",
    )


CHECKS = (
    *(check_claim, check_rounds, check_plans, check_events, check_keys, check_chain),
    *(check_merkle_root, check_anchors, check_epsilon, check_model, check_code),
)
"""Checks 3 to 14, in their order."""


def verify(certificate: bytes, model: bytes, *, key: str | None = None, **held: Any) -> Case:
    """Make checks 1 to 14 of a certificate.

    Args:
        certificate: content of the certificate's file.
        model: content of the model's file.
        key: public key of the signer, in hexadecimal.
        **held: releases, witnesses, accepts and codes of a `Case`.

    Returns:
        The checked case.

    Raises:
        Refused: a check does not hold.
        NotCheckable: a check cannot be made here, or the caller does not name the signer.
    """
    payload, signer = open_envelope(certificate, key)
    case = Case(read_statement(payload), signer, model, **held)
    try:
        for check in CHECKS:
            check(case)
    except _FORM as error:
        raise Refused(
            3, f"the recipe or a plan does not have the form that this version reads ({error})"
        ) from None
    require_signer(signer, key, "seller")
    return case


def require_signer(signer: str, key: str | None, who: str) -> None:
    """Raise an error if the caller has not named the required signer, because then nobody vouches
    for the certificate.

    Raises:
        NotCheckable: the caller named no key.
    """
    if key is None:
        raise NotCheckable(
            f"check 1: everything else holds, but who signed? It is signed by {signer}: name the "
            f"{who}'s public key (--key)"
        )
