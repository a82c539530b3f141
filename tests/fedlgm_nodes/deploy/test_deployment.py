"""Real deployments on this machine: SuperLink with TLS and authentication, SuperNodes, executors,
services."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from diverging import install
from patience import LIMIT_S, wait_until

from fedlgm.errors import DivergedError
from fedlgm_nodes.deploy import certificates, process_record, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower
from fedlgm_nodes.deploy.server_entry import REPORT
from fedlgm_nodes.server.enrolment import Enrolment
from simulations import launch
from simulations.config import recipe as recipes
from simulations.engines.flower_command import CONNECTION, environment
from simulations.engines.flower_processes import free_ports
from tests.support import hostile_app

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
SMALL = ("model.hidden=[8]", "training.epochs=1")
ONCE = ("federation.rounds=1", "privacy.max_participations=1")
EXAMPLES = (
    "federation.clients=3",
    "federation.rate=1.0",
    "federation.rounds=3",
    "training.steps=20",
    "training.sampling_rate=0.2",
    "training.batch_size=96",
    "training.lr=1.0",
    "run.evaluate_every=3",
)
# of the lab's nodes: for the five rounds that cost 8, and one of central trust that costs little
BUDGET = 9.0


def recipe(*overrides: str) -> recipes.Recipe:
    return recipes.load("nodes", [*SMALL, *overrides])


def command(folder: DeploymentFolder, *overrides: str) -> list[str]:
    """What an operator types to run that recipe."""
    sets = [part for one in (*SMALL, *overrides) for part in ("--set", one)]
    return [
        sys.executable,
        "-m",
        "simulations.cli",
        "deploy",
        "run",
        "nodes",
        str(folder.path),
        "--json",
        *sets,
    ]


def reports(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "private" / REPORT).read_text().splitlines()]


def ledger_rows(folder: DeploymentFolder, name: str) -> list[Any]:
    with folder.node(name).service.ledger(readonly=True) as ledger:
        return ledger.rows()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentFolder]:
    """Three nodes for tests, whose noise is the simulation's."""
    folder = create(
        tmp_path_factory.mktemp("lab") / "lab",
        3,
        example=recipe(),
        test_seed=7,
        policy={"epsilon": BUDGET},
    )
    for i in range(3):
        policy = folder.node(f"node{i}").service.policy_file
        text = policy.read_text()
        assert 'trust = ["local"]' in text
        policy.write_text(text.replace('trust = ["local"]', 'trust = ["local", "central"]'))
    try:
        processes.up(folder)
        yield folder
    finally:
        processes.down(folder)


@pytest.fixture(scope="module")
def real(
    lab: DeploymentFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentFolder]:
    """Three nodes with keys of their own, beside the lab on the same machine."""
    policy = {"epsilon": 60.0, "unit": "example"}
    folder = create(tmp_path_factory.mktemp("real") / "real", 3, example=recipe(), policy=policy)
    try:
        processes.up(folder)
        yield folder
    finally:
        processes.down(folder)


def test_two_federations_at_once_and_each_models_accuracy_is_the_simulations(lab, real, tmp_path):
    """The lab's to the last bit; that of nodes with noise of their own within 0.05."""
    asked = recipe("run.seed=7")
    examples = recipes.load(
        "example-level-federation", EXAMPLES
    )  # with client-level privacy three nodes learn nothing
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(submit.run, lab, asked), pool.submit(submit.run, real, examples)]
        deployed, private = (one.result() for one in both)
    simulated = launch.simulate(asked, engine="local", run_dir=tmp_path / "simulated")
    for figure in ("model_sha256", "accuracy", "epsilon", "rounds", "guarantee"):
        assert deployed[figure] == simulated[figure]
    alike = launch.simulate(examples, engine="local", run_dir=tmp_path / "alike")
    assert not private["noise_reproducible"]
    assert private["model_sha256"] != alike["model_sha256"]
    assert alike["accuracy"] > 0.85
    assert private["accuracy"] == pytest.approx(alike["accuracy"], abs=0.05)
    for folder, result in ((lab, deployed), (real, private)):
        for round_ in reports(Path(result["run"])):
            assert round_["answered"] == ["node0", "node1", "node2"]
            assert round_["lost"] == {}
        for i in range(3):  # and nothing of the other federation's
            assert [row.run for row in ledger_rows(folder, f"node{i}")] == [
                Path(result["run"]).name
            ] * result["rounds"]


