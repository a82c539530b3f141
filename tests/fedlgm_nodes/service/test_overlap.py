"""A person with rows at several nodes, who is charged for all of them at each."""

from __future__ import annotations

import base64
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dp_accounting import dp_event, pld

from clients.source import ClientData
from fedlgm import Sampling, privacy
from fedlgm.errors import ConfigError, LedgerError
from fedlgm.planning.facts import LocalSteps
from fedlgm.privacy.attackers import percent
from fedlgm.privacy.signed import envelope_of
from fedlgm_lab.certificate.verifier.envelope import Refused
from fedlgm_lab.certificate.verifier.node import describe_node, verify_node
from fedlgm_nodes.deploy import record_report
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.protocol.messages import public_text
from fedlgm_nodes.service.account import Account
from fedlgm_nodes.service.certificate import certify_node
from fedlgm_nodes.service.costs import SingleExamplesCost, WholeDataCost
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.release import Releaser
from fedlgm_nodes.service.work import Work
from tests.support.nodes import (
    MODEL,
    SHAPE,
    WORK,
    ask,
    edit,
    make_node,
    plan,
    refused,
    rows,
    served,
)

DELTA = 1e-5
_BEFORE = "exact_sums = false"


def state(folder: NodeFolder, overlap: int) -> None:
    """Write the number of nodes at which a person has rows into the policy."""
    edit(folder, _BEFORE, f"overlap = {overlap}\n{_BEFORE}")


def make(path: Path, overlap: int | None = None, **values: Any) -> NodeFolder:
    folder = make_node(path, **({"epsilon": 40.0} | values))
    if overlap is not None:
        state(folder, overlap)
    return folder


def admits(folder: NodeFolder, text: Any) -> str:
    """The refusal of a plan by the policy; empty if it is admitted."""
    try:
        Policy.load(folder.policy_file).admit(text)
    except Refusal as refusal:
        return f"{refusal.code}: {refusal.why}"
    return ""


def epsilon(events: list[tuple[dp_event.DpEvent, int]]) -> float:
    accountant = pld.PLDAccountant()
    for event, count in events:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(DELTA))


def test_each_release_is_charged_for_all_nodes_of_a_person():
    local, central = plan(4.0), plan(4.0, trust="central")
    gaussian = dp_event.GaussianDpEvent
    for made in (local, central):
        assert WholeDataCost().event(made) == WholeDataCost().event(made, 1) == gaussian(2.0)
    for nodes in (2, 3):
        separate = epsilon([(WholeDataCost().event(local, nodes), 1)])
        assert separate == pytest.approx(epsilon([(gaussian(2.0), nodes)]), rel=1e-3)
        assert WholeDataCost().event(central, nodes) == gaussian(2.0 / nodes)
    steps = plan(
        1.5, mechanism="dp-sgd", relation="add-remove", steps=LocalSteps(4, 0.25, 6.0),
        sampling=Sampling("poisson", 3, 1.0),
    )  # fmt: skip
    step = dp_event.PoissonSampledDpEvent(0.25, gaussian(1.5))
    found = epsilon([(SingleExamplesCost().event(steps, 3), 1)])
    assert found == pytest.approx(epsilon([(step, 12)]), rel=1e-3)


def test_a_run_costs_a_person_what_its_nodes_charge():
    """The plan's event, by which the server calibrates, is that of the ledger of each node."""
    for nodes in (1, 2, 3):
        made = plan(4.0, overlap=nodes)
        assert made.event == WholeDataCost().event(made, nodes)


@pytest.mark.parametrize("overlap", [None, 1, 2])
def test_what_a_node_has_spent_is_the_joint_epsilon(tmp_path, overlap):
    folder = make(tmp_path / "node", overlap)
    with served(folder):
        for round in (1, 2):
            assert ask(folder, round=round)[0]["ok"]
    with folder.ledger(readonly=True) as ledger:
        spent = Account(folder.policy(), ledger).epsilon()
    joint = 2 * (overlap or 1)
    assert spent == pytest.approx(epsilon([(dp_event.GaussianDpEvent(2.0), joint)]), rel=1e-3)
    kind = "client, replace-one" + " at 2 nodes" * (overlap == 2)
    assert {row.protects for row in rows(folder)} == {kind}


