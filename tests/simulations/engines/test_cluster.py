"""Several machines, as docs/how-to/ray-cluster.md describes them: two Ray nodes on this one."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from patience import wait_until

from fedlgm.errors import RunError
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.own import Own
from simulations.engines import cluster
from simulations.engines import ray as ray_engine

RECIPE = recipes.load(
    "digits",
    [
        "federation.clients=30",
        "federation.rounds=8",
        "federation.rate=0.5",
        "privacy.accountant=rdp",
        "run.block_size=2",
        "run.evaluate_every=8",
    ],
)


@pytest.mark.slow
def test_two_machines_one_of_which_is_lost_give_the_same_model(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    reference = launch.simulate(RECIPE, engine="local", run_dir=tmp_path / "reference")
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = nodes.add_node(num_cpus=1)
    before: list[int] = []

    def alive() -> int:
        return sum(node["Alive"] for node in ray.nodes())

    def lose(row: Any) -> None:
        """Two rounds later the driver waits for this one."""
        if row["round"] == 2:
            before.append(alive())
            nodes.remove_node(second, allow_graceful=False)
            wait_until(lambda: alive() == 1, "Ray to notice that a node is gone")

    try:
        result = launch.simulate(
            RECIPE,
            engine="auto",
            ray_address=nodes.address,
            workers=2,
            run_dir=tmp_path / "run",
            progress=lose,
        )
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert before == [2]
    assert result["engine"] == "ray"
    assert result["model_sha256"] == reference["model_sha256"]
    assert result["ledger_head"] == reference["ledger_head"]


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
