"""Health of a node or a federation: figures, faults, alerts, and the two pages for a monitor.

A separate process, the watch, reads the files and greets the service. The service therefore needs
no further interface, and the watch notices if the service dies. The watch serves the pages `/ready`
and `/metrics` (Prometheus's text format) on 127.0.0.1 or on a Unix socket, and no other page.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from fedlgm.errors import ConfigError, FedlgmError, RunError
from fedlgm.files import explain_failure
from fedlgm_nodes.deploy.certificates import ending
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.listening import listener_fault
from fedlgm_nodes.deploy.pages import counted
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.record import Record

LEAST_DISK = 1 << 30  # bytes
_LARGEST_SHARE = 0.9  # an alert is raised once this share of a budget is spent
# seconds that a clock may jump; a SuperLink refuses a SuperNode whose clock is further ahead
_CLOCK_S = 5.0
_HELLO_S = 15.0
_COMMAND_S = 60.0
_PREFIX = "fedlgm_"


@dataclass
class Health:
    """The findings of one check of a node or a federation.

    Attributes:
        figures: numbers by metric. A metric's name may end with labels: 'up{node="a"}'.
        faults: short name of a fault -> what is wrong and what to do.
        ready: whether the node's service, or the federation's SuperLink, answers.
        line: one-line summary for a terminal.
    """

    figures: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    ready: bool = False
    line: str = ""

    def metrics(self) -> str:
        """The figures in Prometheus's text format."""
        names = dict.fromkeys(name.partition("{")[0] for name in self.figures)
        lines = [
            line
            for name in names
            for line in (
                f"# TYPE {_PREFIX}{name} gauge",
                *(
                    f"{_PREFIX}{full} {value:.17g}"
                    for full, value in self.figures.items()
                    if full.partition("{")[0] == name
                ),
            )
        ]
        return "\n".join(lines) + "\n"

    def add_budget(self, answer: dict[str, Any], node: str) -> None:
        """Add the figures of a node's budget, as its service states them, and a fault if the budget
        is nearly or completely spent.
        """
        share = answer["epsilon_spent"] / answer["epsilon"]
        for name, value in (
            ("budget_spent_share", share),
            ("epsilon_spent", answer["epsilon_spent"]),
            ("epsilon_budget", answer["epsilon"]),
            ("releases_left", answer["releases_left"]),
        ):
            self.figures[f'{name}{{node="{node}"}}'] = float(value)
        if share >= _LARGEST_SHARE or not answer["releases_left"]:
            self.faults[f"{node} budget"] = (
                f"{node} has spent {share:.0%} of its epsilon of {answer['epsilon']:g}, and "
                f"{answer['releases_left']} releases are left: its operator may raise [privacy] "
                "epsilon, which weakens the protection of its data"
            )

    def add_disk(self, path: Path) -> None:
        """Add the free space of the disk that holds `path`, and a fault if there is too little."""
        free = shutil.disk_usage(path).free
        self.figures["disk_free_bytes"] = float(free)
        if free < LEAST_DISK:
            self.faults["disk"] = (
                f"{free / 2**20:.0f} MiB are free; at least {LEAST_DISK >> 20} are needed"
            )

    def add_certificate(self, file: Path) -> None:
        """Add the number of days until a certificate expires, and a fault for each of the limits of
        60, 14 and 1 days that has been reached.
        """
        if file.is_file():
            days, passed, said = ending(file)
            self.figures[f'certificate_days{{file="{file.name}"}}'] = float(days)
            self.faults |= {f"{file.name} {limit} days": said for limit in passed}

    def add_certificates(self, folder: DeploymentFolder) -> None:
        """Add those certificates of a server that this user may read."""
        for file in (folder.server / "ca.crt", folder.server / "tls.crt", folder.proxy / "tls.crt"):
            if os.access(file, os.R_OK):
                self.add_certificate(file)


