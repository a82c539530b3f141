"""The choice `auto`: the best engine for the machine and the run."""

from __future__ import annotations

import importlib.util
import sys

import torch

from simulations.engines.base import EngineOptions
from simulations.engines.processes import fork_problem


def choose(options: EngineOptions, device: str = "cpu", threads: int = 1) -> str:
    """Name of the engine for a run: forked processes on one Linux machine, this process for one
    GPU, and otherwise Ray.

    One process keeps a GPU busy, since it trains many clients side by side. Several GPUs or a
    cluster need Ray. Every choice leads to the same model, and the run's summary names the choice.

    Args:
        options: options of the chosen engine: a Ray address selects Ray, a number of SuperNodes
            selects Flower.
        device: device on which the clients train.
        threads: threads of each worker.

    Example:
        >>> choose(EngineOptions(supernodes=2))
        'flower'
    """
    if options.supernodes is not None:
        return "flower"
    if options.ray_address is not None:
        return "ray"
    if device != "cpu":
        if torch.device(device).index is not None or torch.cuda.device_count() <= 1:
            return "local"
    elif sys.platform == "linux" and not fork_problem(device, threads):
        return "processes"
    return "ray" if importlib.util.find_spec("ray") is not None else "local"