@pytest.mark.parametrize(("overlap", "whom"), [(None, "clients"), (2, "people")])
def test_an_attack_looks_for_people_if_they_may_be_at_several_nodes(tmp_path, overlap, whom):
    folder = make(tmp_path / "node", overlap)
    with served(folder):
        assert ask(folder)[0]["ok"]
    told = verify_node(certify_node(folder), str(folder.public()["service_key"]))
    assert (
        f"finds at most {percent(told['attack_rates']['tpr']['0.01'])} of such {whom}."
        in (describe_node(told)[1])
    )
    with folder.ledger(readonly=True) as ledger:
        record = folder.record(ledger.identity)
        report = record_report.facts_of(folder.policy(), ledger, record)
    assert f" of the {whom}" in report["attack"]


def test_a_budget_ends_sooner_for_people_at_more_nodes(tmp_path):
    budget = epsilon([(dp_event.GaussianDpEvent(2.0), 4)]) * 1.01
    for overlap, count in ((1, 4), (2, 2), (4, 1)):
        folder = make(tmp_path / f"node{overlap}", overlap, epsilon=budget)
        with served(folder):
            answers = [ask(folder, round=round)[0] for round in range(1, 6)]
        assert [answer["ok"] for answer in answers] == [True] * count + [False] * (5 - count)
        assert answers[-1]["code"] == "budget-spent"


def test_a_run_that_assumes_too_little_or_what_nobody_knows_is_refused(tmp_path):
    silent, three = make(tmp_path / "silent"), make(tmp_path / "three", 3)
    assert "does not say at how many nodes" in admits(silent, plan(overlap=2))
    assert "assumes that a person has rows at 2 nodes or fewer" in admits(three, plan(overlap=2))
    for folder, overlap in ((silent, 1), (three, 1), (three, 3), (three, 4)):
        assert admits(folder, plan(overlap=overlap)) == ""
    with served(silent):
        assert ask(silent, text=plan(overlap=2).to_json())[0]["code"] == "privacy"
        assert ask(silent)[0]["ok"]
    assert len(rows(silent)) == 1


def test_a_run_that_says_nothing_of_people_is_charged_for_all_their_nodes(tmp_path):
    """A server cannot lower a charge: neither by what its plan says nor by what it leaves out."""
    folder = make(tmp_path / "node", 2)
    two = epsilon([(dp_event.GaussianDpEvent(2.0), 2)])
    with served(folder):
        for text in (plan(), plan(overlap=5), plan(overlap=2)):
            assert ask(folder, text=text.to_json())[0]["ok"]
        assert ask(folder, text=plan(overlap=2).to_json())[0]["replayed"]
        forged = plan(overlap=2).to_json().replace('"overlap": 2', '"overlap": 0')
        assert forged != plan(overlap=2).to_json()
        assert ask(folder, text=forged)[0]["code"] == "plan"
    charged = [privacy.events.decode(_json(row.event)) for row in rows(folder)]
    assert len(charged) == 3
    for event in charged:
        assert epsilon([(event, 1)]) == pytest.approx(two, rel=1e-3)


def _json(text: str) -> Any:
    return json.loads(text)


def test_a_policy_whose_people_are_at_more_nodes_than_were_charged_is_refused(tmp_path):
    folder = make(tmp_path / "node", 2)
    with served(folder):
        assert ask(folder)[0]["ok"]
        edit(folder, "overlap = 2", "overlap = 3")
        with pytest.raises(ConfigError, match=r"privacy\.overlap changed"):
            folder.policy().check_reload(Policy.load(folder.policy_file).model_dump(mode="json") | {
                "privacy": folder.policy().privacy.model_dump(mode="json") | {"overlap": 2}})  # fmt: skip
    assert "privacy.overlap cannot grow after a release" in refused(folder)
    edit(folder, "overlap = 3", "overlap = 1")
    with served(folder):  # two releases that cost two each: they protect people at one node, too
        assert ask(folder, round=2)[0]["seq"] == 2
    edit(folder, "overlap = 1", "overlap = 2")
    assert "privacy.overlap cannot grow after a release" in refused(folder)


