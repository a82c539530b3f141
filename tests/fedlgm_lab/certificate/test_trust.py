"""Certificates of every unit, trust model and noise process: honest runs verify, and tamperings are
refused, also with all hashes and epsilon rewritten to fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlgm_lab.certificate.auditor import audit
from fedlgm_lab.certificate.releases import round_file
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused
from fedlgm_lab.certificate.verifier.run import describe
from tests.fedlgm_lab.certificate.test_second_verifier import holds_twice
from tests.support.certificates import ROUNDS, SMALL, Certified, certified_run, edit_plans, fit

FEW = [f"federation.rounds={ROUNDS}", "run.seed=none", "run.keep_releases=true"]
SHORT = [*FEW, "run.evaluate_every=7", "training.epochs=1"]
ANY_RATE = [setting for setting in SMALL if "rate" not in setting]
CLIENTS = {
    "local": ("digits", [*SMALL, "privacy.trust=local", "privacy.max_participations=3"]),
    "local, Laplace": (
        "digits",
        [
            *(*SMALL, "privacy.trust=local", "privacy.max_participations=2"),
            *("mechanism.name=laplace-inid", "privacy.epsilon=5"),
        ],
    ),
    "local, examples": (
        "example-level-federation",
        [*FEW, "run.evaluate_every=7", "federation.server_lr=0.7", "privacy.epsilon=1"],
    ),
    "distributed": ("distributed-digits", [*SHORT, "privacy.max_participations=7"]),
    "distributed, Skellam": (
        "distributed-digits",
        [*SHORT, "privacy.max_participations=7", "distributed.noise=skellam"],
    ),
}
SERVER = {
    "users": ("digits", [*SMALL, "privacy.unit=user", "federation.users=30"]),
    "examples": ("dp-sgd-digits", [*FEW, "run.evaluate_every=7", "privacy.epsilon=1"]),
    "examples, allocated": (
        "dp-sgd-digits",
        [
            *(*FEW, "run.evaluate_every=7", "federation.sampling=allocation"),
            *("federation.participations=2", "training.batch_size=412", "privacy.epsilon=1"),
        ],
    ),
    "allocated": (
        "digits",
        [*ANY_RATE, "federation.sampling=allocation", "federation.participations=2"],
    ),
    "allocated in blocks": (
        "digits",
        [
            *(*ANY_RATE, "federation.sampling=allocation", "federation.participations=1"),
            *("federation.rounds=6", "federation.block=3", "run.evaluate_every=6"),
        ],
    ),
    "cyclic": ("digits", [*SMALL, "federation.sampling=cyclic", "privacy.min_separation=5"]),
    "banded, cyclic": (
        "digits",
        [
            *(*SMALL, "federation.sampling=cyclic", "privacy.min_separation=5"),
            "privacy.noise=banded",
        ],
    ),
    "buffered, min-separation": (
        "digits",
        [
            *(*SMALL, "federation.sampling=min-separation", "privacy.min_separation=3"),
            "privacy.noise=blt",
        ],
    ),
    "banded, grouped": (
        "digits",
        [
            *(*SMALL, "federation.sampling=grouped-poisson", "privacy.min_separation=3"),
            "privacy.noise=banded",
        ],
    ),
    "square-root, replace-one": (
        "digits",
        [
            *(*SMALL, "federation.sampling=cyclic", "privacy.min_separation=5"),
            *("privacy.noise=square-root", "privacy.relation=replace-one"),
        ],
    ),
}
KINDS = CLIENTS | SERVER
ONCE = {
    *("distributed, Skellam", "allocated", "allocated in blocks", "examples, allocated"),
    "local, Laplace",  # whose grid of losses up to 400 takes minutes
}
"""Kinds that the second verifier does not read."""


@pytest.fixture(scope="module", params=KINDS)
def certified(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Certified]:
    recipe, basis = KINDS[request.param]
    beacon = request.param in SERVER
    folder = tmp_path_factory.mktemp("certified")
    return request.param, certified_run(folder, recipe=recipe, basis=basis, beacon=beacon)


def test_an_honest_run_verifies(certified: tuple[str, Certified]) -> None:
    name, run = certified
    certificate = run.sign(run.statement)
    case = run.verify(certificate)
    assert name in ONCE or holds_twice(run, certificate)
    assert case.notes == []
    assert describe(case)[0].startswith("Level 1 holds")
    if name in SERVER:
        audit(case, run.run / "private")
        return
    with pytest.raises(NotCheckable, match="the clients drew the noise"):
        audit(case, run.run / "private")
    assert not (run.run / "private" / "sums").exists()
    assert not (run.run / "private" / "opening.json").exists()


def test_an_attack_looks_for_people_if_they_may_be_at_several_clients(tmp_path: Path) -> None:
    joint = ("federation.overlap=2", "privacy.relation=replace-one")
    run = certified_run(tmp_path, joint, beacon=False)
    assert " of the people." in describe(run.verify(run.sign(run.statement)))[2]


def _more_noise(statement: dict[str, Any]) -> None:
    edit_plans(statement, lambda plan: plan.update(sigma=[s and 1.5 * s for s in plan["sigma"]]))


def _stated_noise(statement: dict[str, Any]) -> None:
    """More noise in the facts and in the plans."""

    def change(plan: dict[str, Any]) -> None:
        plan["facts"]["noise_multiplier"] *= 1.5
        plan["sigma"] = [s and 1.5 * s for s in plan["sigma"]]

    edit_plans(statement, change)


def _without_round(statement: dict[str, Any]) -> None:
    statement["predicate"]["rounds"].pop(3)


def _without_last(statement: dict[str, Any]) -> None:
    predicate = statement["predicate"]
    last = predicate["rounds"].pop()["round"]
    rows = predicate["ledger"]["rows"]
    predicate["ledger"]["rows"] = [row for row in rows if row["round"] != last]
    predicate["anchors"] = [a for a in predicate["anchors"] if a["round"] < last]
    predicate["recipe"]["text"] = predicate["recipe"]["text"].replace(
        f"rounds = {last}", f"rounds = {last - 1}"
    )
    edit_plans(statement, lambda plan: plan["facts"].update(rounds=last - 1))


def _lower_epsilon(statement: dict[str, Any]) -> None:
    statement["predicate"]["claim"]["epsilon"] *= 0.5


def _other_release(statement: dict[str, Any]) -> None:
    statement["predicate"]["rounds"][2]["released"] = "ab" * 32


def _without_charges(statement: dict[str, Any]) -> None:
    """The ledger without one of its parties, or without one row."""
    ledger = statement["predicate"]["ledger"]
    party = ledger["rows"][0]["client"]
    rows = ledger["rows"][1:] if party < 0 else [r for r in ledger["rows"] if r["client"] != party]
    for entry in statement["predicate"]["rounds"]:
        entry["row"] = sum(row["round"] <= entry["round"] for row in rows)
    ledger["rows"] = rows


def _other_trust(statement: dict[str, Any]) -> None:
    trust = "local" if statement["predicate"]["claim"]["trust"] == "central" else "central"
    statement["predicate"]["claim"]["trust"] = trust


def _separation(statement: dict[str, Any]) -> None:
    """Participation that costs less: rarer, or in fewer rounds."""

    def change(plan: dict[str, Any]) -> None:
        sampling = plan["facts"]["sampling"]
        if "participations" in sampling:
            sampling["participations"] = 1
        elif "separation" in sampling:
            sampling["separation"] *= 2
        elif "steps" in plan["facts"]:
            plan["facts"]["steps"]["rate"] /= 2
        else:
            sampling["rate"] /= 2

    edit_plans(statement, change)


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "noise scale": _more_noise,
    "noise scale, in the facts too": _stated_noise,
    "a round left out": _without_round,
    "the last round left out": _without_last,
    "epsilon": _lower_epsilon,
    "a released hash": _other_release,
    "charges left out": _without_charges,
    "trust": _other_trust,
    "participation": _separation,
}


@pytest.mark.parametrize("name", EDITS)
def test_a_tampering_is_refused(certified: tuple[str, Certified], name: str) -> None:
    _, run = certified
    statement = run.copy()
    EDITS[name](statement)
    if statement == run.statement:
        return  # one participation of a block cannot be fewer
    with pytest.raises((Refused, NotCheckable), match=r"^(check \d+|plan)"):
        run.verify(run.sign(statement))


@pytest.mark.parametrize("name", EDITS)
def test_a_tampering_that_is_made_to_fit_is_refused_or_undone(
    certified: tuple[str, Certified], name: str
) -> None:
    _, run = certified
    statement = run.copy()
    EDITS[name](statement)
    try:
        fit(statement)
    except (Refused, NotCheckable, LookupError):
        return  # nothing fits
    if statement == run.statement:
        assert name in ("epsilon", "participation")
        return
    with pytest.raises((Refused, NotCheckable), match=r"^(check \d+|plan)"):
        run.verify(run.sign(statement))


def test_a_released_vector_that_was_changed_is_refused(certified: tuple[str, Certified]) -> None:
    """Also where the certificate names its hash and no witness is needed."""
    _, run = certified
    file = run.releases / round_file(3)
    before = file.read_bytes()
    values = np.frombuffer(before).copy()
    values[0] += 1.0
    try:
        file.write_bytes(values.tobytes())
        with pytest.raises(Refused, match="check 13: round 3 is not the vector"):
            run.verify(run.sign(run.statement))
        statement = run.copy()
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        statement["predicate"]["rounds"][2]["released"] = digest
        fit(statement, epsilon=False)
        with pytest.raises(Refused, match="check 10: a witness saw another chain"):
            run.verify(run.sign(statement))
        statement["predicate"]["anchors"] = []
        with pytest.raises(Refused, match=r"check 13: .* do not follow"):
            run.verify(run.sign(statement), accepts=["unanchored"])
    finally:
        file.write_bytes(before)


def test_a_round_that_charges_nobody_releases_nothing(
    tmp_path: Path,
) -> None:
    recipe, basis = CLIENTS["local"]
    run = certified_run(tmp_path, recipe=recipe, basis=basis, beacon=False)
    statement = run.copy()
    ledger = statement["predicate"]["ledger"]
    ledger["rows"] = [row for row in ledger["rows"] if row["round"] != 4]
    for entry in statement["predicate"]["rounds"]:
        entry["row"] = sum(row["round"] <= entry["round"] for row in ledger["rows"])
    statement["predicate"]["anchors"] = []
    with pytest.raises(Refused, match="check 13: round 4 releases a sum"):
        run.verify(run.sign(fit(statement)), accepts=["unanchored"])


def test_the_worst_client_decides_epsilon(tmp_path: Path) -> None:
    """Rows of one client say what it spent; a client whose rows are left out spends nothing."""
    recipe, basis = CLIENTS["local"]
    run = certified_run(tmp_path, recipe=recipe, basis=basis, beacon=False)
    rows = run.statement["predicate"]["ledger"]["rows"]
    counts = {row["client"]: sum(r["client"] == row["client"] for r in rows) for row in rows}
    most = {client for client, count in counts.items() if count == max(counts.values())}
    statement = run.copy()
    ledger = statement["predicate"]["ledger"]
    ledger["rows"] = [row for row in rows if row["client"] not in most]
    for entry in statement["predicate"]["rounds"]:
        entry["row"] = sum(row["round"] <= entry["round"] for row in ledger["rows"])
    fit(statement)
    assert (
        statement["predicate"]["claim"]["epsilon"] < run.statement["predicate"]["claim"]["epsilon"]
    )
    with pytest.raises(Refused, match="check 10: a witness saw another chain"):
        run.verify(run.sign(statement))
    assert json.dumps(statement)  # accepted only by a caller who needs no witness
    statement["predicate"]["anchors"] = []
    run.verify(run.sign(statement), accepts=["unanchored"])
