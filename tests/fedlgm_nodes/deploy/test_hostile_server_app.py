"""Whoever reaches a SuperLink runs a ServerApp as its user: what that can take, and who reaches
it."""

from __future__ import annotations

import configparser
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S, wait_until

from fedlgm_nodes.deploy import process_record, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower
from simulations.config import recipe as recipes
from simulations.engines.flower_command import CONNECTION, FlwrCommand, environment
from simulations.engines.flower_processes import with_children
from tests.support.other_users import become, interpreter, write_commands

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(
        shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed"
    ),
]

PAGE = Path(__file__).parents[3] / "docs/how-to/run-real-nodes.md"
USERS = {"fl-server": 65141, "fl-sign": 65142, "fl-proxy": 65143}
ASK = 65144
HOST = "127.0.0.2"  # another address of this machine, as other machines use one
SETS = [
    "model.hidden=[8]",
    "training.epochs=1",
    "federation.rounds=1",
    "privacy.max_participations=1",
]
SERVER = '''
"""Takes what it finds, as the user that runs ServerApps, and writes it down."""
import json, os, signal, socket
from dataclasses import replace
from pathlib import Path
from flwr.serverapp import ServerApp
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.server.questions import signed_at

app = ServerApp()

@app.main()
def main(grid, context):
    given = json.loads(open(context.run_config["attack"]).read())
    lab, sign = Path(given["lab"]), Path(given["lab"]) / "signer/run/sign.sock"
    question = Question(**given["question"])
    plan = json.loads(question.plan)
    less = json.dumps(plan | {"sigma": [sigma / 10 for sigma in plan["sigma"]]})
    attempts = {
        "read the key of questions": lambda: (lab / "signer/question.key").read_bytes(),
        "read the authority's key": lambda: (lab / "authority/ca.key").read_bytes(),
        "read the proxy's key": lambda: (lab / "proxy/tls.key").read_bytes(),
        "read a node's noise key": lambda: (lab / "nodes/node0/service/state/noise.key").read_bytes(),
        "list registered runs": lambda: os.listdir(lab / "signer/runs"),
        "register a run": lambda: (lab / "signer/runs/mine-1.json").write_text("{}"),
        "write what was signed": lambda: open(lab / "signer/signed.sqlite", "ab"),
        "put a signer in its place": lambda: socket.socket(socket.AF_UNIX).bind(str(lab / "signer/run/x.sock")),
        "enrol a node": lambda: open(lab / "enrolment.toml", "ab"),
        "kill the signer": lambda: os.kill(given["signer"], signal.SIGKILL),
        "read the signer's memory": lambda: os.open(f"/proc/{given['signer']}/mem", os.O_RDONLY),
        "have a run of its own signed": lambda: signed_at(sign, replace(question, run="mine")),
        "have less noise signed": lambda: signed_at(sign, replace(question, plan=less)),
        "have another model signed": lambda: signed_at(sign, replace(question, model="00" * 32)),
        "have one more round signed": lambda: signed_at(sign, replace(question, round=2)),
    }
    found = {"user": os.getuid()}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "done"
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
    Path(given["out"]).write_text(json.dumps(found))
'''


def beginning(user: str) -> list[str]:
    return become(USERS[user], *([ASK] if user == "fl-server" else []))


