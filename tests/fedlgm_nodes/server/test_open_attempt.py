"""A server that is killed in a secure sum: the round continues free of charge, or its nodes are
charged once more."""

from __future__ import annotations

import dataclasses
import json
import stat
from functools import cache

import pytest
import torch

from fedlgm.errors import RunError
from fedlgm.privacy.ledger import Ledger
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.server.open_attempt import AttemptFile, LostAttempt
from fedlgm_nodes.service.ask import Ask
from fedlgm_nodes.service.training_process import TrainingProcess
from tests.support.node_grids import QUICK
from tests.support.nodes import WORK, edit, rows
from tests.support.secure_nodes import NODES, SecureFederation, Served, make_nodes, plan

ROUNDS = 3


class Killed(BaseException):
    """As if the server's process had ended here."""


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Five nodes with known noise, of which a sum needs four."""
    served = Served(make_nodes(tmp_path, test_seed=7, min_cohort=4))
    monkeypatch.setattr(frames, "exchange", served.exchange)
    yield SecureFederation(tmp_path, served)
    served.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The model of a run of such nodes that nothing interrupts; some may not be in the sum of round
    2."""

    @cache
    def model(*missing):
        path = tmp_path_factory.mktemp("whole")
        served = Served(make_nodes(path, test_seed=7, min_cohort=4))
        with pytest.MonkeyPatch.context() as patch:
            secure = SecureFederation(path, served)
            patch.setattr(
                frames,
                "exchange",
                at(secure, lambda ask: _gone(ask.client in missing and ask.round == 2)),
            )
            moved = secure.run(ROUNDS, secure.grid(test=True))
        served.close()
        return moved

    return model


def _gone(true):
    if true:
        raise RunError("its service is gone")


def at(secure, before=lambda ask: None, after=lambda ask: None):
    """An exchange that calls these around each question."""

    def exchange(path, header, body, **more):
        ask = Ask.model_validate(frames.parse_header(header.encode()))
        before(ask)
        answer = secure.served.exchange(path, header, body, **more)
        after(ask)
        return answer

    return exchange


def killed(secure, monkeypatch, round_, step, client=2, before=lambda ask: None, patience=QUICK):
    """A run whose server is killed once this client has answered this step."""

    def kill(ask):
        if (ask.round, ask.ask, ask.client) == (round_, step, client):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(frames, "exchange", at(secure, before, kill))
        with pytest.raises(Killed):
            secure.run(ROUNDS, secure.grid(patience, test=True))


def resumed(secure, patience=QUICK):
    secure.lines.clear()
    return secure.run(ROUNDS, secure.grid(patience, test=True), resume=True)


def rounds_charged(secure):
    """Rounds on each node's ledger, and on the run's."""
    with Ledger(secure.ledger) as ledger:
        of_run = [charge.round for charge in ledger.charges()]
    return [[row.round for row in rows(folder)] for folder in secure.folders], of_run


def forget_sessions(secure, *clients):
    for client in clients:
        secure.served.stop(secure.folders[client])
        secure.folders[client].rounds_file.unlink()
        secure.served.start(secure.folders[client])


ONCE = list(range(1, ROUNDS + 1))


@pytest.mark.parametrize(
    ("round_", "step", "client"),
    [
        (1, "advertise", 2),
        (1, "share", 2),
        (1, "share", NODES - 1),
        (2, "mask", 0),
        (2, "mask", NODES - 1),
        (2, "unmask", 0),
        (2, "unmask", NODES - 1),
    ],
)
def test_a_killed_server_continues_its_round_and_nobody_is_charged_twice(
    known, monkeypatch, uninterrupted, round_, step, client
):
    made, make = [], TrainingProcess.words
    monkeypatch.setattr(
        TrainingProcess, "words", lambda self, *given: made.append(self) or make(self, *given)
    )
    killed(known, monkeypatch, round_, step, client)
    for restarted in range(NODES):
        known.restart(restarted)
    moved = resumed(known)
    assert rounds_charged(known) == ([ONCE] * NODES, sorted(ONCE * NODES))
    assert len(made) == ROUNDS * NODES  # a vector is made once, and leaves again as it was
    assert any("continues where it was interrupted" in line for line in known.lines) == (
        step in ("mask", "unmask")
    )
    torch.testing.assert_close(moved, uninterrupted(), rtol=0, atol=0)
    assert not known.attempt.exists()


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_server_that_is_killed_before_the_row_of_a_round_that_it_has_opened(
    known, monkeypatch, uninterrupted, kills
):
    for _ in range(kills):
        grid = known.grid(test=True)

        def report(report):
            if report.round == 2:
                raise Killed

        grid._on_round = report
        with pytest.raises(Killed):
            known.run(ROUNDS, grid, resume=True)
    torch.testing.assert_close(resumed(known), uninterrupted(), rtol=0, atol=0)
    assert rounds_charged(known) == ([ONCE] * NODES, sorted(ONCE * NODES))


