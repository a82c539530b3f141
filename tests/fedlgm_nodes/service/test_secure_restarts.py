"""The five steps at a node's service that dies at any point, or is started with older files."""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import pytest

from fedlgm.errors import LedgerError, RunError
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.secagg.cohort import Advert, key_pairs
from fedlgm_nodes.secagg.steps import terms_of
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.secagg.store import SessionStore
from fedlgm_nodes.service.service import Service
from tests.support import nodes as local
from tests.support.secure_nodes import NODES, plan


def copied(federation, folder, source, target):
    """Copy a file while the node's service is down."""
    federation.served.stop(folder)
    shutil.copyfile(source, target)
    federation.served.start(folder)


@pytest.mark.slow
@pytest.mark.parametrize("directly", [False, True])
def test_every_step_can_be_asked_again_after_a_restart(federation, directly):
    run, answers = federation.steps(directly=directly), {}
    step, client, call = next(run)
    while True:
        answers[step, client] = call()
        federation.restart(client)
        again = call()
        assert all(again.get(key) == answers[step, client].get(key) for key in ("said", "sent"))
        np.testing.assert_array_equal(
            again.get("words", ()), answers[step, client].get("words", ())
        )
        try:
            step, client, call = run.send(answers[step, client])
        except StopIteration:
            break
    assert federation.charges() == [1] * NODES
    assert all(answers["mask", client]["replayed"] is False for client in range(NODES))


class Killed(BaseException):
    """As if the process had ended here."""


WRITES = {
    "advertise": [(SessionStore, "open")],
    "share": [(NodeLedger, "agree"), (SessionStore, "keep")],
    "mask": [
        (NodeLedger, "charge"),
        (SessionStore, "keep"),
        (NodeLedger, "answer"),
    ],
    "agree": [(NodeLedger, "agree")],
    "unmask": [(SessionStore, "keep")],
}


DIRECTLY = WRITES | {"unmask": [*WRITES["agree"], *WRITES["unmask"]]}


@pytest.mark.parametrize("writes", [WRITES, DIRECTLY], ids=["agreed", "directly"])
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_crash_at_every_write(federation, monkeypatch, when, writes):
    """The service of client 1 dies before or after each write; started again it goes on, charged
    once."""
    run, died = federation.steps(directly=writes is DIRECTLY), []
    step, client, call = next(run)
    while True:
        for owner, name in writes[step] if client == 1 else ():
            original = getattr(owner, name)

            def dying(*args, original=original, **options):
                if when == "after":
                    original(*args, **options)
                raise Killed

            with monkeypatch.context() as fault:
                fault.setattr(owner, name, dying)
                with pytest.raises(Killed):
                    call()
            died.append((step, name))
            federation.restart(client)
        answer = call()
        assert answer["ok"], answer
        try:
            step, client, call = run.send(answer)
        except StopIteration:
            break
    assert len(died) == 8
    assert federation.charges() == [1] * NODES
    refused = federation.ask(1, "agree", {"answered": [0, 1, 2, 3]})
    assert "another set" in refused["why"]


@pytest.mark.slow
@pytest.mark.parametrize("writes", [WRITES, DIRECTLY], ids=["agreed", "directly"])
def test_kill_9_after_every_write(federation, writes):
    """As above, with the service of client 1 in processes that are killed."""
    folder, run, died = federation.folders[1], federation.steps(directly=writes is DIRECTLY), 0
    federation.served.stop(folder)
    step, client, call = next(run)
    while True:
        for owner, name in writes[step] if client == 1 else ():
            process = local.NodeProcess(folder, local.die_around(owner, name, after=True))
            with pytest.raises(RunError):
                call()
            process.wait()
            died += 1
        with local.served(folder) if client == 1 else contextlib.nullcontext():
            answer = call()
        assert answer["ok"], answer
        try:
            step, client, call = run.send(answer)
        except StopIteration:
            break
    assert died == 8
    assert federation.charges() == [1] * NODES
    with local.served(folder):
        assert "another set" in federation.ask(1, "agree", {"answered": [0, 1, 2, 3]})["why"]


def test_one_set_of_survivors_for_ever_even_if_the_sessions_are_restored(federation):
    """A copy of the session store from before the signature: the ledger knows the set, and its
    witness the ledger."""
    federation.whole(until="agree")
    folder = federation.folders[0]
    federation.served.stop(folder)
    kept = folder.path.with_name("kept")
    shutil.copytree(folder.path, kept)
    federation.served.start(folder)
    assert federation.ask(0, "agree", {"answered": [0, 1, 2, 3, 4]})["ok"]
    copied(federation, folder, kept / "state/rounds.sqlite", folder.rounds_file)
    assert "another set" in federation.ask(0, "agree", {"answered": [0, 1, 2, 3]})["why"]
    federation.served.stop(folder)
    for file in (kept / "state").glob("ledger.sqlite*"):
        shutil.copyfile(file, folder.path / "state" / file.name)
    with pytest.raises(
        LedgerError, match="rolled back: it has 1 agreements in secure sums, but its witness saw 2"
    ):
        Service(folder)


