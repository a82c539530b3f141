"""The trainer that a run chooses by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlgm.data import DataSet
from fedlgm.training import ClientTask, fastest
from simulations import launch
from simulations.config import assembly, decided
from simulations.config import recipe as recipes
from simulations.config.own import Own
from simulations.runs.folder import RunFolder


def test_auto_is_settled_on_public_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is a part of the public recipe, so the time that private examples take must not
    decide it."""
    x, y = np.zeros((60, 64), np.float32), np.arange(60) % 10
    seen: list[ClientTask] = []

    def watched(makers: Any, model: Tensor, tasks: Any, **more: Any) -> Any:
        seen.extend(tasks())
        return fastest(makers, model, tasks, **more)

    monkeypatch.setattr(decided, "fastest", watched)
    options = [
        "federation.clients=10",
        "training.vectorize=auto",
        "training.batch_size=5",
        "run.block_size=6",
    ]
    run = assembly.Assembly(
        recipes.load("digits", options), Own(data=DataSet.from_arrays((x + 7, y), (x, y)))
    )
    assert decided.resolve_auto(run, workers=2).recipe.training.vectorize in ("on", "off")
    assert [(len(task.y), float(task.x.abs().max())) for task in seen] == [(20, 0.0)] * 6


class _Takes:
    """A trainer that takes these seconds for its runs, the last of them for all that follow.

    Args:
        seconds: of its runs.
        wait: lets them go by.
    """

    def __init__(self, *seconds: float, wait: Callable[[float], None]) -> None:
        self._seconds, self._wait = list(seconds), wait

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        self._wait(self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0])
        yield model[None]


def _chosen(blocks: float = math.inf, **seconds: tuple[float, ...]) -> str:
    """Which trainer wins, by a clock that goes on by what they take and by nothing else."""
    now = [0.0]

    def wait(passed: float) -> None:
        now[0] += passed

    made = {name: partial(_Takes, *taken, wait=wait) for name, taken in seconds.items()}
    return fastest(made, torch.zeros(3), list, blocks=blocks, clock=lambda: now[0])[0]


def test_the_faster_trainer_is_chosen_by_measurement() -> None:
    """Measured in real time, with a difference that no other process makes up for."""
    slow, quick = partial(_Takes, 0.3, wait=time.sleep), partial(_Takes, 0.0, wait=time.sleep)
    winner, times = fastest({"slow": slow, "quick": quick}, torch.zeros(3), list)
    assert winner == "quick"
    assert times["slow"] > times["quick"]


def test_the_first_trainer_is_preferred_unless_another_is_a_tenth_faster() -> None:
    assert _chosen(first=(2.0,), second=(2.0,)) == "first"
    assert _chosen(first=(2.0,), second=(1.85,)) == "first"
    assert _chosen(first=(2.0,), second=(1.75,)) == "second"
    assert (
        _chosen(first=(2.0, 2.0, 1.0), second=(2.0, 1.75, 1.75)) == "first"
    )  # the best run of each counts


def test_what_it_takes_to_compile_must_be_made_up_for() -> None:
    assert _chosen(blocks=5, even=(0.01,), compiling=(0.2, 0.0)) == "even"
    assert _chosen(blocks=500, even=(0.01,), compiling=(0.2, 0.0)) == "compiling"


@pytest.mark.parametrize(
    ("vectorize", "compile", "settled"),
    [
        ("off", "auto", {("off", False)}),
        ("auto", False, {("off", False), ("on", False)}),
        pytest.param("on", "auto", {("on", False), ("on", True)}, marks=pytest.mark.slow),
        pytest.param(
            "auto", "auto", {("off", False), ("on", False), ("on", True)}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_records_which_trainer_it_settled_on(
    tiny: Any, tmp_path: Path, vectorize: str, compile: Any, settled: set[tuple[str, bool]]
) -> None:
    recipe = tiny(training={"vectorize": vectorize, "compile": compile}, federation={"rounds": 1})
    launch.simulate(recipe, run_dir=tmp_path / "run")
    training = RunFolder.open(tmp_path / "run").recipe().training
    assert (training.vectorize, training.compile) in settled
