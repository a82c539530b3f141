"""Rounds of nodes whose server sees only sums: the simulation's integers, drops, void rounds, and
what they cost."""

from __future__ import annotations

import dataclasses
from base64 import b64encode

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedlgm import wire
from fedlgm.errors import ConfigError, Notice, RunError
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.privacy.ledger import Ledger
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol.frames import HEADER
from fedlgm_nodes.server import polling
from fedlgm_nodes.server.budgets import Need
from fedlgm_nodes.service.ask import Ask
from tests.support import secure_nodes
from tests.support.node_grids import QUICK
from tests.support.nodes import MODEL, WORK, edit, rows
from tests.support.secagg import explicit, use_ring
from tests.support.secure_nodes import NODES, THRESHOLD, WHOLE, plan


def silent(secure, drops):
    """Nodes whose service ends, as by `kill -9`, when it is asked a step."""
    exchange = secure.served.exchange

    def ending(path, header, body, **more):
        ask = Ask.model_validate(frames.parse_header(header.encode()))
        if drops.get(ask.client) == ask.ask:
            secure.served.stop(secure.folders[ask.client])
        return exchange(path, header, body, **more)

    return ending


def one_of_five_may_be_missing(secure):
    """Let the nodes agree to a sum of four; the secure steps of node 3."""
    for folder in secure.folders:
        secure.served.stop(folder)
        edit(folder, "min_cohort = 5", "min_cohort = 4")
        secure.served.start(folder)
    return secure.served.services[str(secure.folders[3].socket)]._secure


@pytest.mark.parametrize("accusers", [[0, 1, 2, 4], pytest.param([0], marks=pytest.mark.slow)])
def test_a_node_whose_shares_are_not_authentic_is_named_and_left_out_from_then_on(
    secure, monkeypatch, accusers
):
    """A round of five messages or three. One accuser is not enough, since one node may be on the
    server's side."""
    hostile = one_of_five_may_be_missing(secure)
    honest = hostile.answer

    def garbage(step, terms, given):
        said = honest(step, terms, given)
        if terms.round == 2 and step == "share":
            said["sealed"] |= {str(client): b64encode(bytes(160)).decode() for client in accusers}
        return said

    monkeypatch.setattr(hostile, "answer", garbage)
    secure.run(3)
    void = len(accusers) > 1
    assert [len(report.answered) for report in secure.reports] == [
        NODES,
        0 if void else 4,
        4 if void else NODES,
    ]
    lost = secure.reports[1].lost
    assert "client 3's shares for this node are not authentic" in lost["n0"]
    assert ("n3" in lost) == void
    if void:
        assert lost["n3"] == secure.reports[2].lost["n3"]
        assert any("round 2: n3 counts as zero: " in line for line in secure.lines)
    assert secure.charges() == ([2] * NODES if void else [2, 3, 3, 3, 3])


@pytest.mark.parametrize(
    "step", [pytest.param("advertise", marks=pytest.mark.slow), "share", "mask"]
)
def test_a_node_that_makes_its_answer_long_loses_its_own_place_alone(secure, monkeypatch, step):
    """What the server hands on to other nodes has to fit into their messages, also after they have
    been charged."""
    hostile = one_of_five_may_be_missing(secure)
    honest, longest = hostile.answer, []

    def padded(asked, terms, given):
        said = honest(asked, terms, given)
        if asked == step == "share":
            said["sealed"]["0"] += " " * 10_000  # as good in base 64 as without
        elif asked == step:
            said["signature"] += " " * 10_000  # as good in hexadecimal digits
        return said

    sent = hostile.sent

    exchange = secure.served.exchange

    def measuring(path, header, body, **more):
        longest.append(len(header))
        return exchange(path, header, body, **more)

    monkeypatch.setattr(hostile, "answer", padded)
    if step == "mask":
        monkeypatch.setattr(hostile, "sent", lambda terms: sent(terms) + " " * 10_000)
    monkeypatch.setattr(frames, "exchange", measuring)
    secure.run()
    assert secure.reports[0].answered == ["n0", "n1", "n2", "n4"]
    assert max(longest) < 10_000


