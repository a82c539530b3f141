"""Rounds of nodes whose server sees only sums: the simulation's integers, drops, void rounds, and what they cost."""

from __future__ import annotations

import dataclasses
import json
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from clients.node.ask import Ask
from clients.node.policy import Refusal
from fedlgm import node_protocol as protocol
from fedlgm import wire
from fedlgm.errors import ConfigError, RunError
from fedlgm.node_protocol import HEADER
from fedlgm.secagg.cohort import Advert
from fedlgm.secagg.steps import STEPS
from strategies.node import polling, secure_grid
from strategies.node.budgets import Need
from strategies.node.questions import NodeQuestions
from tests.support.node_grids import QUICK
from tests.support.nodes import MODEL, WORK, edit, rows
from tests.support.secure_nodes import NODES, THRESHOLD, SecureFederation, Served, make_nodes, plan


@pytest.fixture
def federation(tmp_path, monkeypatch):
    served = Served(make_nodes(tmp_path))
    monkeypatch.setattr(protocol, "exchange", served.exchange)
    yield SecureFederation(tmp_path, served)
    served.close()


def charges(federation):
    return [len(rows(folder)) for folder in federation.folders]


def silent(federation, drops):
    """Nodes whose service ends, as by `kill -9`, when it is asked a step."""
    exchange = federation.served.exchange

    def ending(path, header, body, **more):
        ask = Ask.model_validate(protocol.parse_header(header.encode()))
        if drops.get(ask.client) == ask.ask:
            federation.served.stop(federation.folders[ask.client])
        return exchange(path, header, body, **more)

    return ending


def steps_of(federation):
    """Steps that each message to a node asked, by client."""
    asked = {client: [] for client in range(NODES)}
    for client, message in federation.link.sent:
        header = protocol.parse_header(str(message.content.config_records[wire.CONFIG][HEADER]).encode())
        if header["ask"] in STEPS:
            asked[client].append((header["round"], header["ask"]))
    federation.link.sent.clear()
    return asked


WHOLE = ("advertise", "share", "mask", "unmask")
SHORT = WHOLE[2:]


def of_round(number, *steps):
    return [(number, step) for step in steps or WHOLE]


def test_the_next_rounds_keys_and_shares_travel_with_this_ones_last_messages(federation):
    federation.run(3)
    assert [report.answered for report in federation.reports] == [[f"n{client}" for client in range(NODES)]] * 3
    expected = of_round(1) + of_round(2, *SHORT) + of_round(3, *SHORT)
    assert steps_of(federation) == dict.fromkeys(range(NODES), expected)
    assert charges(federation) == [3] * NODES


def test_a_service_that_is_started_again_between_rounds_keeps_what_was_prepared(federation, monkeypatch):
    exchange = federation.served.exchange

    def started_again(path, header, body, **more):
        if Ask.model_validate(protocol.parse_header(header.encode())).ask == "mask":
            folder = next(one for one in federation.folders if str(one.socket) == path)
            federation.served.stop(folder)
            federation.served.start(folder)
        return exchange(path, header, body, **more)

    monkeypatch.setattr(protocol, "exchange", started_again)
    federation.run(2)
    assert steps_of(federation)[0] == of_round(1) + of_round(2, *SHORT)
    assert federation.reports[1].answered == [f"n{client}" for client in range(NODES)]


@pytest.mark.parametrize("spoilt", ["advertise", "share"])
def test_a_round_that_one_node_has_not_prepared_starts_from_its_first_step(federation, monkeypatch, spoilt):
    secure = federation.served.services[str(federation.folders[2].socket)]._secure
    honest = secure.answer

    def refusing(step, terms, given):
        if terms.round == 2 and step == spoilt and secure not in refused:
            refused.append(secure)
            raise Refusal("busy", "not now")
        return honest(step, terms, given)

    refused = []
    monkeypatch.setattr(secure, "answer", refusing)
    federation.run(2)
    assert steps_of(federation)[0] == of_round(1) + of_round(2)
    assert federation.reports[1].answered == [f"n{client}" for client in range(NODES)]
    assert charges(federation) == [2] * NODES