def test_a_recorded_question_is_not_answered_for_less_after_an_edit(tmp_path):
    server = Ed25519PrivateKey.generate()
    folder = make(tmp_path / "node", 2, server_key=public_text(server))
    with served(folder):
        assert ask(folder, signer=server)[0]["ok"]
    edit(folder, "overlap = 2", "overlap = 1")
    with served(folder):
        again = ask(folder, signer=server)[0]
        assert again["ok"]
        assert again["replayed"]
        changed = ask(folder, signer=server, nonce="01", plan=plan(overlap=2).to_json())[0]
        assert changed["code"] == "unsigned"
    assert [row.protects for row in rows(folder)] == ["client, replace-one at 2 nodes"]


def test_an_edited_row_is_noticed(tmp_path):
    folder = make(tmp_path / "node", 2)
    with served(folder):
        assert ask(folder)[0]["ok"]
    with sqlite3.connect(folder.ledger_file) as database:
        database.execute("UPDATE releases SET protects = 'client, replace-one at 9 nodes'")
    with pytest.raises(LedgerError):
        rows(folder)


def test_a_certificate_states_at_how_many_nodes_its_epsilon_holds(tmp_path):
    folder = make(tmp_path / "node", 2)
    with served(folder):
        assert ask(folder)[0]["ok"]
    key = folder.public()["service_key"]
    told = verify_node(certify_node(folder), key)
    assert told["relation"] == "replace-one at 2 nodes"
    joint = epsilon([(dp_event.GaussianDpEvent(2.0), 2)])
    assert told["epsilon"] == pytest.approx(joint, rel=1e-3)
    envelope = json.loads(certify_node(folder))
    statement = json.loads(base64.b64decode(envelope["payload"]))
    for nodes, right in ((1, True), (3, False), (99999, False)):
        statement["predicate"]["relation"] = "replace-one" + f" at {nodes} nodes" * (nodes > 1)
        changed = envelope_of(statement, folder.signer())
        if right:  # those of a person at two nodes protect a person at one
            assert verify_node(changed, key)
        else:
            with pytest.raises(Refused, match="a release protects"):
                verify_node(changed, key)


def test_secure_sums_and_wrong_numbers_are_refused(tmp_path):
    folder = make(tmp_path / "node")
    edit(folder, 'trust = ["local"]', 'trust = ["distributed"]\noverlap = 2')
    with pytest.raises(ConfigError, match="not proven for noise in shares"):
        folder.policy()
    for wrong in ("0", "2.5", "101", "true"):
        folder = make(tmp_path / f"node{wrong}")
        edit(folder, _BEFORE, f"overlap = {wrong}\n{_BEFORE}")
        with pytest.raises(ConfigError, match="overlap"):
            folder.policy()


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_planted_person_moves_the_sum_of_answers_by_no_more_than_is_charged(tmp_path, nodes):
    """A person whose rows dominate flips the updates of every node. The noise is too small to be
    seen, so the difference of the sums is that of the updates, and exceeds the claim for one node."""
    made = plan(1e-7, bound=0.02)
    sums = []
    for sign in (1, -1):
        answers = []
        for client in range(nodes):
            folder = make(tmp_path / f"n{client}{sign}", nodes)
            x = torch.full((24, *SHAPE), 3.0 * sign)
            data = ClientData(x, torch.zeros(24, dtype=torch.int64))
            releaser = Releaser(folder.policy(), data, "data", bytes([client]) * 32)
            work = Work.parse(WORK, releaser.policy)
            request = releaser.understand(1, made.to_json(), work, MODEL.numpy())
            answers.append(releaser.make(request, "name").astype(np.float64))
        sums.append(sum(answers, np.zeros(made.size)))
    shift = float(np.linalg.norm(sums[0] - sums[1])) / float(made.clip[0])
    factor = (
        made.effective_multiplier
        / WholeDataCost().event(plan(1e-7, bound=0.02, trust="central"), nodes).noise_multiplier
    )
    assert 0.85 * factor < shift <= factor * (1 + 1e-4)
    assert factor == pytest.approx(2 * nodes)
    assert (shift > 2.1) == (nodes > 1)  # power: the claim for one node is too small
