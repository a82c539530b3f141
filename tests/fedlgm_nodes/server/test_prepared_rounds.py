"""Keys and shares of a round travel with the last messages of the round before; lost ones are
exchanged anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlgm.errors import RunError
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.secagg.cohort import Advert
from fedlgm_nodes.server import secure_grid
from fedlgm_nodes.server.questions import NodeQuestions
from fedlgm_nodes.service.ask import Ask
from tests.support.nodes import WORK
from tests.support.secure_nodes import NODES, SHORT, of_round


def test_the_next_rounds_keys_and_shares_travel_with_this_ones_last_messages(secure):
    secure.run(3)
    assert [report.answered for report in secure.reports] == [
        [f"n{client}" for client in range(NODES)]
    ] * 3
    expected = of_round(1) + of_round(2, *SHORT) + of_round(3, *SHORT)
    assert secure.asked() == dict.fromkeys(range(NODES), expected)
    assert secure.charges() == [3] * NODES


def test_a_service_that_is_started_again_between_rounds_keeps_what_was_prepared(
    secure, monkeypatch
):
    exchange = secure.served.exchange

    def started_again(path, header, body, **more):
        if Ask.model_validate(frames.parse_header(header.encode())).ask == "mask":
            folder = next(one for one in secure.folders if str(one.socket) == path)
            secure.served.stop(folder)
            secure.served.start(folder)
        return exchange(path, header, body, **more)

    monkeypatch.setattr(frames, "exchange", started_again)
    secure.run(2)
    assert secure.asked()[0] == of_round(1) + of_round(2, *SHORT)
    assert secure.reports[1].answered == [f"n{client}" for client in range(NODES)]


@pytest.mark.parametrize("spoilt", ["advertise", "share"])
def test_a_round_that_one_node_has_not_prepared_starts_from_its_first_step(
    secure, monkeypatch, spoilt
):
    steps = secure.served.services[str(secure.folders[2].socket)]._secure
    honest = steps.answer

    def refusing(step, terms, given):
        if terms.round == 2 and step == spoilt and steps not in refused:
            refused.append(steps)
            raise Refusal("busy", "not now")
        return honest(step, terms, given)

    refused = []
    monkeypatch.setattr(steps, "answer", refusing)
    secure.run(2)
    assert secure.asked()[0] == of_round(1) + of_round(2)
    assert secure.reports[1].answered == [f"n{client}" for client in range(NODES)]
    assert secure.charges() == [2] * NODES


@pytest.mark.parametrize("losing", [1, 2])
@pytest.mark.parametrize(
    "kept",
    [pytest.param("nothing", marks=pytest.mark.slow), "an older store", "eight newer rounds"],
)
def test_what_was_prepared_and_lost_since_is_exchanged_anew_and_charges_nobody_twice(
    secure, monkeypatch, kept, losing
):
    """As many of five nodes as a round can do without, or one more, lose their sessions between two
    rounds."""
    exchange, older, lost = secure.served.exchange, {}, secure.folders[1 : 1 + losing]

    def copying(path, header, body, **more):
        ask = Ask.model_validate(frames.parse_header(header.encode()))
        if (ask.round, ask.ask) == (1, "unmask"):  # keys for round 2 are there, shares are not yet
            older[path] = Path(secure.folders[ask.client].rounds_file).read_bytes()
        return exchange(path, header, body, **more)

    def lose(report):
        secure.reports.append(report)
        for folder in lost if report.round == 1 else ():
            if kept == "eight newer rounds":
                for number in range(1, 9):
                    secure.nonce = f"{number:032x}"
                    secure.ask(int(folder.path.name[1:]), "advertise", run="other")
                continue
            secure.served.stop(folder)
            folder.rounds_file.unlink()
            if kept == "an older store":
                folder.rounds_file.write_bytes(older[str(folder.socket)])
            secure.served.start(folder)

    monkeypatch.setattr(frames, "exchange", copying)
    monkeypatch.setattr(secure_grid, "_RESTART_S", 0.0)
    grid = secure.grid()
    grid._on_round = lose
    secure.run(2, grid)
    assert [len(report.answered) for report in secure.reports] == [NODES] * 2
    assert secure.charges() == [2] * NODES
    shared_again = kept == "an older store"
    anew = of_round(2, *SHORT) if shared_again else of_round(2)
    assert secure.asked()[0] == of_round(1) + of_round(2, "share") + anew
    told = [line for line in secure.lines if "not every node still holds" in line]
    assert len(told) == (not shared_again)
    assert all("client 1: refused (cohort): this node holds no keys" in line for line in told)


def test_a_message_that_would_be_too_long_asks_nothing_ahead(secure, monkeypatch):
    """Found out too late, it would void a round that has been charged."""
    exchange, longest = secure.served.exchange, {}

    def measuring(path, header, body, **more):
        ask = Ask.model_validate(frames.parse_header(header.encode()))
        longest[bool(ask.ahead)] = max(longest.get(bool(ask.ahead), 0), len(header.encode()))
        return exchange(path, header, body, **more)

    monkeypatch.setattr(frames, "exchange", measuring)
    secure.run(2)
    assert secure.asked()[0] == of_round(1) + of_round(2, *SHORT)
    assert longest[True] > longest[False]
    advert = Advert(2**31 - 1, "0" * 64, "0" * 64, "0" * 128).values()
    assert (
        len(json.dumps([advert, {advert["client"]: advert["signature"]}]))
        <= secure_grid._NODE_BYTES
    )
    monkeypatch.setattr(frames, "HEADER_BYTES", longest[True] - 1)
    secure.ledger.unlink()
    secure.run(2)
    assert secure.asked()[0] == of_round(1) + of_round(2)
    assert secure.charges() == [4] * NODES


def test_a_signer_that_does_not_sign_for_the_next_round_leaves_this_one_whole(secure):
    """A registration may ask for more noise in the next round than this round's plan has; its own
    plan follows."""

    def sign(question):
        if question.round == 2 and not secure.reports:
            raise RunError("its plan has too small a noise multiplier")
        return ""

    grid = secure.grid()
    grid.questions = NodeQuestions("run", WORK, sign)
    secure.run(2, grid)
    assert [len(report.answered) for report in secure.reports] == [NODES] * 2
    assert secure.asked()[0] == of_round(1) + of_round(2)


def test_what_was_prepared_serves_no_other_plan_or_nodes(secure):
    grid = secure.grid()
    secure.run(2, grid)  # of ten rounds: the third is prepared
    prepared, clients = grid._prepared, list(range(NODES))
    assert prepared.serves(3, prepared._plan, clients)
    for other in (
        (4, prepared._plan, clients),
        (3, "{}", clients),
        (3, prepared._plan, clients[1:]),
    ):
        assert not prepared.serves(*other)
