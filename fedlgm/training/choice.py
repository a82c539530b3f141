"""Which trainer is faster here: measured, not guessed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fedlgm.training.base import ClientTask, Trainer


def fastest(
    trainers: Mapping[str, Callable[[], Trainer]],
    model: Tensor,
    tasks: Callable[[], Sequence[ClientTask]],
    repeats: int = 2,
) -> tuple[str, dict[str, float]]:
    """Time every trainer on the same clients.

    Args:
        trainers: makers of the trainers, by name; the first is preferred unless another is at least a tenth faster.
        model: the global model [D].
        tasks: makes a typical block of clients afresh for each run.
        repeats: timed runs of each, in turn, after one that warms up (and compiles).

    Returns:
        The winner's name and the best time of each in seconds.
    """
    made = {name: make() for name, make in trainers.items()}
    best = dict.fromkeys(made, float("inf"))
    for turn in range(repeats + 1):
        for name, trainer in made.items():
            work = tasks()
            started = time.perf_counter()
            for update in trainer.updates(model, work):
                update[:1, :1].cpu()  # waits until the device has done the work
            if turn > 0:
                best[name] = min(best[name], time.perf_counter() - started)
    preferred = next(iter(made))
    winner = min(best, key=lambda name: best[name])
    return (winner if best[winner] < 0.9 * best[preferred] else preferred), best
