"""The signer of a deployment's questions: it signs what belongs to registered runs, and nothing
else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from patience import wait_until

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.server_entry import DeployedAssembly, recipe_for_nodes, work_of
from fedlgm_nodes.deploy.signer import Signer
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.secagg.steps import NO_MODEL
from fedlgm_nodes.server import questions
from fedlgm_nodes.server.questions import signed_at, unused_at
from simulations.config import recipe as recipes

RECIPE = recipes.load(
    "nodes", ["model.hidden=[8]", "federation.rounds=2", "privacy.max_participations=2"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return create(tmp_path_factory.mktemp("s") / "lab", 3)


@pytest.fixture(scope="module")
def question(folder):
    """A question of the registered run."""
    assembly = DeployedAssembly(recipe_for_nodes(RECIPE, 3))
    run = submit.register(folder, RECIPE)
    work = json.loads(json.dumps(work_of(assembly.recipe)))
    return Question(
        run, 1, 0, assembly.privacy.first_plan().to_json(), "ab" * 32, work, "00", "cd" * 32
    )


def changed(text, **values):
    return json.dumps(json.loads(text) | values)


def test_questions_of_a_registered_run_are_signed(folder, question):
    signer = Signer(folder.signer)
    key = folder.signer.key().public_key()
    for one in (
        question,
        replace(question, client=2),
        replace(question, round=2),
        replace(question, nonce="01"),
    ):
        assert protocol.verify(key, signer.sign(one), "question", one.digest)


def test_whatever_belongs_to_no_registered_run_is_not(folder, question):
    plan = json.loads(question.plan)
    half = [sigma / 2 for sigma in plan["sigma"]]
    cases = {
        "not registered": replace(question, run="another"),
        "is not registered": replace(question, run="../runs/" + question.run),
        "2 rounds": replace(question, round=3),
        "no round 0": replace(question, round=0),
        "no client 3": replace(question, client=3),
        "work that was not registered": replace(
            question, work=question.work | {"training": {"epochs": 20}}
        ),
        "cannot be read": replace(question, plan="[" * 10_000),
        "noise multiplier": replace(question, client=1, plan=changed(question.plan, sigma=half)),
        "facts": replace(
            question, client=1, plan=changed(question.plan, facts=plan["facts"] | {"rounds": 3})
        ),
        "not private": replace(question, client=1, plan=changed(question.plan, protected=False)),
    }
    signer = Signer(folder.signer)
    for message, one in cases.items():
        with pytest.raises(RunError, match=message):
            signer.sign(one)


def test_one_question_is_signed_for_a_round_and_client(folder, question):
    """Else one registered run would do for any number of models."""
    Signer(folder.signer).sign(question)
    for _ in range(2):  # the record is on disk
        signer = Signer(folder.signer)
        with pytest.raises(
            RunError, match="another plan or model was signed for round 1 and client 0"
        ):
            signer.sign(replace(question, model="ee" * 32))
        signer.sign(replace(question, nonce="02"))
        signer.close()


def test_a_question_for_keys_comes_before_that_with_the_model(folder, question):
    signer = Signer(folder.signer)
    key = folder.signer.key().public_key()
    later = replace(question, round=2, client=1, model=NO_MODEL)
    for one in (later, replace(later, nonce="01"), replace(later, model="ab" * 32), later):
        assert protocol.verify(key, signer.sign(one), "question", one.digest)
    with pytest.raises(RunError, match="another plan or model was signed for round 2 and client 1"):
        signer.sign(replace(later, model="ac" * 32))
    with pytest.raises(RunError, match="2 rounds"):
        signer.sign(replace(later, round=3))


def test_a_recipe_is_registered_once_unless_another_run_is_wanted(folder):
    recipe = recipes.load("nodes", ["model.hidden=[7]"])
    first = submit.register(folder, recipe)
    assert first.endswith("-001")
    assert submit.register(folder, recipe) == first
    assert submit.register(folder, recipe, fresh=True) == first.replace("-001", "-002")


def test_a_signer_that_is_killed_and_started_again_is_waited_for(folder, question, monkeypatch):
    def start():
        return subprocess.Popen(
            [sys.executable, "-m", "fedlgm_nodes.deploy.signer", str(folder.signer.path)]
        )

    process = start()
    try:
        wait_until(folder.signer.socket.exists, "the signer")
        signature = signed_at(folder.signer.socket, question)
        process.kill()
        process.wait()
        process = start()
        assert signed_at(folder.signer.socket, question) == signature
    finally:
        process.kill()
        process.wait()
    monkeypatch.setattr(questions, "_PATIENCE_S", 0.5)
    with pytest.raises(RunError, match=r"does not answer: .*`fedlgm deploy up`.* resumes the run$"):
        signed_at(folder.signer.socket, question)
    folder.signer.socket.unlink()


def test_the_process_answers_and_survives_what_is_no_question(folder, question, monkeypatch):
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlgm_nodes.deploy.signer", str(folder.signer.path)]
    )
    try:
        wait_until(folder.signer.socket.exists, "the signer")
        for raw in (
            b"",
            b"\xff" * 12,
            frames.encode({"ask": "sign"}),
            frames.encode(protocol.HELLO),
        ):
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(folder.signer.socket))
                link.sendall(raw)
                link.shutdown(socket.SHUT_WR)
                assert not frames.parse_header(link.recv(1 << 16)[frames.PREFIX_BYTES :])["ok"]
        with pytest.raises(
            RunError, match="does not sign this one: the run 'mine' is not registered"
        ):
            signed_at(folder.signer.socket, replace(question, run="mine"))
        signature = signed_at(folder.signer.socket, question)
        assert protocol.verify(
            folder.signer.key().public_key(), signature, "question", question.digest
        )
        stem = question.run.rpartition("-")[0]
        assert unused_at(folder.signer.socket, stem) == []
        waiting = submit.register(folder, RECIPE, fresh=True)
        assert unused_at(folder.signer.socket, stem) == [waiting]
        with pytest.raises(RunError, match="stem"):
            unused_at(folder.signer.socket, "../*")
        assert not protocol.verify(
            Ed25519PrivateKey.generate().public_key(), signature, "question", question.digest
        )
    finally:
        process.terminate()
        assert process.wait(30) == 0
    monkeypatch.setattr(questions, "_PATIENCE_S", 0.5)
    with pytest.raises(RunError, match="does not answer"):
        signed_at(folder.signer.socket, question)


def test_a_signer_process_is_small(folder, question):
    """It reads plans, and loads neither torch nor an accountant for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlgm_nodes.deploy.signer", str(folder.signer.path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    try:
        wait_until(folder.signer.socket.exists)
        asked = replace(question, round=2, client=0)
        signature = signed_at(folder.signer.socket, asked)
        key = folder.signer.key().public_key()
        assert protocol.verify(key, signature, "question", asked.digest)
        rss = psutil.Process(process.pid).memory_info().rss
        print("signer", rss >> 20)
        assert rss < 70 << 20
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps
    finally:
        process.terminate()
        process.wait(60)