@pytest.mark.parametrize("step", ["agree", "unmask"])
def test_a_fixed_set_of_survivors_stays_when_a_lost_node_comes_back(
    known, monkeypatch, uninterrupted, step
):
    """Another set would be a second sum of one attempt, which the nodes refuse."""
    killed(known, monkeypatch, 2, step, before=lambda ask: _gone((ask.round, ask.client) == (2, 3)))
    moved = resumed(known)
    torch.testing.assert_close(moved, uninterrupted(3), rtol=0, atol=0)
    of_nodes, _ = rounds_charged(known)
    assert of_nodes == [ONCE, ONCE, ONCE, [1, 3], ONCE]
    assert [report.answered for report in known.reports if report.round == 2] == [
        ["n0", "n1", "n2", "n4"]
    ]


def test_before_the_set_is_fixed_a_lost_node_may_come_back(known, monkeypatch, uninterrupted):
    killed(
        known,
        monkeypatch,
        2,
        "mask",
        2,
        before=lambda ask: _gone((ask.round, ask.client) == (2, 1)),
    )
    torch.testing.assert_close(resumed(known), uninterrupted(), rtol=0, atol=0)
    assert rounds_charged(known)[0] == [ONCE] * NODES


@pytest.mark.parametrize("step", ["mask", "unmask"])
def test_one_node_that_has_lost_its_keys_is_left_out(known, monkeypatch, step):
    killed(known, monkeypatch, 2, step, NODES - 1)
    forget_sessions(known, 3)
    resumed(known)
    (report,) = [report for report in known.reports if report.round == 2]
    assert len(report.answered) == (4 if step == "mask" else NODES)  # its vector was there by then
    assert rounds_charged(known)[0] == [ONCE] * NODES


def given_up(secure, why):
    """The round begins again with another identity, as a deployment's server does it."""
    asked, lines = secure.charges(), len(secure.reports)
    grid = secure.grid(test=True)
    with pytest.raises(
        LostAttempt, match=f"{why}.*it begins again, and its nodes are charged once more"
    ):
        secure.run(ROUNDS, grid, resume=True)
    assert secure.charges() == asked
    assert len(secure.reports) == lines
    grid.file.give_up()
    assert not secure.attempt.exists()
    return resumed(secure)


def test_too_few_nodes_with_their_keys_begin_another_attempt_and_charge_nothing_for_the_first(
    known, monkeypatch
):
    killed(known, monkeypatch, 2, "mask", 1)
    forget_sessions(known, 0, 3)
    given_up(known, "too few nodes still have its keys; client 0: it has made other keys; client 3")
    twice = [1, 2, 2, 3]
    of_nodes, of_run = rounds_charged(known)
    assert of_nodes == [twice, twice, ONCE, ONCE, ONCE]
    assert of_run == sorted(twice * NODES)  # the run cannot know which nodes made a vector
    assert [len(report.answered) for report in known.reports] == [NODES] * ROUNDS


@pytest.mark.parametrize("field", ["model", "plan", "clients", "round"])
def test_an_attempt_for_something_else_is_not_continued(known, monkeypatch, field):
    killed(known, monkeypatch, 2, "mask", 1)
    kept = json.loads(known.attempt.read_text())
    other = {"model": "0" * 64, "plan": "{}", "clients": [0, 1, 2, 3], "round": 3}
    known.attempt.write_text(json.dumps(kept | {field: other[field]}))
    given_up(known, "its round, plan, model or nodes are no longer those")


