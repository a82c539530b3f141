"""A Flower SuperLink of our own for one run: private, on a free port, with nothing left running at the end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fedlgm.errors import RunError

_CONNECTION = "fedlgm"
_STARTUP_S = 60.0
_ENDING_S = 10.0


class Flwr:
    """The `flwr` command against one SuperLink."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __call__(self, *arguments: str) -> dict[str, Any]:
        """What a `flwr` command with `--format json` answers.

        Raises:
            RunError: it failed.
        """
        text = self.text(*arguments)
        start = text.find("{")
        if start < 0:
            raise RunError(f"`flwr {arguments[0]}` failed:\n{tail(text)}")
        answer: dict[str, Any] = json.loads(text[start:])
        if answer.get("success") is False:
            raise RunError(f"`flwr {arguments[0]}` failed: {answer.get('error-message', answer)}")
        return answer

    def submit(self, app: Path, federation: str, config: str) -> str:
        """Start a run of the app in a folder and return its id.

        Args:
            app: the app's folder.
            federation: Flower's `--federation-config`.
            config: Flower's `--run-config`.

        Raises:
            RunError: Flower refuses it; the message ends with what it says.
        """
        options = ("--federation-config", federation, "--run-config", config)
        return str(self("run", str(app), _CONNECTION, "--format", "json", *options)["run-id"])

    def status(self, run_id: str) -> str:
        """Flower's status of a run; asking takes seconds of a core."""
        return str(self("list", _CONNECTION, "--run-id", run_id, "--format", "json")["runs"][0]["status"])

    def log(self, run_id: str) -> str:
        """The run's log."""
        return self.text("log", run_id, _CONNECTION, "--show")

    def text(self, *arguments: str) -> str:
        """What a `flwr` command prints."""
        done = subprocess.run(
            [_command("flwr"), *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        return done.stdout or done.stderr


@contextmanager
def private_superlink(log: Path) -> Iterator[Flwr]:
    """A SuperLink on a free port of this machine, with nothing in the user's home and nothing left running.

    Args:
        log: file for what it prints.

    Raises:
        RunError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="fedlgm-flower-") as home:
        yield from _superlink(Path(home), log)


def _superlink(home: Path, log: Path) -> Iterator[Flwr]:
    port = _free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # The SuperLink is on this machine, whatever proxy the rest of the world is behind.
        "NO_PROXY": ",".join(filter(None, ("127.0.0.1", os.environ.get("NO_PROXY", "")))),
        "no_proxy": ",".join(filter(None, ("127.0.0.1", os.environ.get("no_proxy", "")))),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    command = [
        *(_command("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1"),
        *("--port", str(port)),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            _wait_until_healthy(process, port, log)
            yield Flwr(environment)
        finally:
            _stop(process, home)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _STARTUP_S
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with direct.open(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RunError(f"Flower's SuperLink did not start; see {log}")


def _stop(process: subprocess.Popen[bytes], home: Path) -> None:
    """End the SuperLink and all that it started: SuperExec, ServerApp and Ray are in sessions of their own.

    An interrupted run is ended first, or it would go on writing.
    """
    family = _started_under(home)
    for one in family:
        with suppress(psutil.Error):
            one.terminate()
    gently, at_all = (time.monotonic() + seconds for seconds in (_ENDING_S, 2 * _ENDING_S))
    # Again and again: Ray replaces workers that end before it does.
    while (left := {one for one in family if _alive(one)}) and time.monotonic() < at_all:
        for one in left if time.monotonic() > gently else ():
            with suppress(psutil.Error):
                one.kill()
        time.sleep(0.1)
        family = left | _started_under(home)
    process.kill()
    process.wait()


def _started_under(home: Path) -> set[psutil.Process]:
    """Processes that were started with this FLWR_HOME, directly or not."""
    found = set()
    for one in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if one.environ().get("FLWR_HOME") == str(home):
                found |= {one, *one.children(recursive=True)}  # Ray's workers write their names over their environment
    return {one for one in found if _alive(one)}


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _command(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(text: str, lines: int = 15) -> str:
    """The last lines of a log."""
    return "\n".join(text.strip().splitlines()[-lines:])
