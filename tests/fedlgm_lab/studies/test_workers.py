"""Studies whose runs are made by other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

_SCRIPT = """
import sys, numpy as np, torch, simulations
from dataclasses import dataclass
from fedlgm import Guarantee, Mechanism, ReleasePlan
x = np.random.default_rng(0).normal(size=(200, 5)); y = (x[:, 0] > 0).astype(int)
@dataclass(frozen=True)
class Equal(Mechanism):
    def plan(self, layers, facts, transcript):
        k = len(layers)
        clip, sigma = np.full(k, k**-0.5), np.full(k, facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", "bounded, then noised"))
class Net(torch.nn.Linear):
    def __init__(self): super().__init__(5, 2)
frames = [simulations.study(
    model=Net, data={"train": (x, y), "test": (x, y)}, grid={"mechanism": ["uniform", Equal]}, seeds=2, workers=workers,
    folder=f"{sys.argv[1]}/{workers}", overrides={"federation.clients": 20, "federation.rounds": 2,
    "federation.rate": 0.5, "privacy.delta": 0.01, "run.seed": 3},
).to_frame().drop(columns=["seconds", "folder"]) for workers in (1, 2, 'local')]
assert len(frames[0]) == 4 and (frames[0]["status"] == "finished").all(), frames[0]
assert all(frames[0].equals(other) for other in frames[1:]), frames
"""


@pytest.mark.slow
def test_classes_of_the_main_module_reach_other_processes_and_frames_are_equal(
    tmp_path: Path,
) -> None:
    """Without the guard that multiprocessing asks scripts for, as in a notebook; then on Ray."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(tmp_path / "runs")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 of 4 runs" in done.stderr


_KILLED = """
import sys, simulations
simulations.study(
    "digits", grid={"mechanism": ["uniform", "gaussian"]}, seeds=2, workers=int(sys.argv[2]), folder=sys.argv[1],
    overrides={"federation.rounds": 12, "federation.clients": 20, "training.epochs": 1, "run.evaluate_every": 12,
    "run.checkpoint_every": 5},
).to_frame().drop(columns=["seconds", "folder"]).to_pickle(f"{sys.argv[1]}.pkl")
"""


@pytest.mark.slow
def test_a_study_with_workers_that_is_killed_goes_on_to_the_same_frame(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_KILLED)
    command = [sys.executable, "script.py", str(tmp_path / "killed"), "2"]
    begun = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("*/result.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(begun.pid, signal.SIGKILL)  # this process and its workers
    assert begun.wait() == -signal.SIGKILL
    assert 0 < len(list((tmp_path / "killed").glob("*/result.json"))) < 4
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(
        [*command[:2], str(tmp_path / "whole"), "1"], cwd=tmp_path, check=True, capture_output=True
    )
    frames = [pd.read_pickle(tmp_path / f"{name}.pkl") for name in ("killed", "whole")]
    assert len(frames[0]) == 4
    pd.testing.assert_frame_equal(frames[0], frames[1], check_exact=True)
    models = [
        {
            one.parent.name: json.loads(one.read_text())["model_sha256"]
            for one in (tmp_path / name).glob("*/result.json")
        }
        for name in ("killed", "whole")
    ]
    assert models[0] == models[1]
