"""Kills at random moments: actors, nodes and the driver. Every run must end with the very same
model and ledger."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import LIMIT_S, wait_until

from fedlgm.errors import LedgerError, MemoryWarning, RunError
from fedlgm.noise.keys import KeyRing
from fedlgm.privacy import Ledger
from fedlgm.training import VectorizedTrainer
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.engines import cluster
from simulations.engines import ray as ray_engine
from simulations.engines.cluster import connect
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.runs.server import serve

ROUNDS = 12
OVERRIDES = [
    "federation.clients=60",
    "federation.rate=0.3",
    f"federation.rounds={ROUNDS}",
    "privacy.delta=1e-3",
    "privacy.accountant='rdp'",
    "data.partition='hsu'",
    "training.epochs=2",
    "run.block_size=4",
    f"run.evaluate_every={ROUNDS}",
    "run.checkpoint_every=1",
]
RECIPE = recipes.load("digits", OVERRIDES)
VECTORIZED = recipes.load("digits", [*OVERRIDES, "training.vectorize='on'", "federation.rounds=2"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The uninterrupted run."""
    return launch.simulate(
        RECIPE, engine="local", run_dir=tmp_path_factory.mktemp("reference") / "run"
    )


def _ledger_epsilon(run: Path) -> float:
    with Ledger(run / "ledger.sqlite") as ledger:
        return ledger.epsilon(1e-3, "rdp")


def _drive(run: Path) -> None:
    os.setpgrp()
    if run.exists():
        launch.resume(run)
    else:
        launch.simulate(RECIPE, run_dir=run)


def _run_for(run: Path, seconds: float) -> bool:
    """Drive `run` in a process of its own and kill it after `seconds`; True if it was alive until
    then.

    Forked, with everything imported, so that a kill hits the run and not the imports.
    """
    process = multiprocessing.get_context("fork").Process(target=_drive, args=(run,))
    process.start()
    process.join(seconds)
    alive = process.exitcode is None
    if alive:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    else:
        assert process.exitcode == 0
    return alive


@pytest.mark.slow
def test_a_killed_driver_resumes_to_the_same_model(
    reference: dict[str, Any], tmp_path: Path
) -> None:
    started, kills = time.monotonic(), 0
    assert not _run_for(tmp_path / "whole", LIMIT_S)
    duration = time.monotonic() - started

    @settings(max_examples=5, deadline=None)
    @given(moments=st.lists(st.floats(0.02, 0.45), min_size=2, max_size=2))
    def property(moments: list[float]) -> None:
        nonlocal kills
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        for moment in moments:
            kills += _run_for(run, moment * duration)
            assert not run.exists() or (run / "recipe.toml").exists()  # else nobody could resume it
            _assert_charged_before_released(run)
        assert not _run_for(run, LIMIT_S)
        result = RunFolder.open(run).result()
        assert result is not None
        assert result["model_sha256"] == reference["model_sha256"]
        assert [row["round"] for row in RunFolder.open(run).rows()] == list(range(1, ROUNDS + 1))
        assert _ledger_epsilon(run) >= reference["epsilon"] - 1e-12

    property()
    assert kills >= 4  # fewer of the moments hit a run where the machine is busy


def _assert_charged_before_released(run: Path) -> None:
    """What is checkpointed was released, and what was released was charged first."""
    if (run / "ledger.sqlite").exists():
        checkpoint = RunFolder.open(run).checkpoints.latest(Assembly(RECIPE).model.layers)
        released = checkpoint.transcript.rounds if checkpoint else 0
        try:
            with Ledger(run / "ledger.sqlite") as ledger:
                assert ledger.rounds() >= released
        except LedgerError:
            assert released == 0  # killed while the ledger was being made