@pytest.mark.parametrize(
    "kept", [pytest.param("nothing", marks=pytest.mark.slow), "an older store", "eight newer rounds"]
)
def test_what_was_prepared_and_lost_since_is_exchanged_anew_and_charges_nobody_twice(federation, monkeypatch, kept):
    """Two of five nodes, one more than a round can do without, lose their sessions between two rounds."""
    exchange, older, lost = federation.served.exchange, {}, federation.folders[1:3]

    def copying(path, header, body, **more):
        ask = Ask.model_validate(protocol.parse_header(header.encode()))
        if (ask.round, ask.ask) == (1, "unmask"):  # keys for round 2 are there, shares are not yet
            older[path] = Path(federation.folders[ask.client].rounds_file).read_bytes()
        return exchange(path, header, body, **more)

    def lose(report):
        federation.reports.append(report)
        for folder in lost if report.round == 1 else ():
            if kept == "eight newer rounds":
                for number in range(1, 9):
                    federation.nonce = f"{number:032x}"
                    federation.ask(int(folder.path.name[1:]), "advertise", run="other")
                continue
            federation.served.stop(folder)
            folder.rounds_file.unlink()
            if kept == "an older store":
                folder.rounds_file.write_bytes(older[str(folder.socket)])
            federation.served.start(folder)

    monkeypatch.setattr(protocol, "exchange", copying)
    monkeypatch.setattr(secure_grid, "_RESTART_S", 0.0)
    grid = federation.grid()
    grid._on_round = lose
    federation.run(2, grid)
    assert [len(report.answered) for report in federation.reports] == [NODES] * 2
    assert charges(federation) == [2] * NODES
    shared_again = kept == "an older store"
    anew = of_round(2, *SHORT) if shared_again else of_round(2)
    assert steps_of(federation)[0] == of_round(1) + of_round(2, "share") + anew
    told = [line for line in federation.lines if "not every node still holds" in line]
    assert len(told) == (not shared_again)
    assert all("client 1: refused (cohort): this node holds no keys" in line for line in told)


def test_a_message_that_would_be_too_long_asks_nothing_ahead(federation, monkeypatch):
    """Found out too late, it would void a round that has been charged."""
    exchange, longest = federation.served.exchange, {}

    def measuring(path, header, body, **more):
        ask = Ask.model_validate(protocol.parse_header(header.encode()))
        longest[bool(ask.ahead)] = max(longest.get(bool(ask.ahead), 0), len(header.encode()))
        return exchange(path, header, body, **more)

    monkeypatch.setattr(protocol, "exchange", measuring)
    federation.run(2)
    assert steps_of(federation)[0] == of_round(1) + of_round(2, *SHORT)
    assert longest[True] > longest[False]
    advert = Advert(2**31 - 1, "0" * 64, "0" * 64, "0" * 128).values()
    assert len(json.dumps([advert, {advert["client"]: advert["signature"]}])) <= secure_grid._NODE_BYTES
    monkeypatch.setattr(protocol, "HEADER_BYTES", longest[True] - 1)
    federation.ledger.unlink()
    federation.run(2)
    assert steps_of(federation)[0] == of_round(1) + of_round(2)
    assert charges(federation) == [4] * NODES


def one_of_five_may_be_missing(federation):
    """Let the nodes agree to a sum of four; the secure steps of node 3."""
    for folder in federation.folders:
        federation.served.stop(folder)
        edit(folder, "min_cohort = 5", "min_cohort = 4")
        federation.served.start(folder)
    return federation.served.services[str(federation.folders[3].socket)]._secure


@pytest.mark.parametrize("accusers", [[0, 1, 2, 4], pytest.param([0], marks=pytest.mark.slow)])
def test_a_node_whose_shares_are_not_authentic_is_named_and_left_out_from_then_on(federation, monkeypatch, accusers):
    """A round of five messages or three. One accuser is not enough, since one node may be on the server's side."""
    hostile = one_of_five_may_be_missing(federation)
    honest = hostile.answer

    def garbage(step, terms, given):
        said = honest(step, terms, given)
        if terms.round == 2 and step == "share":
            said["sealed"] |= {str(client): b64encode(bytes(160)).decode() for client in accusers}
        return said

    monkeypatch.setattr(hostile, "answer", garbage)
    federation.run(3)
    void = len(accusers) > 1
    assert [len(report.answered) for report in federation.reports] == [NODES, 0 if void else 4, 4 if void else NODES]
    lost = federation.reports[1].lost
    assert "client 3's shares for this node are not authentic" in lost["n0"]
    assert ("n3" in lost) == void
    if void:
        assert lost["n3"] == federation.reports[2].lost["n3"]
        assert any("round 2: n3 counts as zero: " in line for line in federation.lines)
    assert charges(federation) == ([2] * NODES if void else [2, 3, 3, 3, 3])


