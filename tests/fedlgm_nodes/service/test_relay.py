"""What stands between Flower and the service: it needs no torch, holds nothing, and changes
nothing."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task

from clients import flower_private
from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.frames import BODY, HEADER, MASK
from fedlgm_nodes.service import executor, relay
from fedlgm_nodes.service.relay import forward
from tests.support import nodes
from tests.support.nodes import ask, make_node, served
from tests.support.patience import LIMIT_S


def content(header: str) -> RecordDict:
    return message(header, 0)


def message(header: str, key: int) -> RecordDict:
    records = {
        name: ConfigRecord(values) for name, values in frames.body_records(nodes.BODY, key).items()
    }
    return RecordDict({wire.CONFIG: ConfigRecord({HEADER: header, MASK: key}), **records})


def header() -> str:
    question = nodes.Question(
        "run", 1, 0, nodes.plan().to_json(), protocol.sha256(nodes.BODY), nodes.WORK, "00"
    )
    return json.dumps(question.header())


def test_the_relay_passes_on_what_the_service_says(tmp_path, monkeypatch):
    with served(make_node(tmp_path / "node")) as folder:
        reply = forward(content(header()), folder.socket)
        said, body = ask(folder)
        passed = json.loads(reply.config_records[wire.CONFIG][HEADER])
        assert passed["question"] == said["question"]
        assert passed["signature"] == said["signature"]
        assert frames.body_of(reply.config_records, 0) == body
        assert list(reply) == [wire.CONFIG]
        monkeypatch.setattr(frames, "RECORD_BYTES", 64)
        hidden = message(header(), 12345)
        assert len(hidden) > 2
        reply = forward(hidden, folder.socket)
        assert len(reply) > 1
        assert frames.body_of(reply.config_records, 12345) == body
        damaged = message(header(), 0)
        damaged.config_records[f"{BODY}.1"][BODY] = 1.0
        with pytest.raises(RunError, match="must be bytes"):
            forward(damaged, folder.socket)
        refused = forward(content(header().replace('"round": 1', '"round": 0')), folder.socket)
        assert json.loads(refused.config_records[wire.CONFIG][HEADER])["code"] == "malformed"
        assert list(refused) == [wire.CONFIG]
        assert BODY not in refused.config_records[wire.CONFIG]
        with pytest.raises(RunError, match="holds none"):
            forward(RecordDict(), folder.socket)
    with pytest.raises(RunError, match="cannot be reached"):
        forward(content(header()), folder.socket)


@pytest.mark.parametrize(
    "module",
    [
        "fedlgm_nodes.service.relay",
        "fedlgm_nodes.service.executor",
        "fedlgm_nodes.protocol.messages",
    ],
)
def test_no_torch_is_imported(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_version_of_flower_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flower_private, "version_of", lambda package: "1.44.0")
    arguments = [
        "--supernode",
        "127.0.0.1:1",
        "--secret-file",
        str(tmp_path / "s"),
        "--socket",
        "x",
    ]
    assert executor.main(arguments) == 2
    assert "flwr 1.44.0 is installed" in capsys.readouterr().err


@pytest.fixture
def supernode() -> Iterator[tuple[str, list[str], threading.Event]]:
    """A SuperNode that always has a task and, until the event, keeps whoever asks for its message
    waiting."""
    claimed, go = list[str](), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            if self.path.endswith("acquire-task"):
                claimed.append(f"{len(claimed):032x}")
                body = AcquireTaskResponse(
                    token=claimed[-1], task=Task(task_id=len(claimed))
                ).SerializeToString()
            elif "heartbeat" not in self.path:
                go.wait(LIMIT_S)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", claimed, go
    go.set()
    server.shutdown()
    server.server_close()


def test_no_more_tasks_are_claimed_than_are_worked_on(supernode, tmp_path):
    """The SuperNode gives up a claimed task of which it hears nothing for half a minute; and a full
    executor ends."""
    address, claimed, _ = supernode
    made, stop = (
        executor.Executor(address, b"secret", tmp_path / "none", poll=0.01),
        threading.Event(),
    )
    working = threading.Thread(target=made.run, args=(stop,), daemon=True)
    working.start()
    deadline = time.monotonic() + LIMIT_S
    while len(claimed) < executor._TASKS and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    assert len(claimed) == executor._TASKS
    stop.set()
    working.join(10)
    assert not working.is_alive()


@pytest.mark.parametrize(("secret", "message"), [(None, "cannot be read"), (b"", "is empty")])
def test_a_secret_that_cannot_be_used(tmp_path, capsys, secret, message):
    if secret is not None:
        (tmp_path / "s").write_bytes(secret)
    arguments = [
        "--supernode",
        "127.0.0.1:1",
        "--secret-file",
        str(tmp_path / "s"),
        "--socket",
        "x",
    ]
    assert executor.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [(frames.NoService("nobody listens"), "nobody listens"), (KeyError("x"), "KeyError: 'x'")],
)
def test_a_failed_task_says_the_reason_without_names_of_this_librarys_errors(
    monkeypatch, error, said
):
    ended = []
    connection = SimpleNamespace(
        pull=lambda: (SimpleNamespace(content=None), None),
        push=lambda *given: None,
        close=lambda: None,
        end=lambda context, failure: ended.append(failure),
    )

    def fail(*given):
        raise error

    monkeypatch.setattr(
        executor, "RuntimeConnection", SimpleNamespace(working=lambda *given: connection)
    )
    monkeypatch.setattr(executor, "failed_reply", lambda message, failure: failure)
    monkeypatch.setattr(executor, "_heartbeat", contextlib.nullcontext)
    monkeypatch.setattr(relay, "forward", fail)
    executor.Executor._work(SimpleNamespace(_supernode="", _socket=""), "token")
    assert ended == [said]