@pytest.mark.parametrize("noise", ["discrete-gaussian", "skellam"])
def test_a_round_moves_the_model_and_charges_every_node_once(secure, noise):
    moved = secure.run(2, noise=noise)
    assert torch.linalg.norm(moved - MODEL) > 0.01
    assert [report.answered for report in secure.reports] == [
        [f"n{client}" for client in range(NODES)]
    ] * 2
    assert secure.charges() == [2] * NODES
    assert {row.trust for folder in secure.folders for row in rows(folder)} == {"distributed"}


def test_the_sum_is_that_of_the_nodes_own_words(secure, monkeypatch):
    """What the server opens is the sum of what the nodes put in before they masked it."""
    put_in = []
    for service in secure.served.services.values():
        make = service._releaser.words
        monkeypatch.setattr(
            service._releaser,
            "words",
            lambda *given, make=make: put_in.append(make(*given)) or put_in[-1],
        )
    total = secure.whole()
    assert len(put_in) == NODES
    np.testing.assert_array_equal(total, np.sum(put_in, axis=0, dtype=np.uint32))


def test_rounds_on_a_ring_of_neighbours(secure, monkeypatch):
    """Two of four others are neighbours. A node that drops out is in the masks of both; a void
    round says where."""
    one_of_five_may_be_missing(secure)
    use_ring(monkeypatch, explicit(1, 0, signers=0))
    sealed, exchange = [], secure.served.exchange

    def watched(path, header, body, **more):
        answer, numbers = exchange(path, header, body, **more)
        sealed.append(len(answer.get("said", {}).get("sealed", [])))
        return answer, numbers

    monkeypatch.setattr(frames, "exchange", watched)
    moved = secure.run(2)
    assert max(sealed) == 2
    assert torch.linalg.norm(moved - MODEL) > 0.01
    assert [len(report.answered) for report in secure.reports] == [NODES] * 2
    monkeypatch.setattr(frames, "exchange", silent(secure, {2: "mask"}))
    secure.run()
    assert secure.reports[-1].answered == ["n0", "n1", "n3", "n4"]
    use_ring(monkeypatch, explicit(1, 2, signers=0))
    secure.served.start(secure.folders[2])
    secure.run()
    assert any("is void" in line and "2 hold shares of the " in line for line in secure.lines)


@pytest.mark.parametrize(
    "step",
    [step if step == "mask" else pytest.param(step, marks=pytest.mark.slow) for step in WHOLE],
)
def test_a_node_that_drops_out_at_a_step(secure, monkeypatch, step):
    """The cohort needs all five nodes; from the second step on a sum of four is opened."""
    monkeypatch.setattr(frames, "exchange", silent(secure, {2: step}))
    if step == "advertise":
        with pytest.raises(RunError, match="the quorum is 4"):
            secure.run()
        assert secure.charges() == [0] * NODES
        return
    moved = secure.run()
    (report,) = secure.reports
    assert torch.linalg.norm(moved - MODEL) > 0.01
    in_sum = step == "unmask"  # its vector was there by then
    agreed = ["agree"] if step == "mask" else []
    assert [asked for _, asked in secure.asked()[0]] == [
        "advertise",
        "share",
        "mask",
        *agreed,
        "unmask",
    ]
    assert report.answered == [f"n{client}" for client in range(NODES) if client != 2 or in_sum]
    assert report.lost == ({} if in_sum else {"n2": report.lost["n2"]})
    assert secure.charges() == [1, 1, int(in_sum), 1, 1]