@pytest.mark.parametrize("step", [pytest.param("advertise", marks=pytest.mark.slow), "share", "mask"])
def test_a_node_that_makes_its_answer_long_loses_its_own_place_alone(federation, monkeypatch, step):
    """What the server hands on to other nodes has to fit into their messages, also after they have been charged."""
    hostile = one_of_five_may_be_missing(federation)
    honest, longest = hostile.answer, []

    def padded(asked, terms, given):
        said = honest(asked, terms, given)
        if asked == step == "share":
            said["sealed"]["0"] += " " * 10_000  # as good in base 64 as without
        elif asked == step:
            said["signature"] += " " * 10_000  # as good in hexadecimal digits
        return said

    sent = hostile.sent

    exchange = federation.served.exchange

    def measuring(path, header, body, **more):
        longest.append(len(header))
        return exchange(path, header, body, **more)

    monkeypatch.setattr(hostile, "answer", padded)
    if step == "mask":
        monkeypatch.setattr(hostile, "sent", lambda terms: sent(terms) + " " * 10_000)
    monkeypatch.setattr(protocol, "exchange", measuring)
    federation.run()
    assert federation.reports[0].answered == ["n0", "n1", "n2", "n4"]
    assert max(longest) < 10_000


def test_a_signer_that_does_not_sign_for_the_next_round_leaves_this_one_whole(federation):
    """A registration may ask for more noise in the next round than this round's plan has; its own plan follows."""

    def sign(question):
        if question.round == 2 and not federation.reports:
            raise RunError("its plan has too small a noise multiplier")
        return ""

    grid = federation.grid()
    grid._questions = NodeQuestions("run", WORK, sign)
    federation.run(2, grid)
    assert [len(report.answered) for report in federation.reports] == [NODES] * 2
    assert steps_of(federation)[0] == of_round(1) + of_round(2)


def test_what_was_prepared_serves_no_other_plan_or_nodes(federation):
    grid = federation.grid()
    federation.run(2, grid)  # of ten rounds: the third is prepared
    prepared, clients = grid._prepared, list(range(NODES))
    assert prepared.serves(3, prepared._plan, clients)
    for other in ((4, prepared._plan, clients), (3, "{}", clients), (3, prepared._plan, clients[1:])):
        assert not prepared.serves(*other)


@pytest.mark.parametrize("noise", ["discrete-gaussian", "skellam"])
def test_a_round_moves_the_model_and_charges_every_node_once(federation, noise):
    moved = federation.run(2, noise=noise)
    assert torch.linalg.norm(moved - MODEL) > 0.01
    assert [report.answered for report in federation.reports] == [[f"n{client}" for client in range(NODES)]] * 2
    assert charges(federation) == [2] * NODES
    assert {row.trust for folder in federation.folders for row in rows(folder)} == {"distributed"}


def test_the_sum_is_that_of_the_nodes_own_words(federation, monkeypatch):
    """What the server opens is the sum of what the nodes put in before they masked it."""
    put_in = []
    for service in federation.served.services.values():
        make = service._releaser.words
        monkeypatch.setattr(
            service._releaser, "words", lambda *given, make=make: put_in.append(make(*given)) or put_in[-1]
        )
    total = federation.whole()
    assert len(put_in) == NODES
    np.testing.assert_array_equal(total, np.sum(put_in, axis=0, dtype=np.uint32))


@pytest.mark.parametrize(
    "step", [step if step == "mask" else pytest.param(step, marks=pytest.mark.slow) for step in WHOLE]
)
def test_a_node_that_drops_out_at_a_step(federation, monkeypatch, step):
    """The cohort needs all five nodes; from the second step on a sum of four is opened."""
    monkeypatch.setattr(protocol, "exchange", silent(federation, {2: step}))
    if step == "advertise":
        with pytest.raises(RunError, match="the quorum is 4"):
            federation.run()
        assert charges(federation) == [0] * NODES
        return
    moved = federation.run()
    (report,) = federation.reports
    assert torch.linalg.norm(moved - MODEL) > 0.01
    in_sum = step == "unmask"  # its vector was there by then
    agreed = ["agree"] if step == "mask" else []
    assert [asked for _, asked in steps_of(federation)[0]] == ["advertise", "share", "mask", *agreed, "unmask"]
    assert report.answered == [f"n{client}" for client in range(NODES) if client != 2 or in_sum]
    assert report.lost == ({} if in_sum else {"n2": report.lost["n2"]})
    assert charges(federation) == [1, 1, int(in_sum), 1, 1]


@pytest.mark.parametrize("step", ["mask", "unmask"])
def test_more_nodes_than_a_sum_can_do_without_die_at_a_step_and_come_back(federation, monkeypatch, step):
    """Their keys are on disk: the round waits for them, and nobody is charged twice."""
    ending, died = silent(federation, {1: step, 2: step, 3: step}), set()

    def coming_back(path, header, body, **more):
        ask = Ask.model_validate(protocol.parse_header(header.encode()))
        if (ask.client, ask.ask) in died:
            return federation.served.exchange(path, header, body, **more)
        if ask.ask == step and ask.client in (1, 2, 3):
            died.add((ask.client, ask.ask))
            with pytest.raises(RunError):
                ending(path, header, body, **more)
            federation.served.start(federation.folders[ask.client])
            raise RunError("killed")
        return federation.served.exchange(path, header, body, **more)

    monkeypatch.setattr(protocol, "exchange", coming_back)
    monkeypatch.setattr(polling, "_LOOK_S", 0.01)
    federation.run()
    assert len(died) == 3
    assert federation.reports[0].answered == [f"n{client}" for client in range(NODES)]
    assert charges(federation) == [1] * NODES


