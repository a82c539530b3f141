"""The server of a deployment is killed in a secure sum and started again, with the nodes' services
in this process."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from fedlgm.errors import ConfigError
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.ledger import Ledger
from fedlgm_nodes.deploy import server_entry
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.server_entry import ATTEMPT, TOLD, NodesRecord, recipe_for_nodes
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.server.enrolment import Enrolment, key_digest
from fedlgm_nodes.service.ask import Ask
from simulations.config import recipe as recipes
from simulations.runs import new_folder, recorder
from simulations.runs.folder import RunFolder
from tests.support.node_grids import Link, pem
from tests.support.nodes import edit, rows
from tests.support.secure_nodes import Served

NODES, ASKED, ROUNDS = 6, 5, 3
RECIPE = (
    "distributed.threshold=4",
    "distributed.colluders=1",
    f"federation.rounds={ROUNDS}",
    "training.epochs=1",
    f"privacy.max_participations={ROUNDS}",
    "federation.rate=none",
    f"federation.cohort={ASKED}",
    "run.evaluate_every=1",
)


class Killed(BaseException):
    """As if the ServerApp's process had ended here."""


class Lab:
    """A deployment of which each round asks five of six nodes, with noise and keys of their own."""

    def __init__(self, tmp_path, monkeypatch):
        asked = recipes.load("distributed-digits", RECIPE)
        policy = {
            "trust": ["distributed"],
            "server_key": "",
            "min_cohort": ASKED,
            "max_colluders": 1,
        }
        lab = create(tmp_path / "lab", NODES, example=asked, policy=policy)
        self.nodes = [lab.node(f"node{client}").service for client in range(NODES)]
        for folder in self.nodes:
            edit(folder, "reply_every_seconds = 0.5", "reply_every_seconds = 0.0")
        self.served = Served(self.nodes)
        monkeypatch.setattr(frames, "exchange", self._exchange)
        monkeypatch.setattr(server_entry, "signed_at", lambda *_: "")
        keys = [pem() for _ in self.nodes]
        enrolled = Enrolment.load(lab.enrolment_file).model_dump()["node"]
        enrolment = Enrolment.model_validate(
            {"node": [one | {"flower_key": key_digest(keys[one["client"]])} for one in enrolled]}
        )
        monkeypatch.setattr(Enrolment, "load", lambda _: enrolment)
        self.link, self.deployment = Link(self.nodes, keys), lab
        self.folder = new_folder.create(tmp_path / "run", recipe_for_nodes(asked, NODES))
        self.kill = ()

    def _exchange(self, path, header, body, **more):
        answer = self.served.exchange(path, header, body, **more)
        ask = Ask.model_validate(frames.parse_header(header.encode()))
        if (ask.round, ask.ask) == self.kill:
            raise Killed
        return answer

    def run(self, kill=()):
        """The server's process, killed once a node has answered this step of this round."""
        self.kill = kill
        folder = RunFolder.open(self.folder.path)
        if kill:
            with pytest.raises(Killed):
                server_entry._serve(self.link, self.deployment, folder)
        else:
            server_entry._serve(self.link, self.deployment, folder)

    def lines(self):
        return (self.folder.private / TOLD).read_text().splitlines()

    def charges(self):
        """Charges of the nodes' ledgers in each round, and whether those of the run's are the
        same."""
        found = [row.round for folder in self.nodes for row in rows(folder)]
        with Ledger(self.folder.ledger_file) as ledger:
            of_run = [charge.round for charge in ledger.charges()]
        return [found.count(number) for number in range(1, ROUNDS + 1)], sorted(found) == sorted(
            of_run
        )


@pytest.fixture
def lab(tmp_path, monkeypatch):
    made = Lab(tmp_path, monkeypatch)
    yield made
    made.served.close()


@pytest.mark.parametrize("step", ["mask", "unmask"])
def test_a_run_whose_server_was_killed_ends_as_if_it_had_not_been(lab, recwarn, step):
    """The round has its nodes again, and neither they nor the run are charged twice."""
    lab.run(kill=(2, step))
    assert (lab.folder.private / ATTEMPT).exists()
    lab.run(kill=(2, step))
    lab.run()
    assert lab.charges() == ([ASKED] * ROUNDS, True)
    assert lab.lines()[-1] == f"{ROUNDS} of {ROUNDS} rounds are done"
    assert sum("round 2 continues where it was interrupted" in line for line in lab.lines()) == 2
    assert not (lab.folder.private / ATTEMPT).exists()
    assert lab.folder.result()["rounds"] == ROUNDS
    assert NodesRecord.of(lab.folder).void() == 0
    assert not [one for one in recwarn if "released again" in str(one.message)]


