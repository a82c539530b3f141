"""Runs without a seed: an interruption costs nothing, a lost key costs what it costs and is
told."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import LIMIT_S

from fedlgm.errors import RunError
from fedlgm.privacy.ledger import Ledger
from simulations import launch
from simulations.config.assembly import Assembly
from simulations.runs import new_folder
from simulations.runs.checkpoints import model_digest
from simulations.runs.folder import RunFolder
from tests.support.interruption import Interrupted, charges, interrupt_at, interrupted

ROUNDS = 8


@pytest.fixture
def recipe(tiny):
    return tiny(
        run={"seed": None, "checkpoint_every": 10, "block_size": 10},
        federation={"rounds": ROUNDS},
        privacy={"accountant": "rdp"},
    )


@pytest.mark.parametrize("at", [(1,), (5,), (7,), (2, 4, 6)])
def test_an_interruption_costs_nothing(recipe, tmp_path, at):
    """Without a checkpoint since the start the whole run was released again: 9.53 of 8."""
    folder = interrupted(recipe, tmp_path / "run", at[0])
    seen = {row["round"]: row for row in folder.rows()}
    for round_ in at[1:]:
        with pytest.raises(Interrupted):
            launch.resume(folder.path, progress=interrupt_at(round_))
        seen |= {row["round"]: row for row in folder.rows()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = launch.resume(folder.path)
    assert result["epsilon"] <= 8.0
    assert charges(folder) == list(range(1, ROUNDS + 1))
    again = {row["round"]: row for row in folder.rows()}
    assert {round_: again[round_] for round_ in seen} == seen  # it is the run that it was


def test_the_model_is_the_one_that_the_uninterrupted_run_reaches(recipe, tmp_path):
    """With the same keys: a copy of the folder at its start, run through, is the same run."""
    folder = interrupted(recipe, tmp_path / "run", 1)
    shutil.copytree(folder.path, tmp_path / "copy")
    with pytest.raises(Interrupted):
        launch.resume(folder.path, progress=interrupt_at(5))
    first, second = launch.resume(folder.path), launch.resume(tmp_path / "copy")
    assert first["model_sha256"] == second["model_sha256"]
    assert first["ledger_head"] == second["ledger_head"]


def test_two_runs_differ(recipe, tmp_path):
    """Power: unseeded runs of one recipe are not the same by themselves."""
    digests = {launch.simulate(recipe, run_dir=tmp_path / str(i))["model_sha256"] for i in range(2)}
    assert len(digests) == 2


def test_a_lost_key_costs_more_and_says_so(recipe, tmp_path):
    folder = interrupted(recipe, tmp_path / "run", 5)
    before = charges(folder)
    (folder.path / "private" / "keys").unlink()
    with pytest.warns(
        UserWarning,
        match=f"{max(before)} rounds that had been released are released again with fresh",
    ):
        result = launch.resume(folder.path)
    assert len(charges(folder)) == len(before) + ROUNDS
    assert result["epsilon"] > 8.5
    with Ledger(folder.ledger_file) as ledger:
        assert result["epsilon"] == pytest.approx(ledger.epsilon(1e-5, "rdp"))


def test_a_lost_key_is_counted_in_every_row_and_after_every_later_interruption(recipe, tmp_path):
    """What the first attempt spent counts from the first new round on, also when that attempt is
    interrupted again."""
    folder = interrupted(recipe, tmp_path / "run", 5)
    (folder.path / "private" / "keys").unlink()
    with pytest.warns(UserWarning, match="released again"), pytest.raises(Interrupted):
        launch.resume(folder.path, progress=interrupt_at(2))
    once = {row["round"]: row["epsilon"] for row in folder.rows()}
    with pytest.warns(UserWarning, match="released again"):
        launch.resume(folder.path)
    twice = {row["round"]: row["epsilon"] for row in folder.rows()}
    assert {round_: twice[round_] for round_ in once} == once
    single = launch.simulate(recipe, run_dir=tmp_path / "single")
    alone = {
        row["round"]: row["epsilon"]
        for row in RunFolder(single["run"] and Path(single["run"])).rows()
    }
    assert all(twice[round_] > alone[round_] * 1.2 for round_ in range(1, ROUNDS))


def test_a_lost_key_before_anything_was_released_costs_nothing(recipe, tmp_path):
    folder = new_folder.create(tmp_path / "run", recipe)
    folder.keys(None)
    (folder.path / "private" / "keys").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch.resume(folder.path)["epsilon"] <= 8.0


@pytest.mark.parametrize("content", ["", "0", "nothing of the kind\n", "12 x\n", "-5 0\n"])
def test_a_damaged_key_file_is_refused(recipe, tmp_path, content):
    folder = interrupted(recipe, tmp_path / "run", 3)
    before = charges(folder)
    (folder.path / "private" / "keys").write_text(content)
    with pytest.raises(
        RunError, match=r"private/keys is damaged: restore it from a backup, or delete it"
    ):
        launch.resume(folder.path)
    assert charges(folder) == before


def test_keys_are_private_while_they_last_and_then_go(recipe, tmp_path):
    folder = interrupted(recipe, tmp_path / "run", 3)
    keys = folder.path / "private" / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    root = keys.read_text().split()[0]
    for path in folder.path.rglob("*"):
        if path.is_file() and path != keys:
            assert root.encode() not in path.read_bytes(), path
    launch.resume(folder.path)
    assert not keys.exists()


def test_seeded_runs_keep_no_key(tiny, tmp_path):
    launch.simulate(tiny(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "private" / "keys").exists()


_SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from simulations import launch
path = Path(sys.argv[1])
if (path / "recipe.toml").is_file():
    print(launch.resume(path)["epsilon"])
else:
    from simulations.config import recipe
    print(launch.simulate(recipe.load(sys.argv[2]), run_dir=path)["epsilon"])
"""