@pytest.mark.slow
@pytest.mark.parametrize("step", ["mask", "agree", "unmask"])
def test_below_the_threshold_a_round_is_void_and_stays_charged(federation, monkeypatch, step):
    drops = {1: "mask" if step == "agree" else step, 2: step}
    monkeypatch.setattr(protocol, "exchange", silent(federation, drops))
    moved = federation.run(1, federation.grid(dataclasses.replace(QUICK, give_up_seconds=1.0)))
    torch.testing.assert_close(moved, MODEL, rtol=0, atol=0)
    assert federation.reports[0].answered == []
    assert any("round 1 is void" in line for line in federation.lines)
    assert charges(federation) == [1, int(drops[1] != "mask"), int(step != "mask"), 1, 1]


def test_too_few_nodes_before_anything_is_charged_end_the_run(federation):
    federation.link.offline = {0, 1}
    with pytest.raises(RunError, match=rf"3 of 5 nodes answered, the quorum is {THRESHOLD} \(distributed.threshold\)"):
        federation.run(1, federation.grid(dataclasses.replace(QUICK, give_up_seconds=0.5)))
    assert charges(federation) == [0] * NODES


@pytest.mark.parametrize(
    ("step", "said", "why"),
    [
        ("advertise", {"client": 1, "sealing": "00" * 32, "masking": "11" * 32, "signature": ""}, "2 t > n|4 for 3"),
        ("share", {"sealed": {}, "commitment": ""}, "3 nodes shared secrets, 4 are needed"),
    ],
)
def test_hostile_nodes_before_anything_is_charged_end_the_run_too(federation, monkeypatch, step, said, why):
    for folder in federation.folders[1:3]:
        secure = federation.served.services[str(folder.socket)]._secure
        honest = secure.answer
        monkeypatch.setattr(
            secure, "answer", lambda asked, *given, honest=honest: said if asked == step else honest(asked, *given)
        )
    with pytest.raises(RunError, match=why):
        federation.run()
    assert charges(federation) == [0] * NODES


@pytest.mark.slow
def test_another_attempt_is_another_release_with_other_noise(federation):
    first = federation.run()
    federation.ledger.unlink()
    again = federation.run()
    assert charges(federation) == [2] * NODES
    assert torch.linalg.norm(first - again) > 0.01
    names = [[row.request for row in rows(folder)] for folder in federation.folders]
    assert all(one != other for one, other in names)


@pytest.mark.slow
def test_a_relay_that_alters_answers_loses_its_node_alone(federation):
    def altered(client, message, reply):
        header = protocol.parse_header(str(reply.config_records[wire.CONFIG][HEADER]).encode())
        if client != 3 or "said" not in header or "sealed" not in header["said"]:
            return reply
        text = str(reply.config_records[wire.CONFIG][HEADER]).replace('"commitment": "', '"commitment": "0')
        changed = RecordDict({wire.CONFIG: reply.config_records[wire.CONFIG]})
        changed.config_records[wire.CONFIG][HEADER] = text
        return changed

    federation.link.fault = altered
    federation.run()
    assert federation.reports[0].answered == ["n0", "n1", "n2", "n4"]
    assert "not signed by its enrolled service" in federation.reports[0].lost["n3"]


@pytest.mark.parametrize(
    ("old", "new", "options", "why"),
    [
        ("min_cohort = 5", "min_cohort = 6", {}, "takes part in sums of min_cohort = 6"),
        ("max_colluders = 1", "max_colluders = 2", {}, "this node wants max_colluders = 2"),
        ('trust = ["distributed"]', 'trust = ["local"]', {}, "a plan for distributed trust; allowed: local"),
        ("epsilon = 8.0", "epsilon = 0.1", {}, "nothing left for such a run: 10 more releases would bring"),
    ],
)  # fmt: skip
def test_what_a_policy_does_not_allow_is_said_before_anything_is_charged(federation, old, new, options, why):
    for folder in federation.folders:
        federation.served.stop(folder)
        edit(folder, old, new)
        federation.served.start(folder)
    need = Need("run", WORK, plan(**options).to_json(), 10)
    with pytest.raises(ConfigError, match=why):
        federation.grid().require(need, 2.0)
    assert charges(federation) == [0] * NODES
