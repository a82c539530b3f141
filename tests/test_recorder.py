"""What is recorded of a run while it goes on."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from simulations import launch, recorder
from simulations.recipe import Recipe
from simulations.run_folder import RunFolder
from strategies import LayerwiseFedAvg


def test_tensorboard_shows_the_rows(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    launch.simulate(tiny(), run_dir=tmp_path / "run")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    rows = RunFolder.open(tmp_path / "run").rows()
    assert len(rows) == 3
    for name in ("accuracy", "loss", "epsilon", "claimed_epsilon", "noise_norm"):
        assert [(event.step, event.value) for event in board.Scalars(name)] == [
            (row["round"], pytest.approx(row[name], rel=1e-6)) for row in rows
        ]


def test_a_round_is_evaluated_while_the_next_one_trains(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: defaultdict[int, threading.Event] = defaultdict(threading.Event)
    rounds, configure, evaluate = itertools.count(1), LayerwiseFedAvg.configure_train, recorder.evaluate

    def configure_train(self: LayerwiseFedAvg, *arguments: Any) -> Any:
        started[self.transcript.rounds + 1].set()
        return configure(self, *arguments)

    def evaluate_late(*arguments: Any) -> tuple[float, float]:
        following = next(rounds) + 1
        assert following > 3 or started[following].wait(30)
        return evaluate(*arguments)

    monkeypatch.setattr(LayerwiseFedAvg, "configure_train", configure_train)
    monkeypatch.setattr(recorder, "evaluate", evaluate_late)
    shown: list[int] = []
    launch.simulate(tiny(), run_dir=tmp_path / "run", progress=lambda row: shown.append(row["round"]))
    assert shown == [1, 2, 3]
    assert all("accuracy" in row for row in RunFolder.open(tmp_path / "run").rows())