class NodeLook:
    """Checks one node's service and files.

    Args:
        folder: the node's folder.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder, self._answer = folder, dict[str, Any]()
        self._record: Record | None = None
        self._clock = time.time() - time.monotonic()

    def __call__(self) -> Health:
        """Check the service and the files once, and return the findings."""
        folder, health = self._folder, Health()
        self._add_service(health)
        try:
            self._add_record(health)
        except FedlgmError as error:
            health.faults["record"] = str(error)
        except OSError as error:
            health.faults["record"] = explain_failure("the record cannot be read", error)
        health.add_disk(folder.path)
        health.add_certificate(folder.path.resolve().parent / "ca.crt")
        jump = time.time() - time.monotonic() - self._clock
        health.figures["clock_jump_seconds"] = jump
        if abs(jump) > _CLOCK_S:
            health.faults["clock"] = (
                f"the clock has moved by {jump:.0f} s against this machine's timer since the watch "
                "began: synchronise it, then start the watch again"
            )
        return health

    def _add_service(self, health: Health) -> None:
        why = ""
        try:
            why = listener_fault(self._folder.socket)
            if not why:
                answer, _ = frames.exchange(
                    str(self._folder.socket), protocol.HELLO, b"", timeout=_HELLO_S
                )
                if answer.get("ok"):
                    self._answer = answer
                elif answer.get("code") not in protocol.TRANSIENT:
                    why = f"the service refuses ({answer.get('code')}): {answer.get('why')}"
        except frames.NoService as error:
            why = f"{error}, or start it: fedlgm node serve {self._folder.path}"
        except RunError:  # while the service trains, a greeting waits for its turn
            pass
        health.ready = not why
        health.figures["up"] = float(health.ready)
        if why:
            health.faults["service"] = why
        health.line = "answers" if health.ready else "DOES NOT ANSWER"
        if self._answer:
            health.add_budget(self._answer, self._answer["name"])
            health.line += (
                f", epsilon {self._answer['epsilon_spent']:.4g} of {self._answer['epsilon']:g} "
                f"spent, {self._answer['releases_left']} releases left"
            )

    def _add_record(self, health: Health) -> None:
        if not self._answer or not self._folder.record_file.exists():
            return
        if self._record is None:
            self._record = self._folder.record(self._answer["position"]["ledger"])
        record = self._record
        record.refresh()
        kinds = [row["kind"] for row in record.rows]
        waiting = sum(record.state(work) == "waits" for work in record.requests)
        health.figures |= {
            "answers": float(kinds.count("release")),
            "refusals": float(kinds.count("refusal")),
            "requests_waiting": float(waiting),
            "paused": float(record.paused is not None),
        }
        health.line += f", {counted(kinds.count('refusal'), 'refusal')}" + ", PAUSED" * bool(
            record.paused
        )
        if waiting:
            health.faults["requests"] = (
                f"{waiting} requests wait for an approval: fedlgm node requests {self._folder.path}"
            )


def look_at_deployment(folder: DeploymentFolder) -> Health:
    """Check the server and the nodes on this machine once, and return the findings."""
    from fedlgm_nodes.deploy.deployment_status import status
    from fedlgm_nodes.deploy.process_faults import faults

    report, health = status(folder), Health()
    health.faults |= faults(folder)
    health.ready = report["superlink"]
    if not health.ready:
        health.faults.setdefault("superlink", f"the SuperLink: {report['problem']}")
    health.figures |= {"up": float(health.ready), "nodes_connected": float(report["connected"])}
    health.figures["nodes"] = float(len(report["nodes"]))
    for node in report["nodes"]:
        if node["epsilon"] is not None:
            health.add_budget(node, node["name"])
        if node["online"] is False:
            health.faults[f"{node['name']} connection"] = (
                f"{node['name']} is not connected since {node['since']}"
            )
    health.add_disk(folder.path)
    health.add_certificates(folder)
    health.line = (
        f"SuperLink {'answers' if health.ready else 'DOES NOT ANSWER'}, {report['connected']} of "
        f"{len(report['nodes'])} nodes connected"
    )
    return health


class Alerts:
    """Reports each fault as a line of JSON, once when the fault appears and once when it has gone.

    Args:
        say: called with each line.
        command: command that receives each line on its standard input; empty for none.

    Raises:
        ConfigError: there is no such command.
    """

    def __init__(self, say: Callable[[str], None], command: str = "") -> None:
        self._say, self._faults, self._command = say, dict[str, str](), shlex.split(command)
        if self._command and shutil.which(self._command[0]) is None:
            raise ConfigError(f"--alert-command: there is no command {self._command[0]!r}")

    def __call__(self, faults: dict[str, str]) -> None:
        """Report the differences between these faults and the faults of the last call."""
        before, self._faults = self._faults, faults
        for name in before.keys() - faults.keys():
            self._report(name, "cleared", before[name])
        for name in faults.keys() - before.keys():
            self._report(name, "raised", faults[name])

    def _report(self, name: str, state: str, why: str) -> None:
        alert = {"at": datetime.now(UTC).isoformat(), "alert": name, "state": state, "why": why}
        line = json.dumps(alert)
        self._say(line)
        if not self._command:
            return
        try:
            done = subprocess.run(
                self._command, input=line + "\n", text=True, timeout=_COMMAND_S, check=False
            )
            failed = f"exit status {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failed = explain_failure("the command failed", error, "check --alert-command")
        if failed:
            self._say(json.dumps(alert | {"alert": "alert-command", "why": failed}))


def watch(look: Callable[[], Health], *, every: float, address: str, command: str) -> None:
    """Call `look` repeatedly until the process is stopped. The line of the findings is printed on
    standard output whenever it has changed, and each alert on standard error.

    Args:
        look: function that checks a node or a federation once.
        every: seconds between two calls of `look`.
        address: a port of 127.0.0.1, or the path of a Unix socket, for the two pages; empty for
            none.
        command: see `Alerts`.

    Raises:
        ConfigError: the address or the command cannot be used.
    """
    if not every > 0:
        raise ConfigError(f"--every must be positive, got {every:g}")
    alerts = Alerts(lambda line: print(line, file=sys.stderr, flush=True), command)
    page = [Health()]
    last = ""
    with _serving(address, page):
        while True:
            try:
                health = look()
            except FedlgmError as error:
                health = Health(faults={"look": str(error)}, line=str(error))
            except OSError as error:
                line = explain_failure("a file of the node cannot be read", error)
                health = Health(faults={"look": line}, line=line)
            page[0] = health
            if health.line != last:
                last = health.line
                print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {last}", flush=True)
            alerts(health.faults)
            time.sleep(every)


@contextmanager
def _serving(address: str, page: list[Health]) -> Iterator[None]:
    """Serve the pages `/metrics` and `/ready` from a thread, with the findings in `page[0]`."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            health = page[0]
            pages = {
                "/metrics": (200, health.metrics()),
                "/ready": (200 if health.ready else 503, f"{health.line}\n"),
            }
            status, text = pages.get(self.path, (404, "only /ready and /metrics\n"))
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def address_string(self) -> str:
            return "local"

        def log_message(self, *given: Any) -> None:
            """Log nothing, since a monitor asks every few seconds."""

    if not address:
        yield
        return
    is_path = "/" in address
    if not is_path and not (address.isdecimal() and 0 < int(address) < 1 << 16):
        raise ConfigError(
            f"--metrics takes a port of 127.0.0.1 or the path of a socket, got {address!r}"
        )
    kind = socketserver.ThreadingUnixStreamServer if is_path else socketserver.ThreadingTCPServer
    place: Any = address if is_path else ("127.0.0.1", int(address))
    if is_path and Path(address).is_socket():  # a watch that was killed has left its socket
        Path(address).unlink()
    kind.allow_reuse_address = True
    try:
        server = kind(place, Handler)
    except OSError as error:
        what = f"--metrics: cannot listen on {address}"
        raise ConfigError(explain_failure(what, error, "choose another address")) from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        if is_path:
            Path(address).unlink(missing_ok=True)
