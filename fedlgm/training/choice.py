"""Choice of the fastest trainer on this machine by measurement."""

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
    """Time every trainer on the same clients.

    Args:
        trainers: makers of the trainers, by name. The first is preferred unless another is at least
            a tenth faster. A trainer that refuses the model, as the vectorised trainer may, is
            skipped.
        model: the global model [D].
        tasks: function that makes a new typical block of clients for each timed run.
        repeats: timed runs of each trainer, in turn, after a warm-up run (which also compiles).
        blocks: number of future blocks, over which the warm-up time is divided.
        clock: function that returns a time in seconds.

    Returns:
        The winner's name, and the seconds per block of each trainer.
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