def test_a_finished_run_is_not_repeated(lab):
    before = len(ledger_rows(lab, "node0"))
    assert submit.run(lab, recipe("run.seed=7"))["rounds"] == 5
    assert len(ledger_rows(lab, "node0")) == before


def test_central_trust_is_the_simulations_too(lab, tmp_path):
    """With a mechanism for which the nodes evaluate their losses."""
    asked = recipe(
        "run.seed=7",
        "privacy.trust=central",
        "privacy.epsilon=1.0",
        "privacy.max_participations=none",
        ONCE[0],
        "mechanism.name=voted-filling",
    )
    deployed = submit.run(lab, asked)
    simulated = launch.simulate(asked, engine="local", run_dir=tmp_path / "simulated")
    for figure in ("model_sha256", "accuracy", "epsilon", "rounds", "guarantee"):
        assert deployed[figure] == simulated[figure]
    rows = [
        json.loads((folder / "metrics.jsonl").read_text())
        for folder in (Path(deployed["run"]), tmp_path / "simulated")
    ]
    assert rows[0]["queries"] == rows[1]["queries"]
    assert "cut-vote" in rows[0]["queries"]
    assert [ledger_rows(lab, f"node{i}")[-1].trust for i in range(3)] == ["central"] * 3


def test_a_run_that_the_nodes_budgets_do_not_carry_is_refused_before_its_first_round(lab):
    """The budget of these nodes was made for the rounds that they have answered."""
    done = subprocess.run(
        command(lab, "run.seed=7", *ONCE),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "RunError"
    assert re.search(
        r"node0, node1 and node2 refuse it.*nothing\s+left.*Nothing\s+has\s+been\s+spent",
        done.stderr,
        re.DOTALL,
    )
    assert [len(ledger_rows(lab, f"node{i}")) for i in range(3)] == [6, 6, 6]


def test_a_run_completes_without_a_node_whose_key_is_broken(real, tmp_path):
    node, supernode = real.node("node1"), process_record.running(real)["node1-supernode"]
    supernode.terminate()
    supernode.wait(LIMIT_S)
    kept = node.flower_key.read_bytes()
    certificates.make_node_key(tmp_path / "key")
    try:
        node.flower_key.write_bytes((tmp_path / "key").read_bytes())
        stranger = subprocess.Popen(
            [node.script("supernode")],
            env=environment(None),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            result = submit.run(real, recipe(*ONCE, "deployment.offline_seconds=2"))
            said, _ = stranger.communicate(timeout=LIMIT_S)
        finally:
            stranger.kill()
    finally:
        node.flower_key.write_bytes(kept)
    assert stranger.returncode != 0
    assert "2004" in said
    (round_,) = reports(Path(result["run"]))
    assert round_["answered"] == ["node0", "node2"]
    assert round_["lost"] == {"node1": "not connected"}
    processes.up(real)
    assert Flower(real).online() == 3


def test_a_run_that_diverges_says_so_to_whoever_started_it(real, tmp_path, monkeypatch):
    install(tmp_path / "modules", monkeypatch)  # for the server; nodes take no server step
    monkeypatch.chdir(
        tmp_path / "modules"
    )  # where the command is typed: the ServerApp looks there, too
    said: list[str] = []
    with pytest.raises(
        DivergedError, match=r"^training diverged in round 3: .*federation\.server_lr"
    ):
        submit.run(real, recipe("federation.server_optimizer=my_diverging:Step"), say=said.append)
    assert [line.partition(":")[0] for line in said if line.startswith("round")] == [
        "round 1",
        "round 2",
    ]
    assert re.fullmatch(
        r"training diverged; norms .* last round: node\d \(\S+\)(, node\d \(\S+\))+", said[-1]
    )


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unknown key", "2004"),
        ("no key", "2001"),
        ("wrong authority", "CERTIFICATE_VERIFY_FAILED"),
        ("no TLS", "disconnected without sending a response"),
    ],
)
def test_strangers_are_refused(real, tmp_path, case, reason):
    settings = real.settings()
    certificates.make_node_key(tmp_path / "key")
    certificates.make_authority(tmp_path)
    secure = [
        "--root-certificates",
        str(tmp_path / "ca.crt" if case == "wrong authority" else real.server / "ca.crt"),
    ]
    key = ["--auth-supernode-private-key", str(tmp_path / "key")]
    stranger = [
        str(BIN / "flower-supernode"),
        "--superlink",
        f"{settings.host}:{settings.port}",
        "--max-retries",
        "1",
    ]
    # Without a SuperExec of its own, which would keep the output open.
    stranger += ["--port", str(free_ports(1)[0]), "--isolation", "process"]
    stranger += {"no key": secure, "no TLS": ["--insecure"]}.get(case, [*secure, *key])
    done = subprocess.run(
        stranger,
        env=environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode != 0
    assert reason in done.stdout + done.stderr
    assert Flower(real).online() == 3


def test_hostile_apps_on_unmodified_flower_get_nothing(real, tmp_path):
    """In the hand of the server that the nodes have enrolled: what stops it is what they find in
    the questions."""
    from tests.support.hostile_questions import OBJECTS, PLANS, SIGMA, WORKS, changed

    before = [len(ledger_rows(real, f"node{i}")) for i in range(3)]
    app, marker, out = tmp_path / "app", tmp_path / "marker", tmp_path / "out.json"
    hostile_app.write(app, marker)
    enrolled = Enrolment.load(real.enrolment_file).node
    asker = hostile_app.Asker(
        real.signer.key(), {node.client: node.service_key for node in enrolled}
    )
    plans = {
        name: text for name, text in PLANS.items() if name != "noise over ten"
    }  # these nodes' budget is larger
    plans["noise over a hundred"] = changed(sigma=[s / 100 for s in SIGMA])
    waves = [asker.hostile(plans, WORKS, OBJECTS), *asker.repeated()]
    attack = {
        "waves": [[case.values() for case in wave] for wave in waves],
        "out": str(out),
        "seconds": LIMIT_S / 3,
        "clients": {node.flower_key: node.client for node in enrolled},
    }
    (tmp_path / "attack.json").write_text(json.dumps(attack))
    (tmp_path / "config.toml").write_text(f'attack = "{tmp_path / "attack.json"}"\n')
    flower = Flower(real)
    flower.json("run", str(app), CONNECTION, "--run-config", str(tmp_path / "config.toml"))
    wait_until(out.exists, "the app's answer", every=0.5)
    found = json.loads(out.read_text())
    assert found["missing"] == []
    assert len(found["answers"]) == sum(map(len, waves)) >= 100
    codes = {(case.name, case.client): case.codes for wave in waves for case in wave}
    wrong = [
        (name, said)
        for name, client, said, _ in found["answers"]
        if said not in codes[name, client]
    ]
    assert wrong == []
    assert [answer for answer in found["answers"] if answer[2] != "ok" and answer[3]] == []
    # However often and under whatever name a question comes, alone or together: one release, the
    # same bytes.
    kept = {(client, held) for _, client, said, held in found["answers"] if said == "ok"}
    assert len(kept) == 3
    assert "" not in {held for _, held in kept}
    assert [len(ledger_rows(real, f"node{i}")) for i in range(3)] == [count + 1 for count in before]
    assert not marker.exists()


def test_nothing_is_left_running(lab, real):
    for folder in (lab, real):
        processes.down(folder)
    left = []
    for one in psutil.process_iter():
        try:
            text = " ".join(one.cmdline())
            if any(str(folder.path) in text or one.environ().get("FLWR_HOME", "").startswith(str(folder.path))
                   for folder in (lab, real)):  # fmt: skip
                left.append(text)
        except psutil.Error:
            continue
    assert left == []
