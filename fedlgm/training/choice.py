"""Choice of the fastest trainer on this machine, by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fedlgm.aggregation.contributions import raw_updates
from fedlgm.errors import ConfigError
from fedlgm.training.base import ClientTask, Trainer


def fastest(
    trainers: Mapping[str, Callable[[], Trainer]],
    model: Tensor,
    tasks: Callable[[], Sequence[ClientTask]],
    repeats: int = 2,
    blocks: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[str, dict[str, float]]:
    """Time every trainer on the same number of clients, and choose the fastest.

    Args:
        trainers: functions that create the trainers, by name. The first trainer is chosen unless
            the fastest other trainer needs less than nine tenths of its time. Another trainer whose
            `updates` refuses the model, as the vectorised trainer's may, is skipped.
        model: the global model [D].
        tasks: function that creates a new typical block of clients for each run.
        repeats: number of timed runs of each trainer, after a warm-up run in which compilation
            happens. The trainers take turns.
        blocks: number of blocks to be trained, among which the additional time of the warm-up run
            is divided.
        clock: function that returns a time in seconds.

    Returns:
        The chosen trainer's name, and the seconds per block of each trainer.
    """
    candidates = {name: make() for name, make in trainers.items()}
    preferred = next(iter(candidates))
    first, best = {}, dict.fromkeys(candidates, math.inf)
    for turn in range(repeats + 1):
        for name, trainer in list(candidates.items()):
            work = tasks()
            started = clock()
            try:
                for update in trainer.updates(model, work):
                    raw_updates(update)[:1, :1].cpu()  # waits until the device has done the work
            except ConfigError:
                if name == preferred:
                    raise
                del candidates[name], best[name]
                continue
            seconds = clock() - started
            if turn == 0:
                first[name] = seconds
            else:
                best[name] = min(best[name], seconds)
    cost = {name: best[name] + max(first[name] - best[name], 0.0) / blocks for name in candidates}
    winner = min(cost, key=lambda name: cost[name])
    return (winner if cost[winner] < 0.9 * cost[preferred] else preferred), cost