@pytest.mark.slow
def test_killed_at_random_moments(recipe, tmp_path):
    """kill -9, again and again: no second charge, and every row that was ever written stays what it
    was."""
    file, path, draw = tmp_path / "recipe.toml", tmp_path / "run", random.Random(5)
    long = recipe.model_copy(
        update={"federation": recipe.federation.model_copy(update={"rounds": 80})}
    )
    file.write_text(long.to_toml(), encoding="utf-8")
    seen: dict[int, dict] = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    kills = 0
    while kills < 4:
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(path), str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        folder, rows = RunFolder(path), 0
        deadline = time.monotonic() + LIMIT_S
        enough = len(seen) // 2 + draw.randrange(2, 20)
        while process.poll() is None and time.monotonic() < deadline:
            rows = len(folder.rows()) if folder.metrics.path.is_file() else 0
            if rows >= enough:
                break
            time.sleep(0.01)
        time.sleep(draw.random() * 0.05)
        if process.poll() is not None:
            assert process.returncode == 0, process.stderr.read().decode()
            break
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        for row in folder.rows():
            assert seen.setdefault(row["round"], row) == row
    result = launch.resume(path)
    assert kills >= 2
    assert result["epsilon"] <= 8.0
    assert charges(RunFolder(path)) == list(range(1, 81))
    assert all(seen.get(row["round"], row) == row for row in RunFolder(path).rows())
    last = RunFolder(path).checkpoints.latest(Assembly(RunFolder(path).recipe()).model.layers)
    assert model_digest(last.transcript.models[-1]) == result["model_sha256"]


def test_processes_that_start_a_run_together_have_one_key(recipe, tmp_path):
    """Clients that noised by one key and a ledger that names another would count a repeated release
    as the same."""
    for attempt in range(20):
        folder = new_folder.create(tmp_path / str(attempt), recipe)
        start = threading.Barrier(4)

        def ring(folder=folder, start=start):
            start.wait()
            return folder.keys(None)

        with ThreadPoolExecutor(4) as pool:
            rings = {future.result() for future in [pool.submit(ring) for _ in range(4)]}
        assert rings == {folder.keys(None)}
        assert [file.name for file in (folder.path / "private").iterdir()] == ["keys"]
        assert stat.S_IMODE((folder.path / "private" / "keys").stat().st_mode) == 0o600


def test_keys_that_outlived_the_result_go_when_the_run_is_looked_at(recipe, tmp_path):
    """Killed between writing its summary and removing its keys, a run would leave its noise to
    whoever finds them."""
    folder = interrupted(recipe, tmp_path / "run", 2)
    keys = (folder.path / "private" / "keys").read_bytes()
    result = launch.resume(folder.path)
    (folder.path / "private" / "keys").write_bytes(keys)
    assert launch.resume(folder.path)["model_sha256"] == result["model_sha256"]
    assert not (folder.path / "private" / "keys").exists()
