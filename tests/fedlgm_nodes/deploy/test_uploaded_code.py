"""Uploaded code inside a real SuperNode of another user: what it can reach of the node, and that
the relay works there.

For nodes without the executor (`docs/how-to/operate-a-node.md`, "Without the executor"): Flower
runs whatever app was submitted, as the SuperNode's user.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import LIMIT_S

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import process_record, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower
from simulations.config import recipe as recipes
from simulations.engines.flower_command import CONNECTION
from tests.support.other_users import become, interpreter, write_commands

STRANGER, GROUP = 65123, 65124
AS_STRANGER = become(STRANGER, GROUP)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(
        shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed"
    ),
]

SERVER = '''
"""Sends one message to the node and writes down what its app says."""
import json, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    given = json.loads(open(context.run_config["attack"]).read())
    (node,) = [node.node_id for node in grid.get_nodes()]
    content = RecordDict({"config": ConfigRecord({"attack": json.dumps(given)})})
    sent = list(grid.push_messages([Message(content, node, "train", group_id="x")]))
    deadline, found = time.monotonic() + 500, None
    while found is None and time.monotonic() < deadline:
        for reply in grid.pull_messages(sent):
            found = (json.loads(reply.content.config_records["config"]["found"]) if not reply.has_error()
                     else {"error": reply.error.reason})
        time.sleep(0.2)
    open(given["out"], "w").write(json.dumps(found))
'''
CLIENT = '''
"""Takes what it finds, as whatever user the SuperNode gives it."""
import json, os, signal, socket
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    given = json.loads(message.content.config_records["config"]["attack"])
    node, pid = Path(given["node"]), given["service"]
    state = node / "service/state"
    attempts = {
        "read the data": lambda: (node / "data/examples.npz").read_bytes(),
        "list the data": lambda: os.listdir(node / "data"),
        "link to the data": lambda: os.link(node / "data/examples.npz", "/tmp/taken-" + str(os.getpid())),
        "read the policy": lambda: (node / "service/policy.toml").read_bytes(),
        "change the policy": lambda: (node / "service/policy.toml").write_text(""),
        "read the noise key": lambda: (state / "noise.key").read_bytes(),
        "read the service key": lambda: (state / "service.key").read_bytes(),
        "read the ledger": lambda: (state / "ledger.sqlite").read_bytes(),
        "remove the ledger": lambda: (state / "ledger.sqlite").unlink(),
        "write the witness": lambda: (node / "service/witness/seen.json").write_text("{}"),
        "remove the socket": lambda: (node / "service/run/release.sock").unlink(),
        "put a socket in its place": lambda: socket.socket(socket.AF_UNIX).bind(str(node / "service/run/x.sock")),
        "rename the service": lambda: (node / "service").rename(node / "gone"),
        "change a start script": lambda: (node / "start-service.sh").write_text(""),
        "kill the service": lambda: os.kill(pid, signal.SIGKILL),
        "read its memory": lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
        "read its environment": lambda: Path(f"/proc/{pid}/environ").read_bytes(),
        "read its open files": lambda: os.listdir(f"/proc/{pid}/fd"),
        "become root": lambda: os.setuid(0),
        "read the server's key": lambda: (node.parents[1] / "signer/question.key").read_bytes(),
    }
    found = {"user": os.getuid()}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "done"
        except BaseException as error:
            found[name] = type(error).__name__
    # What is given to this user can be taken, as the page says: the SuperNode's own key.
    found["supernode.key"] = len((node / "supernode.key").read_bytes()) > 0
    record = ConfigRecord({"found": json.dumps(found)})
    return Message(RecordDict({"config": record}), reply_to=message)
'''


@pytest.fixture(scope="module")
def lab() -> Iterator[DeploymentFolder]:
    """One node whose SuperNode runs uploaded apps as a user that may connect to the service's
    socket, no more."""
    python = interpreter(AS_STRANGER)
    if python is None:
        pytest.skip("another user cannot run a Python with Flower on this machine")
    place = Path(
        tempfile.mkdtemp(prefix="fedlgm-")
    )  # pytest's own folders are closed to other users
    place.chmod(0o755)
    commands = place / "bin"
    write_commands(commands, python)
    recipe = recipes.load("nodes", ["model.hidden=[8]", "training.epochs=1"])
    folder = create(place / "lab", 1, example=recipe, policy={"epsilon": 60.0})
    node = folder.node("node0")
    policy = node.service.policy_file
    policy.write_text(policy.read_text().replace('group = ""', f'group = "{GROUP}"'))
    node.service.socket.parent.chmod(0o750)
    node.service.path.chmod(0o711)
    os.chown(node.service.socket.parent, -1, GROUP)
    for own in (node.flower_key, node.ca):
        os.chown(own, STRANGER, STRANGER)
    home = node.path / "flower"
    home.mkdir(exist_ok=True)
    os.chown(home, STRANGER, STRANGER)
    script = node.script("supernode").read_text()
    script = script.replace(
        " \\\n    --isolation process --superexec-auth-secret-file supernode.secret",
        f" \\\n    --node-config 'release-socket=\"{node.service.socket}\"'",
    )
    script = script.replace(
        '"$BIN/python" -m fedlgm_nodes.service.supernode', '"$BIN/flower-supernode"'
    )
    script = script.replace("BIN=", f'FEDLGM_BIN="{commands}"\nBIN=')
    script = script.replace("exec ", f'export HOME="$FLWR_HOME"; exec {" ".join(AS_STRANGER)} ')
    node.script("supernode").write_text(script)
    node.script("executor").write_text("#!/usr/bin/env bash\nexec sleep infinity\n")
    try:
        try:
            processes.up(folder)
        except RunError:
            raise AssertionError((folder.logs / "node0-supernode.log").read_text()) from None
        yield folder
    finally:
        processes.down(folder)
        shutil.rmtree(place)


def test_uploaded_code_reaches_nothing_of_the_node(lab, tmp_path):
    app, out = tmp_path / "app", tmp_path / "out.json"
    shutil.copytree(submit.APP, app)
    (app / "server_app.py").write_text(SERVER)
    (app / "client_app.py").write_text(CLIENT)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(
        text.replace('deployment = ""', 'attack = ""').replace("fedlgm-nodes", "evil")
    )
    service = process_record.read(lab)["node0-service"][0]
    given = {"node": str(lab.node("node0").path), "service": service, "out": str(out)}
    (tmp_path / "attack.json").write_text(json.dumps(given))
    (tmp_path / "config.toml").write_text(f'attack = "{tmp_path / "attack.json"}"\n')
    flower = Flower(lab)
    run = str(
        flower.json("run", str(app), CONNECTION, "--run-config", str(tmp_path / "config.toml"))[
            "run-id"
        ]
    )
    deadline = time.monotonic() + LIMIT_S
    while not out.exists():
        assert time.monotonic() < deadline, flower.text("log", run, CONNECTION, "--show")
        time.sleep(0.5)
    found = json.loads(out.read_text())
    assert found.pop("user") == STRANGER  # it did run, on the node
    assert found.pop("supernode.key")
    assert len(found) == 20
    assert {name: said for name, said in found.items() if said != "PermissionError"} == {}
    assert processes.hello(lab, "node0")["ok"]
    with lab.node("node0").service.ledger(readonly=True) as ledger:
        assert ledger.rows() == []


def test_the_relay_works_as_that_user(lab):
    recipe = recipes.load(
        "nodes",
        [
            "model.hidden=[8]",
            "training.epochs=1",
            "federation.rounds=1",
            "privacy.max_participations=1",
        ],
    )
    result = submit.run(lab, recipe)
    assert result["rounds"] == 1
    with lab.node("node0").service.ledger(readonly=True) as ledger:
        assert len(ledger.rows()) == 1
