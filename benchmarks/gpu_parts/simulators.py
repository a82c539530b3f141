"""Private rounds of the recipe `fashion-mnist` on a GPU, beside a bare loop and pfl on the same
GPU.

The work is that of `benchmarks.simulators`. The bare loop and pfl train one client after another,
in one process or in several that share the GPU; the processes of pfl never exchange anything.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.contenders import work
from benchmarks.simulators import Contender, interleaved

PROCESSES = (1, 8)


def measure(rounds: int = 10) -> dict[str, Any]:
    """Return the medians over `rounds` alternating rounds of every contender, and their ratios to
    ours.
    """
    made = contenders()
    answers = interleaved(made, rounds)
    times = {name: [answer["seconds"] for answer in rows] for name, rows in answers.items()}
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "work": f"{work.CLIENTS} clients, {work.COHORT} a round, CNN 26,010, {work.EPOCHS} epochs, "
        f"batch {work.BATCH}",
        "seconds_per_round": medians,
        "ratios": {
            name: seconds / medians["ours"] for name, seconds in medians.items() if name != "ours"
        },
        "all_seconds": times,
    }


def contenders() -> dict[str, Contender]:
    """Start the contenders and run their first round; pfl takes part if it is installed."""
    makers: dict[str, Callable[[], Contender]] = {
        "ours": partial(Contender, ["ours"], environment=_environment(1))
    }
    python = os.environ.get(
        "FEDLGM_PFL_PYTHON", sys.executable if importlib.util.find_spec("pfl") else None
    )
    for count in PROCESSES:
        name = "" if count == 1 else f", {count} processes"
        makers[f"bare loop{name}"] = partial(Contender, ["bare"], environment=_environment(count))
        if python is not None:
            shares = [["pfl_simulator", str(share)] for share in range(count)]
            makers[f"pfl{name}"] = partial(
                Contender, *shares, python=python, environment=_environment(count)
            )
    with ThreadPoolExecutor(len(makers)) as pool:
        started = {name: pool.submit(make) for name, make in makers.items()}
    return {name: future.result() for name, future in started.items()}


def _environment(processes: int) -> dict[str, str]:
    return {"FEDLGM_WORK_DEVICE": "cuda", "FEDLGM_WORK_PROCESSES": str(processes)}
