"""The five steps at a node's service, asked by a hostile server: replays, other rounds, altered
terms."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.errors import ConfigError, LedgerError
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import public_text
from fedlgm_nodes.secagg.cohort import Advert, Terms, key_pairs
from fedlgm_nodes.secagg.steps import NO_MODEL, STEPS, terms_of
from fedlgm_nodes.service.secagg.store import SessionStore
from fedlgm_nodes.service.service import Service
from tests.support import nodes as local
from tests.support.nodes import edit, rows
from tests.support.secure_nodes import NODES, SecureFederation, Served, make_nodes, plan


def test_a_plan_for_shares_is_not_answered_alone_and_a_plan_for_one_not_in_steps(federation):
    """The vector with a share of the noise alone is not private: it leaves masked or not at all."""
    question = federation.question(0)
    answer, numbers = federation.served.exchange(
        str(federation.folders[0].socket), question.header(), local.BODY
    )  # fmt: skip
    assert (answer["code"], len(numbers)) == ("privacy", 0)
    assert (
        federation.ask(0, "advertise", plan=local.plan(population=NODES).to_json())["code"]
        == "privacy"
    )
    assert federation.charges() == [0] * NODES


def test_a_replaced_advert_is_not_shared_with(federation):
    (given, *_), answers = federation.given_to("share")
    question = federation.question(0)
    agreed = terms_of(question, plan())
    strange = Advert.make(agreed, 1, Ed25519PrivateKey.generate(), *key_pairs()).values()
    swapped = answers["advertise", 1]["said"] | {
        "masking": answers["advertise", 2]["said"]["masking"]
    }
    for advert in (strange, swapped):
        adverts = [advert if one["client"] == 1 else one for one in given["adverts"]]
        assert (
            "not signed by its enrolled service"
            in federation.ask(0, "share", {"adverts": adverts})["why"]
        )
    assert "min_cohort is 5" in federation.ask(0, "share", {"adverts": given["adverts"][:4]})["why"]


def test_adverts_of_another_round_threshold_or_attempt_do_not_fit(federation):
    """All of them follow from the question, so a node that is asked otherwise signs for other
    terms."""
    (given, *_), _ = federation.given_to("share")
    others = {
        "round": 2, "run": "other", "nonce": "1" * 32, "plan": plan(multiplier=5.0).to_json(),
    }  # fmt: skip
    lowered = json.loads(plan().to_json())
    lowered["facts"]["shares"]["threshold"] = 5
    for values in (*({key: value} for key, value in others.items()), {"plan": json.dumps(lowered)}):
        asked = federation.ask(0, "advertise", **values)
        assert asked["ok"], asked
        answer = federation.ask(0, "share", given, **values)
        assert "not signed by its enrolled service for these terms" in answer["why"], values


@pytest.mark.parametrize("threshold", [3, 1])
def test_a_lowered_threshold_is_refused_with_the_plan(federation, threshold):
    """Two halves of the cohort could both reach it."""
    lowered = json.loads(plan().to_json())
    lowered["facts"]["shares"]["threshold"] = threshold
    answer = federation.ask(0, "advertise", plan=json.dumps(lowered))
    assert answer["code"] == "plan"
    assert "threshold" in answer["why"]


def test_another_plan_is_not_masked_for_the_terms_that_were_agreed(federation):
    given, _ = federation.given_to("mask")
    assert (
        "holds no keys"
        in federation.ask(0, "mask", given[0], plan=plan(multiplier=3.0).to_json())["why"]
    )
    assert federation.charges()[0] == 0


def test_another_runs_rounds_do_not_displace_what_was_prepared(federation):
    """Finished rounds hold no secrets, so they need not make room; a run has up to two open
    rounds."""
    (given, *_), _ = federation.given_to("mask")
    federation.ask(0, "advertise", round=2, nonce="1" * 32)
    run, own = "other", federation.nonce
    for number in range(1, 8):
        federation.nonce = str(number) * 32
        federation.whole(run=run, round=number)
    federation.nonce = own
    assert federation.ask(0, "mask", given)["ok"]


def ahead(federation, given, **changed):
    """The answers of node 0 to "mask", and to "advertise" of round 2, which is asked with it."""
    header = federation.question(0).header() | {"ask": "mask", "given": given}
    header["ahead"] = {"round": 2, "nonce": "1" * 32, "model": NO_MODEL, "given": {}} | changed
    answer, _ = federation.served.exchange(str(federation.folders[0].socket), header, local.BODY)
    return answer, answer.get("ahead", {})


def test_a_step_that_is_asked_ahead_gives_the_answer_that_it_gives_alone(federation):
    given, _ = federation.given_to("mask")
    answer, early = ahead(federation, given[0])
    assert (answer["ok"], early["ok"]) == (True, True)
    alone = federation.ask(0, "advertise", round=2, nonce="1" * 32, model=NO_MODEL)
    assert alone == early
    assert federation.charges() == [1, 0, 0, 0, 0]


def test_nothing_but_keys_and_shares_can_be_asked_ahead(federation):
    """And a further step that is refused does not spoil the one that it came with."""
    given, _ = federation.given_to("mask")
    for changed in ({"ask": "mask"}, {"ask": "release"}, {"ahead": {"round": 3}}):
        answer, early = ahead(federation, given[0], **changed)
        assert answer["ok"]
        assert early["said"].keys() == {"client", "sealing", "masking", "signature"}
    for changed in ({"round": -1}, {"client": 1}, {"what": 1}, {"plan": "{}"}):
        answer, early = ahead(federation, given[0], **changed)
        assert (answer["ok"], early["ok"]) == (True, False), changed
    assert federation.charges() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("step", ["advertise", "share", "agree", "release", "hello"])
def test_other_steps_bring_nothing_ahead(federation, step):
    header = federation.question(0).header() | {"ask": step, "ahead": {}}
    header |= {} if step == "release" else {"model": federation.question(0).model}
    body = local.BODY if step == "release" else b""
    answer, _ = federation.served.exchange(str(federation.folders[0].socket), header, body)
    assert (answer["ok"], answer["code"]) == (False, "malformed")
    assert federation.charges() == [0] * NODES


def test_a_budget_that_is_spent_is_refused_before_anything_is_made(federation):
    folder = federation.folders[0]
    federation.served.stop(folder)
    edit(folder, "releases = 1000 #", "releases = 1 #")
    federation.served.start(folder)
    federation.whole()
    federation.nonce = "3" * 32
    answers = {}
    run = federation.steps(round=2)
    step, client, call = next(run)
    while step != "mask":
        answers[step, client] = call()
        step, client, call = run.send(answers[step, client])
    assert call()["code"] == "budget-spent"
    assert federation.charges()[0] == 1, (
        "and a policy for one release carries one that costs its whole budget"
    )


@pytest.mark.parametrize(
    ("step", "given"),
    [
        ("share", {}),
        ("share", {"adverts": [1]}),
        ("share", {"adverts": {"0": 1}}),
        ("mask", {"sealed": [1]}),
        ("mask", {"sealed": {"x": "y"}}),
        ("mask", {"sealed": {"1": 5}}),
        ("mask", {"sealed": {"1": "AA", "01": "AA"}}),
        ("agree", {"answered": "all"}),
        ("agree", {}),
        ("unmask", {"signatures": None}),
    ],
)
def test_malformed_steps_are_refused(federation, step, given):
    federation.ask(0, "advertise")
    assert federation.ask(0, step, given)["code"] in ("malformed", "cohort")


def test_a_recorded_question_charges_nothing_twice_where_questions_are_signed(made, tmp_path):
    """Whoever has recorded an attempt's question can ask it again; with other adverts it would be
    another release."""
    server = Ed25519PrivateKey.generate()
    shutil.copytree(made, tmp_path / "n")
    folders = [local.NodeFolder(tmp_path / "n" / f"n{client}") for client in range(NODES)]
    for folder in folders:
        edit(folder, 'server_key = ""', f'server_key = "{public_text(server)}"')
    served = Served(folders)
    federation = SecureFederation(tmp_path, served)
    try:
        assert federation.ask(0, "advertise")["code"] == "unsigned"
        federation.whole(signer=server)
        for folder in folders:
            served.stop(folder)
            folder.rounds_file.unlink()  # the attempt is forgotten: new keys, another cohort
            served.start(folder)
        run = federation.steps(signer=server)
        step, _, call = next(run)
        while step != "mask":
            step, _, call = run.send(call())
        assert call()["code"] == "replayed"
        assert federation.charges() == [1] * NODES
    finally:
        served.close()


@pytest.mark.parametrize(
    "model", [NO_MODEL, protocol.sha256(local.BODY)], ids=["for keys", "with the model"]
)
def test_the_signature_of_a_question_serves_for_that_question_alone(made, tmp_path, model):
    """An attempt's question is signed twice; that for keys, before the model is known, never lets
    data be read."""
    server = Ed25519PrivateKey.generate()
    shutil.copytree(made, tmp_path / "n")
    folder = local.NodeFolder(tmp_path / "n" / "n0")
    edit(folder, 'server_key = ""', f'server_key = "{public_text(server)}"')
    served = Served([folder])
    try:
        question = replace(SecureFederation(tmp_path, served).question(0), model=model)
        bodies = {"": b"", "empty": frames.npy(np.zeros(0, np.float32)), "model": local.BODY}
        found = {}
        for step in (*STEPS, "release"):
            for named in ("", NO_MODEL, protocol.sha256(local.BODY)):
                header = (
                    question.header(server)
                    | {"ask": step, "given": {}}
                    | ({"model": named} if named else {})
                )
                for body, data in bodies.items():
                    answer, _ = served.exchange(str(folder.socket), header, data)
                    found[step, named == model, body] = "ok" if answer["ok"] else answer["code"]
        reached = {
            key
            for key, code in found.items()
            if code not in ("unsigned", "malformed", "model", "privacy")
        }
        wanted = {(step, True, "") for step in ("advertise", "share", "agree", "unmask")}
        brought = {(step, False, "model") for step in STEPS}
        assert reached - wanted <= (set() if model == NO_MODEL else brought)
        assert found["advertise", True, ""] == "ok"
        for changed in (
            {"round": 2},
            {"nonce": "2" * 32},
            {"run": "other"},
            {"plan": plan(multiplier=5.0).to_json()},
        ):
            header = question.header(server) | {"ask": "advertise", "model": model} | changed
            assert served.exchange(str(folder.socket), header, b"")[0]["code"] == "unsigned"
        assert not rows(folder)
    finally:
        served.close()


def test_a_policy_without_its_own_key_among_the_peers_is_refused_at_the_start(tmp_path):
    folder = make_nodes(tmp_path)[0]
    key = folder.public()["service_key"]
    edit(folder, key, public_text(Ed25519PrivateKey.generate()))
    with pytest.raises(
        ConfigError, match=r"distributed\.peers does not hold this node's service key as client 0"
    ):
        Service(folder)
    text = folder.policy_file.read_text()
    folder.policy_file.write_text(text[: text.rindex("[distributed]")])
    with pytest.raises(ConfigError, match=r"needs a section \[distributed\] with its peers"):
        folder.policy()


def test_the_ledger_holds_the_signed_sets(federation):
    federation.whole()
    folder = federation.folders[2]
    federation.served.stop(folder)
    with folder.ledger() as ledger:
        store = SessionStore(folder.rounds_file, ledger)
        cohort = store.session(terms_of(federation.question(2), plan()).digest).cohort
        survivors, signature = store.signed_survivors(cohort)
        assert survivors.valid(signature, federation.services[2])
        with pytest.raises(LedgerError):
            store.sign(replace(survivors, answered=(0, 1, 2, 3)), signature)
        assert store.signed_survivors(cohort)[0].answered == tuple(range(NODES))
        store.close()


def test_terms_follow_from_the_question(federation):
    agreed = terms_of(federation.question(0), plan())
    assert isinstance(agreed, Terms)
    assert (agreed.threshold, agreed.colluders, agreed.size, agreed.attempt) == (
        4,
        1,
        plan().size,
        "0" * 32,
    )
    assert agreed == terms_of(federation.question(3), plan()), (
        "nodes that are asked together have the same terms"
    )
