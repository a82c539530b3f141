"""The proxy before a SuperLink, as `deploy init` configures it: a real Caddy before a server that
takes everything."""

from __future__ import annotations

import http.client
import http.server
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from patience import LIMIT_S

from fedlgm_nodes.deploy.create import create
from simulations.engines.flower_processes import free_ports

BESIDE = [
    "/v1/control/start-run",
    "/v1/control/list-runs",
    "/v1/runtime/acquire-task",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "/v1/fleet/",
    "/v1/fleet",
    "/",
    "/health",
    "/docs",
    "/openapi.json",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "//v1/control/start-run",
    "/v1/fleet/pull-messages/../../control/stop-run",
    "/v1/fleet/pull-messages%2f..%2f..%2fcontrol%2fstop-run",
    "/v1/control/start-run?/v1/fleet/pull-messages",
    "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages?x=1",
    "/V1/FLEET/pull-messages",
    "/v1/fleet/pull%2dmessages",
    "/v1/fleet//pull-messages",
    "/v1/fleet/pull-messages;/../../control/start-run",
    "https://localhost/v1/control/start-run",
]


@pytest.fixture(scope="module")
def reached(tmp_path_factory) -> Iterator[tuple[int, list[str], ssl.SSLContext]]:
    """The proxy's port, what came through, and what a node trusts."""
    seen: list[str] = []

    class Everything(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append(f"{self.command} {self.path}")
            self.send_response(200)
            self.end_headers()

        do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = answer

        def log_message(self, *given: object) -> None: ...

    place = tmp_path_factory.mktemp("p")
    folder = create(place / "lab", 1, hosts=["fl.example.org"], port=free_ports(1)[0])
    inner = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inner.load_cert_chain(folder.server / "tls.crt", folder.server / "tls.key")
    settings = folder.settings()
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", settings.superlink), Everything)
    upstream.socket = inner.wrap_socket(upstream.socket, server_side=True)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    with (place / "log").open("w") as log:
        proxy = subprocess.Popen([folder.proxy / "start-proxy.sh"], stdout=log, stderr=log)
    trusted = ssl.create_default_context(cafile=str(folder.node("node0").ca))
    try:
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert proxy.poll() is None, (place / "log").read_text()
            assert time.monotonic() < deadline
            try:
                asked(settings.port, trusted, "GET", "/")
                break
            except OSError:
                time.sleep(0.05)
        yield settings.port, seen, trusted
    finally:
        proxy.terminate()
        proxy.wait(LIMIT_S)
        upstream.shutdown()
        upstream.server_close()


def asked(port: int, trusted: ssl.SSLContext, method: str, path: str) -> int:
    link = http.client.HTTPSConnection("localhost", port, context=trusted, timeout=LIMIT_S)
    try:
        link.putrequest(method, path, skip_accept_encoding=True)
        link.putheader("Content-Length", "2")
        link.endheaders(b"{}")
        return link.getresponse().status
    finally:
        link.close()


def test_what_a_supernode_calls_comes_through(reached):
    port, seen, trusted = reached
    seen.clear()
    for name in (
        "activate-node",
        "pull-messages",
        "push-messages",
        "send-node-heartbeat",
        "pull-object",
    ):
        assert asked(port, trusted, "POST", f"/v1/fleet/{name}") == 200
        assert seen[-1] == f"POST /v1/fleet/{name}"


@pytest.mark.parametrize("path", BESIDE)
def test_nothing_else_comes_through(reached, path):
    port, seen, trusted = reached
    seen.clear()
    for method in ("POST", "GET", "PUT"):
        assert asked(port, trusted, method, path) in (400, 403, 404, 421)
    assert seen == []


def test_other_methods_do_not_come_through(reached):
    port, seen, trusted = reached
    seen.clear()
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert asked(port, trusted, method, "/v1/fleet/pull-messages") == 403
    assert seen == []