def test_a_round_is_on_disk_before_the_next_one_charges_anybody(lab, monkeypatch):
    """Else a kill would lose two rounds, and the file holds the attempt of one."""
    evaluate, answer, done = recorder.evaluate, lab.served.exchange, []

    def slowly(*arguments, **options):
        time.sleep(0.2)
        return evaluate(*arguments, **options)

    def looking(path, header, body, **more):
        ask = Ask.model_validate(frames.parse_header(header.encode()))
        if ask.ask == "mask":
            done.append((ask.round, lab.folder.checkpoints.rounds()))
        return answer(path, header, body, **more)

    monkeypatch.setattr(recorder, "evaluate", slowly)
    monkeypatch.setattr(lab.served, "exchange", looking)
    lab.run()
    assert set(done) == {(number, number - 1) for number in range(1, ROUNDS + 1)}


def test_a_kill_between_a_rounds_checkpoint_and_the_end_of_its_attempt(lab, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server_entry.AttemptFile, "close", lambda _: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            lab.run()
    assert (lab.folder.private / ATTEMPT).exists()
    lab.run()
    assert lab.charges() == ([ASKED] * ROUNDS, True)
    assert not [line for line in lab.lines() if "continue" in line]


@pytest.mark.filterwarnings("ignore:.* released again with fresh noise")
def test_nodes_without_their_keys_are_charged_for_another_attempt(lab):
    """With a cap that leaves room for it; the sentence says so, and the last line how many rounds
    were done."""
    for folder in lab.nodes:
        lab.served.stop(folder)
        edit(folder, "epsilon = 8.0", "epsilon = 80.0")
        lab.served.start(folder)
    lab.run(kill=(2, "unmask"))
    for folder in lab.nodes:
        lab.served.stop(folder)
        folder.rounds_file.unlink()
        lab.served.start(folder)
    lab.run()
    assert lab.charges()[0][:2] == [ASKED, 2 * ASKED]
    (line,) = [line for line in lab.lines() if "charged once more" in line]
    assert line.startswith(
        "round 2 cannot continue where it was interrupted: too few nodes still have its keys; "
    )
    assert lab.lines()[-1].startswith(
        f"{ROUNDS - NodesRecord.of(lab.folder).void()} of {ROUNDS} rounds are done"
    )
    assert not (lab.folder.private / ATTEMPT).exists()


def test_nodes_that_cannot_pay_for_another_attempt_end_the_run(lab):
    """Their budgets were made for the recipe's rounds: the server asks before it charges, as for
    every run."""
    lab.run(kill=(2, "unmask"))
    for folder in lab.nodes:
        lab.served.stop(folder)
        folder.rounds_file.unlink()
        lab.served.start(folder)
    charged = lab.charges()
    with pytest.raises(ConfigError, match="budgets do not suffice"):
        lab.run()
    assert lab.charges() == charged


@pytest.mark.parametrize(("attempt", "last"), [(1, 3), (3, 2), (2, 3)])
def test_an_attempt_that_restored_files_have_moved_is_given_up(tmp_path, attempt, last):
    """The run's ledger would count a later round of the same identity once."""
    ledger = tmp_path / "ledger.sqlite"
    with Ledger(ledger, "run") as made:
        for number in range(1, last + 1):
            made.charge(gaussian_event(2.0), round=number, key="k", client=0)
    given_up = []
    file = SimpleNamespace(found=SimpleNamespace(round=attempt), give_up=lambda: given_up.append(1))
    folder = SimpleNamespace(checkpoints=SimpleNamespace(rounds=lambda: 1), ledger_file=ledger)
    if attempt == 1:  # its round is done
        file.give_up = lambda: setattr(file, "found", None)
        assert server_entry._settle_attempt(file, folder) == 1
        assert file.found is None
        return
    with pytest.raises(
        server_entry.LostAttempt, match=f"but 1 rounds are done and {last} are charged"
    ):
        server_entry._settle_attempt(file, folder)
