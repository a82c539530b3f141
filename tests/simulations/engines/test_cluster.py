"""Several machines: other versions on one of them, and Ray's own processes that end."""

from __future__ import annotations

import subprocess
import threading

import pytest

from fedlgm.errors import RunError
from simulations.config.own import Own
from simulations.engines import cluster
from simulations.engines import ray as ray_engine


def test_a_machine_with_other_versions_is_refused() -> None:
    versions = ray_engine._versions() | {"torch": "1.0"}
    with pytest.raises(
        RunError, match=r"a worker on .* has torch 2\..* instead of 1\.0: install the same versions"
    ):
        ray_engine.Worker().hold({}, (0, False), {}, None, Own(), versions)


def test_the_end_of_rays_own_processes_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "_SERVERS", ("sleep",))
    with subprocess.Popen(["sleep", "60"]) as process:
        over = threading.Event()
        watch = threading.Thread(target=cluster._say_if_lost, args=(over,), daemon=True)
        watch.start()
        assert not over.wait(1)  # it has seen the process
        process.kill()
        watch.join(timeout=30)
    assert f"Ray's own processes have ended (pid {process.pid} first)" in capsys.readouterr().err
    over.set()
    cluster._say_if_lost(over)
    assert capsys.readouterr().err == ""
