"""A private Flower SuperLink for one run, on a free port and stopped completely at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlgm.errors import RunError
from simulations.engines.flower_command import CONNECTION, FlwrCommand, environment, executable
from simulations.engines.flower_processes import answers, end, free_ports, started_under

_STARTUP_S = 300.0  # a limit for slow machines: a process that ends is noticed at once


@contextmanager
def private_superlink(log: Path) -> Iterator[FlwrCommand]:
    """A SuperLink on a free port of this machine, without files in the user's home or remaining
    processes.

    Args:
        log: file for its output.

    Raises:
        RunError: the SuperLink does not start.
    """
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="fedlgm-flower-") as folder, log.open("wb") as file:
        home = Path(folder)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        flower = environment(home) | {
            # Ray's default; it warns if it is not set
            "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            # Flower gives its actors an environment of their own. Workers that Ray starts in
            # advance do not have it.
            "RAY_prestart_worker_first_driver": "0",
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Otherwise Flower would join the cluster that was started last on this machine, with
            # options that only a new cluster accepts.
            "RAY_ADDRESS": "local",
            # A user's model may come from a module beside the user's script. Flower's processes
            # must find it as this process does.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }  # fmt: skip
        command = [
            executable("flower-superlink"),
            "--insecure",
            "--simulation",
            "--host",
            "127.0.0.1",
        ]
        command += ["--port", str(port)]
        process = subprocess.Popen(
            command, env=flower, stdout=file, stderr=file, start_new_session=True
        )
        try:
            _wait_until_healthy(process, port, log)
            yield FlwrCommand(flower)
        finally:
            # An interrupted run is ended first, because it would continue to write; Ray replaces
            # workers that end before it does.
            end(started_under(home), more=lambda: started_under(home))
            process.kill()
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _STARTUP_S
    while time.monotonic() < deadline and process.poll() is None:
        if answers(f"http://127.0.0.1:{port}"):
            return
        time.sleep(0.1)
    raise RunError(f"Flower's SuperLink did not start; see {log}")