def _worker_pids() -> list[int]:
    """Ray workers below this process: other tests may run theirs at the same time."""
    parents, workers = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                pid = int(entry.name)
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                    workers.append(pid)

    def ours(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return [pid for pid in workers if ours(pid)]


@pytest.mark.slow
def test_killed_actors_and_a_lost_node_do_not_change_the_result(
    reference: dict[str, Any], tmp_path: Path
) -> None:
    """Two machines, as docs/how-to/ray-cluster.md describes them. Two workers are killed while they
    train, then one of the machines goes for good."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = nodes.add_node(num_cpus=1)
    chance, kills, before = random.Random(3), list[int](), list[int]()

    def alive() -> int:
        return sum(node["Alive"] for node in ray.nodes())

    def fail(row: dict[str, Any]) -> None:
        """Called beside the next round's training."""
        while len(kills) < 2 and row["round"] % 2:
            time.sleep(chance.uniform(0.0, 0.1))
            for pid in _worker_pids()[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills.append(pid)
                    return
        if row["round"] == 7:
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
            progress=fail,
        )
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert len(kills) == 2
    assert before == [2]
    assert result["engine"] == "ray"
    assert result["model_sha256"] == reference["model_sha256"]
    assert result["epsilon"] == pytest.approx(reference["epsilon"])
    assert _ledger_epsilon(tmp_path / "run") >= reference["epsilon"] - 1e-12


class _Losing(ray_engine.RayGrid):
    """Removes a node whose worker has finished a block, before the block's sum has left it."""

    node: Any = None
    remove: Any = None
    lost = 0

    def _next(self, signals: list[ray.ObjectRef]) -> ray.ObjectRef:
        (finished, *_), _ = ray.wait(signals, num_returns=1, fetch_local=False)
        places = (
            ray.experimental.get_object_locations([finished])[finished]["node_ids"]
            if self.remove
            else []
        )
        if self.node in places and ray.get_runtime_context().get_node_id() not in places:
            self.remove()
            self.remove, self.lost = None, self.lost + 1
        return finished


@pytest.mark.slow
def test_a_sum_lost_with_its_node_is_made_again(tmp_path: Path) -> None:
    """Sums of more than 100 kB stay in the object store of their worker's node until they are
    fetched."""
    from ray.cluster_utils import Cluster

    wide = recipes.load("digits", [*OVERRIDES, "federation.rounds=3", "model.hidden=[512]"])
    reference = launch.simulate(wide, engine="local", run_dir=tmp_path / "reference")
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = nodes.add_node(num_cpus=1)
    try:
        connect(nodes.address, 2)
        grid = _Losing(2)
        grid.serving(Assembly(wide), KeyRing.from_seed(wide.run.seed))
        while grid._starting:  # both are up: each gets a block of the first round
            grid._finish_start(grid._next(list(grid._starting)))
        grid.node, grid.remove = (
            second.node_id,
            lambda: nodes.remove_node(second, allow_graceful=False),
        )
        result = serve(grid, Assembly(wide), new_folder.create(tmp_path / "run", wide), "ray")
        assert grid.lost == 1
        assert result["model_sha256"] == reference["model_sha256"]
        assert result["epsilon"] >= reference["epsilon"]
    finally:
        ray.shutdown()
        nodes.shutdown()


def test_no_cluster_at_the_address() -> None:
    with pytest.raises(RunError, match="no Ray cluster at"):
        connect("127.0.0.1:1", 1)


@pytest.mark.slow
def test_more_workers_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    ray.init(address="local", num_cpus=3, _memory=2**30, **quiet)
    try:
        with pytest.raises(
            RunError,
            match=r"at least 1.5 GiB of memory, but Ray has 3 and 1.0 GiB: use --workers 2",
        ):
            connect(None, 3)
        monkeypatch.setattr(cluster, "_WORKER_GIB", 0.1)
        with pytest.raises(
            RunError, match=r"5 workers need 5 CPUs .*, but Ray has 3 and 1.0 GiB: use --workers 3"
        ):
            connect(None, 5)
        connect(None, 3)
    finally:
        ray.shutdown()


@pytest.mark.slow  # it needs a few GiB that nobody else takes meanwhile
def test_a_worker_that_ray_ends_for_want_of_memory_gets_smaller_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Hungry(ray_engine.Worker):
        def hold(self, *arguments: Any) -> None:
            train = VectorizedTrainer._train

            def hungry(self: VectorizedTrainer, *everything: Any) -> Any:
                if self.width > 2:
                    eaten = []
                    for _ in range(32):
                        eaten.append(np.ones(2**28, np.uint8))
                        time.sleep(0.2)
                return train(self, *everything)

            VectorizedTrainer._train = hungry  # type: ignore[method-assign]
            super().hold(*arguments)

    memory = psutil.virtual_memory()
    monkeypatch.setenv(
        "RAY_memory_usage_threshold", f"{1 - (memory.available - 4 * 2**30) / memory.total:.3f}"
    )
    monkeypatch.setattr(ray_engine.RayGrid, "worker", Hungry)
    with pytest.warns(
        MemoryWarning, match="4 clients at once did not fit into memory: continuing with 2"
    ) as caught:
        narrowed = launch.simulate(VECTORIZED, engine="ray", workers=1, run_dir=tmp_path / "run")
    assert sum(issubclass(w.category, MemoryWarning) for w in caught) == 1
    monkeypatch.setattr(ray_engine.RayGrid, "worker", ray_engine.Worker)
    plain = launch.simulate(VECTORIZED, engine="local", run_dir=tmp_path / "plain")
    assert narrowed["model_sha256"] == plain["model_sha256"]


@pytest.mark.slow
def test_want_of_memory_in_a_worker_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody reads what a worker's process warns of."""

    class Cramped(ray_engine.Worker):
        def hold(self, *arguments: Any) -> None:
            train = VectorizedTrainer._train

            def cramped(self: VectorizedTrainer, model: Any, batch: list, *more: Any) -> Any:
                if len(batch) > 2:
                    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
                return train(self, model, batch, *more)

            VectorizedTrainer._train = cramped  # type: ignore[method-assign]
            super().hold(*arguments)

    monkeypatch.setattr(ray_engine.RayGrid, "worker", Cramped)
    with pytest.warns(
        MemoryWarning, match="4 clients at once do not fit into memory: continuing with 2"
    ) as caught:
        launch.simulate(VECTORIZED, engine="ray", workers=2, run_dir=tmp_path / "run")
    assert sum(issubclass(w.category, MemoryWarning) for w in caught) == 1
