"""The `flower` engine: Flower's own simulation runtime behind a private SuperLink that is stopped at the end."""

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
from simulations.runs.folder import RunFolder
from simulations.runs.recorder import OnRound

APP = Path(__file__).resolve().parents[1] / "flower_app"
_CONNECTION = "fedlgm"
_LOG = "flower.log"  # of the SuperLink, in the run folder
_STARTUP_S = 60.0
_ENDING_S = 10.0
_SILENCE_S = 20.0  # of the log, until the SuperLink is asked all the same


def run_flower(folder: RunFolder, supernodes: int, workers: int, progress: OnRound | None = None) -> dict[str, Any]:
    """Run the Flower app on `folder`'s recipe and return its summary.

    Args:
        folder: a created run folder.
        supernodes: simulated SuperNodes: one a client, or fewer that serve blocks.
        workers: Ray actors of one CPU each.
        progress: called with each round's metrics row.

    Raises:
        RunError: the run did not complete; the message ends with Flower's log.
    """
    with tempfile.TemporaryDirectory(prefix="fedlgm-flower-") as home, _superlink(Path(home), folder) as flwr:
        federation = (
            f"num-supernodes={supernodes} client-resources-num-cpus=1 init-args-num-cpus={workers} "
            "init-args-log-to-driver=false"
        )
        path, recipe = folder.path.resolve(), folder.recipe()
        one_each = supernodes == recipe.federation.clients
        config = " ".join(
            (
                f"recipe={json.dumps(str(folder.recipe_file.resolve()))}",
                f"run-dir={json.dumps(str(path))}",
                f"nodes={json.dumps('clients' if one_each else 'workers')}",
                "simulated=true",
                # Without a seed server and clients must have the same keys for a run to be repeatable.
                *([f"keys={json.dumps(str(path))}"] if recipe.run.seed is None else []),
            )
        )
        folder.keys(recipe.run.seed)
        submitted = flwr(
            "run", str(APP), _CONNECTION, "--format", "json", "--federation-config", federation, "--run-config", config
        )
        run_id = str(submitted["run-id"])
        status = _follow(flwr, run_id, folder, progress)
        result = folder.result()
        if status != "finished:completed" or result is None:
            log = flwr.text("log", run_id, _CONNECTION, "--show")
            raise RunError(f"Flower reports {status} for the run. End of its log:\n{_tail(log)}")
        return result


class _Flwr:
    """The `flwr` command against one SuperLink."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __call__(self, *arguments: str) -> dict[str, Any]:
        text = self.text(*arguments)
        start = text.find("{")
        if start < 0:
            raise RunError(f"`flwr {arguments[0]}` failed:\n{_tail(text)}")
        answer: dict[str, Any] = json.loads(text[start:])
        if answer.get("success") is False:
            raise RunError(f"`flwr {arguments[0]}` failed: {answer.get('error-message', answer)}")
        return answer

    def text(self, *arguments: str) -> str:
        done = subprocess.run(
            [_command("flwr"), *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        return done.stdout or done.stderr


@contextmanager
def _superlink(home: Path, folder: RunFolder) -> Iterator[_Flwr]:
    """A SuperLink of our own on a free port, with nothing in the user's home and nothing left running."""
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
    with (folder.path / _LOG).open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_healthy(process, port, folder)
            yield _Flwr(environment)
        finally:
            _stop(process, home)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, folder: RunFolder) -> None:
    deadline = time.monotonic() + _STARTUP_S
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with direct.open(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RunError(f"Flower's SuperLink did not start; see {folder.path / _LOG}")


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


def _follow(flwr: _Flwr, run_id: str, folder: RunFolder, progress: OnRound | None) -> str:
    """Wait for the run's end and pass on its metrics meanwhile; returns Flower's status."""
    seen = len(folder.rows())
    asked, logged = 0.0, -1
    status = "pending"
    while not status.startswith("finished"):
        time.sleep(0.25)
        seen = _pass_on(folder, seen, progress)
        # Asking takes seconds of a core, and whatever becomes of a run shows in the SuperLink's log first.
        patience = 3.0 if folder.result() is not None else _SILENCE_S
        if (folder.path / _LOG).stat().st_size != logged or time.monotonic() - asked > patience:
            runs = flwr("list", _CONNECTION, "--run-id", run_id, "--format", "json")["runs"]
            status, asked = str(runs[0]["status"]), time.monotonic()
            logged = (folder.path / _LOG).stat().st_size
    _pass_on(folder, seen, progress)
    return status


def _pass_on(folder: RunFolder, seen: int, progress: OnRound | None) -> int:
    rows = folder.rows()
    for row in rows[seen:]:
        if progress is not None:
            progress(row)
    return len(rows)


def _command(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