def test_an_attempt_of_a_node_that_was_enrolled_anew_is_not_continued(known, monkeypatch):
    killed(known, monkeypatch, 2, "mask", 1)
    kept = json.loads(known.attempt.read_text())
    kept["adverts"]["3"]["signature"] = "0" * 128
    known.attempt.write_text(json.dumps(kept))
    given_up(
        known, "its cohort is no longer complete; client 3: the advert of client 3 was not signed"
    )


def test_nodes_that_are_not_back_end_the_run_and_the_attempt_is_kept(
    known, monkeypatch, uninterrupted
):
    killed(known, monkeypatch, 2, "mask", 3)
    for client in (0, 3):
        known.served.stop(known.folders[client])
    with pytest.raises(RunError, match=r"3 of 5 nodes answered.*resumes the run"):
        resumed(known, dataclasses.replace(QUICK, give_up_seconds=0.5))
    for client in (0, 3):
        known.served.start(known.folders[client])
    torch.testing.assert_close(resumed(known), uninterrupted(), rtol=0, atol=0)
    assert rounds_charged(known) == ([ONCE] * NODES, sorted(ONCE * NODES))


def test_nodes_refuse_a_second_set_of_survivors_and_other_keys_of_a_stored_attempt(
    known, monkeypatch
):
    """A hostile server has the file, and claims a drop-out or asks with other adverts, in every
    order."""
    killed(known, monkeypatch, 2, "unmask", 1)
    kept = AttemptFile(known.attempt).found
    assert kept is not None
    assert sorted(kept.sent) == list(range(NODES))
    known.nonce = kept.nonce

    def ask(client, step, given):
        return known.ask(client, step, given, round=2, plan=kept.plan, model=kept.model)

    smaller = [0, 1, 2, 3]
    signed = {c: ask(c, "agree", {"answered": smaller}) for c in smaller}
    assert "accepted another set" in signed[0]["why"]  # these two have unmasked
    assert "accepted another set" in signed[1]["why"]
    proofs = {str(c): signed[c]["said"]["signature"] for c in (2, 3)}  # these had accepted no set
    for client in range(NODES):
        refused = ask(client, "unmask", {"signatures": proofs})
        assert refused["code"] == "cohort"
    sent = {str(client): signature for client, signature in kept.sent.items()}
    for client in (2, 3):
        assert "4 are needed" in ask(client, "unmask", {"signatures": sent | proofs})["why"]
    fewer = [advert for client, advert in kept.adverts.items() if client != 4]
    for client in smaller:
        assert "with another cohort" in ask(client, "share", {"adverts": fewer})["why"]
        assert "another set of members" in _mask(known, kept, client)["why"]
    assert known.charges() == [2] * NODES


def _mask(known, kept, client):
    """A node's answer to "mask" for other members than those of the attempt."""
    fewer = {str(by): kept.shared[by][0][client] for by in range(4) if by != client}
    body = frames.npy(known.transcript.models[-1].numpy())
    question = known.question(client, round=2, plan=kept.plan, model=kept.model)
    header = question.header() | {"ask": "mask", "given": {"sealed": fewer}}
    return known.served.exchange(str(known.folders[client].socket), header, body)[0]


