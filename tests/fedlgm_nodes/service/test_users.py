"""What another user of the node's machine can do: connect, if let; nothing else. Needs root, to
become another user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.service.folder import NodeFolder
from tests.support.nodes import edit, hello, make_node, served
from tests.support.patience import LIMIT_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
STRANGER, GROUP = 65123, 65124


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach, as pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="fedlgm-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_stranger(
    actions: dict[str, Callable[[], object]], groups: tuple[int, ...] = ()
) -> dict[str, str]:
    """Name of the error that each action of another user ends with; "" if it succeeds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = {}
        try:
            os.setgroups(list(groups))
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            for name, action in actions.items():
                try:
                    action()
                    said[name] = ""
                except BaseException as error:
                    said[name] = f"{type(error).__name__}: {error}"[:500]
        finally:
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert list(said) == list(actions)
    return said


def connect(folder: NodeFolder) -> dict[str, object]:
    return hello(folder)


def test_another_user_reaches_nothing_of_the_node(place):
    folder = make_node(place / "node")
    data = place / "node.npz"
    data.chmod(0o600)
    with served(folder):
        service = psutil.Process().children()[-1].pid
        attempts: dict[str, Callable[[], object]] = {
            "read the data": lambda: data.read_bytes(),
            "read the policy": lambda: folder.policy_file.read_bytes(),
            "change the policy": lambda: folder.policy_file.write_text(""),
            "list the state": lambda: os.listdir(folder.path / "state"),
            "read the noise key": lambda: (folder.path / "state/noise.key").read_bytes(),
            "read the service key": lambda: (folder.path / "state/service.key").read_bytes(),
            "read the ledger": lambda: folder.ledger_file.read_bytes(),
            "read the witness": lambda: folder.witness_file.read_bytes(),
            "write the witness": lambda: folder.witness_file.write_text("{}"),
            "remove the ledger": lambda: folder.ledger_file.unlink(),
            "remove the socket": lambda: folder.socket.unlink(),
            "put a socket in its place": lambda: socket.socket(socket.AF_UNIX).bind(
                str(folder.path / "run/x.sock")
            ),
            "rename the folder": lambda: folder.path.rename(place / "gone"),
            "make a file": lambda: (folder.path / "x").write_text("x"),
            "kill the service": lambda: os.kill(service, signal.SIGKILL),
            "stop the service": lambda: os.kill(service, signal.SIGSTOP),
            "read its memory": lambda: os.open(f"/proc/{service}/mem", os.O_RDONLY),
            "read its environment": lambda: Path(f"/proc/{service}/environ").read_bytes(),
            "read its open files": lambda: os.listdir(f"/proc/{service}/fd"),
            "become root": lambda: os.setuid(0),
            "connect": lambda: connect(folder),
        }
        for name, said in as_stranger(attempts).items():
            assert said.startswith("PermissionError") or "this user may not use it" in said, (
                name,
                said,
            )
        assert hello(folder)["ok"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_group_of_the_socket_may_ask_and_only_ask(place, umask):
    before = os.umask(umask)
    try:
        folder = make_node(place / "node")
    finally:
        os.umask(before)
    edit(folder, 'group = ""', f'group = "{GROUP}"')
    os.chown(folder.path / "run", -1, GROUP)
    with served(folder):
        attempts: dict[str, Callable[[], object]] = {
            "connect": lambda: connect(folder),
            "remove the socket": lambda: folder.socket.unlink(),
            "read the policy": lambda: folder.policy_file.read_bytes(),
        }
        connected, *others = as_stranger(attempts, (GROUP,)).values()
        assert connected == ""
        assert all(said.startswith("PermissionError") for said in others)


def test_the_policy_names_the_users_that_may_ask(place):
    folder = make_node(place / "node")
    edit(folder, "uids = []", f"uids = [{STRANGER + 1}]")
    with served(folder):
        assert hello(folder)["code"] == "peer"
        assert (
            frames.exchange(
                str(folder.socket), {"protocol": protocol.PROTOCOL}, b"", timeout=LIMIT_S
            )[0]["code"]
            == "peer"
        )