@pytest.mark.parametrize("step", WHOLE[:2])
def test_a_run_that_ends_before_any_node_is_charged_is_not_charged_either(
    secure, monkeypatch, step
):
    """The run's ledger counts the round once, with the attempt of the resumed run."""
    patience = dataclasses.replace(QUICK, give_up_seconds=0.5)
    with monkeypatch.context() as ending:
        ending.setattr(frames, "exchange", silent(secure, {2: step, 3: step}))
        with pytest.raises(RunError, match="resumes the run"):
            secure.run(1, secure.grid(patience))
    with Ledger(secure.ledger) as ledger:
        assert ledger.participations() == {}
    for client in (2, 3):
        secure.served.start(secure.folders[client])
    secure.run(1)
    with Ledger(secure.ledger) as ledger:
        assert ledger.participations() == dict.fromkeys(range(NODES), 1)
        assert not ledger.has_repeated_rounds()
    assert secure.charges() == [1] * NODES


def test_a_run_is_charged_before_nodes_are_asked_for_their_vectors(secure, monkeypatch):
    """A server that is killed then has the round on its ledger, whatever its nodes have
    released."""
    found, exchange = [], secure.served.exchange

    def looking(path, header, body, **more):
        ask = Ask.model_validate(frames.parse_header(header.encode()))
        with Ledger(secure.ledger) as ledger:
            found.append((ask.ask, ledger.rounds()))
        return exchange(path, header, body, **more)

    monkeypatch.setattr(frames, "exchange", looking)
    secure.run(2)
    charged = {(step, rounds) for step, rounds in found if step in WHOLE}
    assert charged == {
        ("advertise", 0),
        ("share", 0),
        ("mask", 1),
        ("unmask", 1),
        ("mask", 2),
        ("unmask", 2),
    }


@pytest.mark.parametrize("step", ["mask", "unmask"])
def test_more_nodes_than_a_sum_can_do_without_die_at_a_step_and_come_back(
    secure, monkeypatch, step
):
    """Their keys are on disk: the round waits for them, and nobody is charged twice."""
    ending, died = silent(secure, {1: step, 2: step, 3: step}), set()

    def coming_back(path, header, body, **more):
        ask = Ask.model_validate(frames.parse_header(header.encode()))
        if (ask.client, ask.ask) in died:
            return secure.served.exchange(path, header, body, **more)
        if ask.ask == step and ask.client in (1, 2, 3):
            died.add((ask.client, ask.ask))
            with pytest.raises(RunError):
                ending(path, header, body, **more)
            secure.served.start(secure.folders[ask.client])
            raise RunError("killed")
        return secure.served.exchange(path, header, body, **more)

    monkeypatch.setattr(frames, "exchange", coming_back)
    monkeypatch.setattr(polling, "_LOOK_S", 0.01)
    secure.run()
    assert len(died) == 3
    assert secure.reports[0].answered == [f"n{client}" for client in range(NODES)]
    assert secure.charges() == [1] * NODES


@pytest.mark.slow
@pytest.mark.parametrize("step", ["mask", "agree", "unmask"])
def test_below_the_threshold_a_round_is_void_and_stays_charged(secure, monkeypatch, step):
    drops = {1: "mask" if step == "agree" else step, 2: step}
    monkeypatch.setattr(frames, "exchange", silent(secure, drops))
    moved = secure.run(1, secure.grid(dataclasses.replace(QUICK, give_up_seconds=1.0)))
    torch.testing.assert_close(moved, MODEL, rtol=0, atol=0)
    assert secure.reports[0].answered == []
    assert any("round 1 is void" in line for line in secure.lines)
    assert secure.charges() == [1, int(drops[1] != "mask"), int(step != "mask"), 1, 1]


def test_a_round_for_fewer_nodes_than_the_threshold_asks_none(secure, monkeypatch):
    """Caps leave out nodes for good, so to end the run would leave it without a way on; a
    simulation goes on, too."""
    shares, sampling = Shares(3, 1), Sampling("fixed", NODES, 0.8)
    capped = RunFacts(
        4.0,
        sampling,
        "replace-one",
        "distributed",
        4,
        accountant="rdp",
        max_participations=2,
        shares=shares,
    )
    monkeypatch.setattr(secure_nodes, "facts", lambda: capped)
    one_of_five_may_be_missing(secure)
    with pytest.warns(Notice, match="are not invited again"):
        secure.run(4)
    assert [len(report.answered) for report in secure.reports] == [4, 4, 0, 0]
    assert sum(secure.charges()) == 8
    assert {number for asked in secure.asked().values() for number, _ in asked} == {1, 2}
    assert any(
        line.startswith("round 3 is void and leaves the model unchanged: it asks ")
        for line in secure.lines
    )