def typed(place: Path, user: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A `fedlgm` command of one of the server's users."""
    home = place / f"home-{user}"
    home.mkdir(exist_ok=True)
    os.chown(home, USERS[user], USERS[user])
    command = [*beginning(user), "sh", "-c", '"$0" "$@"', str(place / "bin/fedlgm"), *arguments]
    return subprocess.run(
        command,
        env=environment(None) | {"HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    place = Path(
        tempfile.mkdtemp(prefix="fedlgm-")
    )  # pytest's own folders are closed to other users
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def lab(place: Path) -> Iterator[DeploymentFolder]:
    """A deployment whose server is three users', as the page's commands make it, and one node
    beyond its proxy."""
    python = interpreter(become(USERS["fl-server"]))
    if python is None:
        pytest.skip("another user cannot run a Python with Flower on this machine")
    write_commands(place / "bin", python)
    shutil.copy(Path(sys.executable).with_name("caddy"), place / "bin/caddy")
    example = recipes.load("nodes", SETS)
    folder = create(place / "lab", 1, example=example, hosts=[HOST], policy={"epsilon": 60.0})
    (block,) = re.findall(
        r"^```bash title=\"owners of the server\"\n(.*?)^```", PAGE.read_text(), re.M | re.DOTALL
    )
    for name, number in {**USERS, "fl-ask": ASK}.items():  # there are no users of these names here
        block = block.replace(name, str(number))
    subprocess.run(["bash", "-e", "-c", block], cwd=folder.path, check=True)
    for unit_name, script in (
        ("superlink", folder.server / "start-superlink.sh"), ("signer", folder.signer.script),
        ("proxy", folder.proxy / "start-proxy.sh"),
    ):  # fmt: skip
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read(folder.path / "systemd" / f"fedlgm-{unit_name}.service")
        started = f"exec env HOME=/nonexistent {' '.join(beginning(unit['Service']['User']))} "
        text = script.read_text().replace("exec ", started)
        script.write_text(text.replace("BIN=", f'FEDLGM_BIN="{place / "bin"}"\nBIN=', 1))
    try:
        processes.up(folder)
        yield folder
    finally:
        processes.down(folder)


def rows(lab: DeploymentFolder) -> list[object]:
    with lab.node("node0").service.ledger(readonly=True) as ledger:
        return list(ledger.rows())


def test_a_run_has_to_be_registered_by_the_signers_user(lab, place):
    sets = [part for one in SETS for part in ("--set", one)]
    refused = typed(place, "fl-server", "deploy", "run", "nodes", str(lab.path), *sets)
    assert refused.returncode == 2, refused.stderr
    assert "is not registered" in refused.stderr
    assert rows(lab) == []
    registered = typed(place, "fl-sign", "deploy", "register", "nodes", str(lab.path), *sets)
    assert registered.returncode == 0, registered.stderr
    done = typed(place, "fl-server", "deploy", "run", "nodes", str(lab.path), "--json", *sets)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 1
    assert len(rows(lab)) == 1


def test_a_hostile_server_app_takes_no_key_and_has_nothing_signed(lab, place, tmp_path):
    app, out = tmp_path / "app", place / "home-fl-server" / "found.json"
    shutil.copytree(submit.APP, app)
    (app / "server_app.py").write_text(SERVER)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(
        text.replace('deployment = ""', 'attack = ""').replace("fedlgm-nodes", "evil")
    )
    (run,) = (path.name for path in lab.runs.iterdir())
    registered = json.loads((lab.signer.runs / f"{run}.json").read_text())
    from fedlgm_nodes.deploy.server_entry import DeployedAssembly
    from simulations.runs.folder import RunFolder

    plan = DeployedAssembly(RunFolder.open(lab.runs / run).recipe()).privacy.first_plan().to_json()
    question = {
        "run": run,
        "round": 1,
        "client": 0,
        "plan": plan,
        "model": "ab" * 32,
        "work": registered["work"],
        "nonce": "00",
        "service": "cd" * 32,
    }
    attack = {
        "lab": str(lab.path),
        "signer": process_record.read(lab)["signer"][0],
        "out": str(out),
        "question": question,
    }
    (place / "attack.json").write_text(json.dumps(attack))
    (tmp_path / "config.toml").write_text(f'attack = "{place / "attack.json"}"\n')
    flower = Flower(lab)
    flower.json("run", str(app), CONNECTION, "--run-config", str(tmp_path / "config.toml"))
    wait_until(out.exists, "the app's findings", every=0.5)
    found = json.loads(out.read_text())
    assert found.pop("user") == USERS["fl-server"]  # it did run
    refusals = {name: said for name, said in found.items() if name.startswith("have ")}
    assert len(refusals) == 4
    assert all("does not sign this one" in said for said in refusals.values()), refusals
    others = {name: said.partition(":")[0] for name, said in found.items() if name not in refusals}
    assert len(others) == 11
    assert set(others.values()) == {"PermissionError"}, others
    assert len(rows(lab)) == 1


def test_other_machines_reach_what_supernodes_call_and_nothing_else(lab, tmp_path):
    """The node is connected this way; whoever tries more is refused by the proxy, and there is no
    other way in."""
    settings, roles = lab.settings(), process_record.running(lab)
    assert Flower(lab).online() == 1
    listening = {
        (role, address.laddr.ip)
        for role in ("superlink", "signer", "proxy")
        for one in with_children(roles[role])
        for address in one.net_connections(kind="inet")
        if address.status == psutil.CONN_LISTEN
    }
    assert {ip for role, ip in listening if role == "superlink"} == {"127.0.0.1"}
    assert not [ip for role, ip in listening if role == "signer"]
    trusted = ssl.create_default_context(cafile=str(lab.authority / "ca.crt"))
    for path in (
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/health",
    ):
        link = http.client.HTTPSConnection(HOST, settings.port, context=trusted, timeout=LIMIT_S)
        link.request("POST", path, b"")
        assert link.getresponse().status == 403
        link.close()
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "outside"\n[superlink.outside]\naddress = '
        f'"{HOST}:{settings.port}"\n'
        f'root-certificates = "{lab.authority / "ca.crt"}"\n'
    )
    said = FlwrCommand(environment(home)).text(
        "run", str(submit.APP), "outside", "--format", "json"
    )
    assert "run-id" not in said
