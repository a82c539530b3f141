"""A private Flower SuperLink for one run, on a free port and stopped completely at the end."""

from __future__ import annotations

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

import psutil

from fedlgm.errors import RunError
from simulations.engines.flower_command import FlwrCommand, environment, executable

CONNECTION = "fedlgm"
"""Name of the SuperLink in Flower's configuration."""
_STARTUP_S = 60.0
_ENDING_S = 10.0


class Flwr(FlwrCommand):
    """The `flwr` command against one SuperLink."""

    def submit(self, app: Path, federation: str, config: str) -> str:
        """Start a run of the app in a folder and return its id.

        Args:
            app: the app's folder.
            federation: Flower's `--federation-config`.
            config: Flower's `--run-config`.

        Raises:
            RunError: Flower refuses it; the message ends with Flower's reason.
        """
        options = ("--federation-config", federation, "--run-config", config)
        return str(self.json("run", str(app), CONNECTION, *options)["run-id"])

    def status(self, run_id: str) -> str:
        """Flower's status of a run; asking takes seconds of a core."""
        return str(self.json("list", CONNECTION, "--run-id", run_id)["runs"][0]["status"])

    def log(self, run_id: str) -> str:
        """The run's log."""
        return self.text("log", run_id, CONNECTION, "--show")


@contextmanager
def private_superlink(log: Path) -> Iterator[Flwr]:
    """A SuperLink on a free port of this machine, with no files in the user's home and no process left running.

    Args:
        log: file for its output.

    Raises:
        RunError: the SuperLink does not start.
    """
    with tempfile.TemporaryDirectory(prefix="fedlgm-flower-") as home:
        yield from _superlink(Path(home), log)


def _superlink(home: Path, log: Path) -> Iterator[Flwr]:
    port = _free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    flower = environment(home) | {
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),  # Ray's default, which it warns of if it is not set
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Else Flower joins whatever cluster was started last on this machine, with options that only a new one takes.
        "RAY_ADDRESS": "local",
        # A user's model may come from a module beside their script: found there as it was found here.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }  # fmt: skip
    command = [
        *(executable("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1"),
        *("--port", str(port)),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=flower, stdout=file, stderr=file, start_new_session=True)
        try:
            _wait_until_healthy(process, port, log)
            yield Flwr(flower)
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
    """End the SuperLink and all its children: SuperExec, ServerApp and Ray have their own sessions.

    An interrupted run is ended first, because it would continue to write.
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