def test_too_few_nodes_before_anything_is_charged_end_the_run(secure):
    secure.link.offline = {0, 1}
    with pytest.raises(
        RunError,
        match=rf"3 of 5 nodes answered, but the quorum is {THRESHOLD} \(distributed.threshold\)",
    ):
        secure.run(1, secure.grid(dataclasses.replace(QUICK, give_up_seconds=0.5)))
    assert secure.charges() == [0] * NODES


@pytest.mark.parametrize(
    ("step", "said", "why"),
    [
        (
            "advertise",
            {"client": 1, "sealing": "00" * 32, "masking": "11" * 32, "signature": ""},
            "2 t > n|4 for 3",
        ),
        ("share", {"sealed": {}, "commitment": ""}, "3 nodes shared secrets, 4 are needed"),
    ],
)
def test_hostile_nodes_before_anything_is_charged_end_the_run_too(
    secure, monkeypatch, step, said, why
):
    for folder in secure.folders[1:3]:
        steps = secure.served.services[str(folder.socket)]._secure
        honest = steps.answer
        monkeypatch.setattr(
            steps,
            "answer",
            lambda asked, *given, honest=honest: said if asked == step else honest(asked, *given),
        )
    with pytest.raises(RunError, match=why):
        secure.run()
    assert secure.charges() == [0] * NODES


@pytest.mark.slow
def test_another_attempt_is_another_release_with_other_noise(secure):
    first = secure.run()
    secure.ledger.unlink()
    again = secure.run()
    assert secure.charges() == [2] * NODES
    assert torch.linalg.norm(first - again) > 0.01
    names = [[row.request for row in rows(folder)] for folder in secure.folders]
    assert all(one != other for one, other in names)


@pytest.mark.slow
def test_a_relay_that_alters_answers_loses_its_node_alone(secure):
    def altered(client, message, reply):
        header = frames.parse_header(str(reply.config_records[wire.CONFIG][HEADER]).encode())
        if client != 3 or "said" not in header or "sealed" not in header["said"]:
            return reply
        text = str(reply.config_records[wire.CONFIG][HEADER]).replace(
            '"commitment": "', '"commitment": "0'
        )
        changed = RecordDict({wire.CONFIG: reply.config_records[wire.CONFIG]})
        changed.config_records[wire.CONFIG][HEADER] = text
        return changed

    secure.link.fault = altered
    secure.run()
    assert secure.reports[0].answered == ["n0", "n1", "n2", "n4"]
    assert "not signed by its enrolled service" in secure.reports[0].lost["n3"]


@pytest.mark.parametrize(
    ("old", "new", "options", "why"),
    [
        ("min_cohort = 5", "min_cohort = 6", {}, "takes part in sums of min_cohort = 6"),
        ("max_colluders = 1", "max_colluders = 2", {}, "this node wants max_colluders = 2"),
        (
            'trust = ["distributed"]',
            'trust = ["local"]',
            {},
            "a plan for distributed trust; allowed: local",
        ),
        (
            "epsilon = 8.0",
            "epsilon = 0.1",
            {},
            "nothing left for such a run: 10 more releases would bring",
        ),
    ],
)
def test_what_a_policy_does_not_allow_is_said_before_anything_is_charged(
    secure, old, new, options, why
):
    for folder in secure.folders:
        secure.served.stop(folder)
        edit(folder, old, new)
        secure.served.start(folder)
    need = Need("run", WORK, plan(**options).to_json(), 10)
    with pytest.raises(ConfigError, match=why):
        secure.grid().require(need, 2.0)
    assert secure.charges() == [0] * NODES