def test_a_node_that_unmasked_at_once_agrees_to_no_other_set_even_if_its_sessions_are_restored(
    federation,
):
    """The server claims a drop-out afterwards: the other nodes sign a smaller set, which this node
    does not unmask."""
    answers = federation.whole(until="agree")
    folder, sent = federation.folders[0], {str(c): answers["mask", c]["sent"] for c in range(NODES)}
    kept = folder.path / "kept.sqlite"
    copied(federation, folder, folder.rounds_file, kept)
    shares = federation.ask(0, "unmask", {"signatures": sent})["said"]
    copied(federation, folder, kept, folder.rounds_file)
    smaller = [0, 1, 2, 3]
    assert "accepted another set" in federation.ask(0, "agree", {"answered": smaller})["why"]
    signed = {
        str(c): federation.ask(c, "agree", {"answered": smaller})["said"]["signature"]
        for c in smaller[1:]
    }
    assert "4 are needed" in federation.ask(0, "unmask", {"signatures": signed})["why"]
    assert (
        "4 are needed"
        in federation.ask(1, "unmask", {"signatures": signed | {"0": sent["0"]}})["why"]
    )
    assert federation.ask(0, "unmask", {"signatures": sent})["said"] == shares


def test_keys_serve_one_cohort_even_if_the_sessions_are_restored(federation):
    """A node that "dropped out" of one cohort has its masking key opened, which would show its
    vector in another."""
    given, _ = federation.given_to("share")
    folder, peer = federation.folders[0], federation.folders[4]
    federation.served.stop(folder)
    kept = folder.path.with_name("kept")
    shutil.copytree(folder.path, kept)
    federation.served.start(folder)
    assert federation.ask(0, "share", given[0])["ok"]
    copied(federation, folder, kept / "state/rounds.sqlite", folder.rounds_file)
    terms = terms_of(federation.question(0), plan())
    newer = Advert.make(
        terms, 4, peer.signer(), *key_pairs()
    ).values()  # of a peer that has lost its session
    other = {"adverts": [*given[0]["adverts"][:4], newer]}
    assert "with another cohort" in federation.ask(0, "share", other)["why"]
    assert federation.ask(0, "share", given[0])["ok"]
    federation.served.stop(folder)
    for file in (kept / "state").glob("ledger.sqlite*"):
        shutil.copyfile(file, folder.path / "state" / file.name)
    with pytest.raises(LedgerError, match="rolled back: it has 0 agreements"):
        Service(folder)


def test_a_restored_session_store_masks_nothing_again(federation):
    given, _ = federation.given_to("mask")
    folder = federation.folders[0]
    kept = folder.path / "kept.sqlite"
    copied(federation, folder, folder.rounds_file, kept)
    assert federation.ask(0, "mask", given[0])["ok"]
    copied(federation, folder, kept, folder.rounds_file)
    fewer = {"sealed": {str(client): given[0]["sealed"][str(client)] for client in (1, 2, 3)}}
    for again in (given[0], fewer):
        assert federation.ask(0, "mask", again)["code"] == "gone"
    assert federation.charges()[0] == 1


def masks_another_model(federation, given):
    """The code of node 0's refusal, and the size of its body, if it is asked for the vector of
    another model."""
    other = frames.npy(local.MODEL.numpy() + np.float32(1))
    header = federation.question(0, model=protocol.sha256(other)).header() | {
        "ask": "mask",
        "given": given,
    }
    answer, numbers = federation.served.exchange(str(federation.folders[0].socket), header, other)
    return answer.get("code"), len(numbers)


@pytest.mark.parametrize("restored", [False, True])
def test_a_cohort_masks_the_vector_of_one_model_even_if_the_sessions_are_restored(
    federation, restored
):
    """Keys are exchanged before the model is known. Two vectors under the same masks would show
    their difference."""
    given, _ = federation.given_to("mask")
    folder = federation.folders[0]
    kept = folder.path / "kept.sqlite"
    copied(federation, folder, folder.rounds_file, kept)
    assert federation.ask(0, "mask", given[0])["ok"]
    if restored:
        copied(federation, folder, kept, folder.rounds_file)
    assert masks_another_model(federation, given[0]) == ("gone", 0)
    assert federation.charges()[0] == 1


@pytest.mark.parametrize("write", ["charge", "answer"])
def test_a_crash_does_not_free_a_cohort_for_another_model(federation, monkeypatch, write):
    """Else the node is charged twice, and signs the vector of one model as its answer for the
    other."""
    given, _ = federation.given_to("mask")
    original = getattr(NodeLedger, write)

    def dying(*args, **options):
        original(*args, **options)
        raise Killed

    with monkeypatch.context() as fault:
        fault.setattr(NodeLedger, write, dying)
        with pytest.raises(Killed):
            federation.ask(0, "mask", given[0])
    federation.restart(0)
    assert masks_another_model(federation, given[0]) == ("gone", 0)
    assert federation.ask(0, "mask", given[0])["ok"]
    assert federation.charges()[0] == 1