def test_another_question_for_a_stored_attempt_releases_nothing(known, monkeypatch):
    """Of another run, plan or work it is another attempt; of another model another vector, which
    has no masks."""
    killed(known, monkeypatch, 2, "mask", NODES - 1)
    kept = AttemptFile(known.attempt).found
    assert kept is not None
    sealed = {str(by): kept.shared[by][0][0] for by in range(1, NODES)}
    same = {"run": "run", "round": 2, "plan": kept.plan, "work": WORK, "nonce": kept.nonce}
    body, other = (
        frames.npy(known.transcript.models[-1].numpy()),
        frames.npy(known.transcript.models[0].numpy()),
    )
    for changed, sent, code in (
        ({"run": "other"}, body, "cohort"),
        ({"round": 3}, body, "cohort"),
        ({"plan": plan(multiplier=8.0).to_json()}, body, "cohort"),
        ({"nonce": "0" * 32}, body, "cohort"),
        ({}, other, "gone"),
    ):
        asked = same | changed
        question = Question(
            asked["run"],
            asked["round"],
            0,
            asked["plan"],
            "",
            asked["work"],
            asked["nonce"],
            known.services[0],
        )
        header = question.header() | {"ask": "mask", "given": {"sealed": sealed}}
        answer, numbers = known.served.exchange(str(known.folders[0].socket), header, sent)
        assert (answer["code"], len(numbers)) == (code, 0)
    assert known.charges() == [2] * NODES


def test_the_file_is_private_there_when_it_is_needed_and_holds_no_shares_that_open_anything(
    known, monkeypatch
):
    found = []

    def look(ask):
        text = known.attempt.read_text() if known.attempt.exists() else ""
        found.append((ask.round, ask.ask, text))
        if text:
            assert stat.S_IMODE(known.attempt.stat().st_mode) == 0o600

    monkeypatch.setattr(frames, "exchange", at(known, look))
    known.run(2, known.grid(test=True))
    assert not known.attempt.exists()
    for round_, step, text in found:
        if step in ("advertise", "share"):
            assert not text
        elif step in ("mask", "unmask"):
            kept = json.loads(text)
            assert (kept["round"], bool(kept["sent"]), bool(kept["total"])) == (
                round_,
                step == "unmask",
                step == "unmask",
            )
    texts = "".join(text for *_, text in found)
    for service in known.served.services.values():
        for (state,) in service._secure._store._db.execute("SELECT state FROM sessions"):
            session = json.loads(state)
            secrets = [
                session["seed"],
                session["masking"],
                session["sealing"],
                *session["revealed"].values(),
            ]
            assert not [secret for secret in secrets if secret and secret in texts]


def test_a_damaged_file_is_named(known):
    known.attempt.parent.mkdir()
    known.attempt.write_text('{"round": 1}')
    with pytest.raises(
        RunError,
        match=r"the open attempt .*attempt.json is damaged .*: delete it, .*charged once more",
    ):
        known.grid()


@pytest.mark.slow
def test_rounds_below_the_threshold_stay_void_after_a_kill(known, monkeypatch):
    """Nodes that keep silent after the charge: the round is void whether or not the server was
    killed in between."""
    killed(known, monkeypatch, 2, "mask", NODES - 1)
    patience = dataclasses.replace(QUICK, give_up_seconds=1.0)
    monkeypatch.setattr(
        frames,
        "exchange",
        at(
            known,
            lambda ask: _gone(ask.ask == "unmask" and ask.round == 2 and ask.client in (0, 1)),
        ),
    )
    resumed(known, patience)
    assert [len(report.answered) for report in known.reports] == [NODES, 0, NODES]
    assert rounds_charged(known) == ([ONCE] * NODES, sorted(ONCE * NODES))


def test_refusals_begin_nothing_again(known, monkeypatch, uninterrupted):
    """Relays can forge them, and nodes whose policies refuse the run would refuse another attempt,
    too."""
    killed(known, monkeypatch, 2, "mask", 1)
    for old, new in (
        ("max_colluders = 1", "max_colluders = 2"),
        ("max_colluders = 2", "max_colluders = 1"),
    ):
        for folder in known.folders[2:4]:
            known.served.stop(folder)
            edit(folder, old, new)
            known.served.start(folder)
        if new == "max_colluders = 2":
            charged = known.charges()
            with pytest.raises(
                RunError, match=r"wants max_colluders = 2.*meets the same refusals"
            ) as refused:
                resumed(known)
            assert not isinstance(refused.value, LostAttempt)
            assert known.charges() == charged
    torch.testing.assert_close(resumed(known), uninterrupted(), rtol=0, atol=0)
    assert rounds_charged(known) == ([ONCE] * NODES, sorted(ONCE * NODES))
