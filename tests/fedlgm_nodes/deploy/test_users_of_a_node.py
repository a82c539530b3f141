"""A node as its page and its units say: three processes under three users, and what each can read
of the others'."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedlgm_nodes.deploy import process_record, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from simulations.config import recipe as recipes
from tests.support.other_users import become, interpreter, write_commands

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(
        shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed"
    ),
]

PAGE = Path(__file__).parents[3] / "docs/how-to/operate-a-node.md"
USERS = {"fl-data": 65131, "fl-node": 65132, "fl-app": 65133}
RELAY = 65134
RECIPE = [
    "model.hidden=[8]",
    "training.epochs=1",
    "federation.rounds=1",
    "privacy.max_participations=1",
]


def beginning(user: str) -> list[str]:
    return become(USERS[user], *([] if user == "fl-node" else [RELAY]))


def may(user: str, what: str, path: Path) -> bool:
    """Whether a user may "r"ead or "w"rite a file."""
    return (
        subprocess.run(
            [*beginning(user), "sh", "-c", f'test -{what} "$0"', path], check=False
        ).returncode
        == 0
    )


@pytest.fixture(scope="module")
def lab() -> Iterator[DeploymentFolder]:
    """One node whose files belong to whom the page's commands give them, started as its units
    say."""
    python = interpreter(become(USERS["fl-app"]))
    if python is None:
        pytest.skip("another user cannot run a Python with Flower on this machine")
    place = Path(
        tempfile.mkdtemp(prefix="fedlgm-")
    )  # pytest's own folders are closed to other users
    place.chmod(0o755)
    write_commands(place / "bin", python)
    before = os.umask(0o077)
    try:
        folder = create(
            place / "lab", 1, example=recipes.load("nodes", RECIPE), policy={"epsilon": 60.0}
        )
    finally:
        os.umask(before)
    node = folder.node("node0")
    (block,) = re.findall(
        r"^```bash title=\"owners\"\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    for name, number in {
        **USERS,
        "fl-relay": RELAY,
    }.items():  # there are no users of these names here
        block = block.replace(name, str(number))
    subprocess.run(["bash", "-e", "-c", block], cwd=node.path, check=True)
    for role in ("service", "supernode", "executor"):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read(folder.path / "systemd" / f"fedlgm-node0-{role}.service")
        script = node.script(role)
        started = f"exec env HOME=/nonexistent {' '.join(beginning(unit['Service']['User']))} "
        text = script.read_text().replace("exec ", started)
        script.write_text(text.replace("BIN=", f'FEDLGM_BIN="{place / "bin"}"\nBIN=', 1))
    try:
        processes.up(folder)
        yield folder
    finally:
        processes.down(folder)
        shutil.rmtree(place)


def test_a_node_of_three_users_answers(lab):
    assert submit.run(lab, recipes.load("nodes", RECIPE))["rounds"] == 1
    with lab.node("node0").service.ledger(readonly=True) as ledger:
        assert len(ledger.rows()) == 1
    for role, user in (("service", "fl-data"), ("supernode", "fl-node"), ("executor", "fl-app")):
        process = psutil.Process(process_record.read(lab)[f"node0-{role}"][0])
        assert set(process.uids()) == {USERS[user]}


def test_each_user_reads_what_is_his(lab):
    node = lab.node("node0")
    owned = {
        "fl-data": [
            node.path / "data/examples.npz",
            node.service.policy_file,
            node.service.ledger_file,
            node.service.path / "state/noise.key",
            node.service.path / "state/service.key",
            node.service.witness_file,
        ],
        "fl-node": [node.flower_key, node.secret("supernode"), node.flower_home],
        "fl-app": [node.secret("executor")],
    }
    for owner, files in owned.items():
        for file in files:
            assert [user for user in USERS if may(user, "r", file)] == [owner], file
            assert [user for user in USERS if may(user, "w", file)] == [owner], file
    assert [user for user in USERS if may(user, "w", node.service.socket)] == ["fl-data", "fl-app"]
    assert [user for user in USERS if may(user, "w", node.script("service"))] == []
