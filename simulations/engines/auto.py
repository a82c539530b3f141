"""The engine `auto`, which selects the best engine for the machine and the run."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager

from typing_extensions import override

from simulations.config.assembly import Assembly
from simulations.engines.base import Engine, EngineOptions, Serve


class AutoEngine(Engine):
    """Uses forked processes on one Linux machine, this process for one GPU, and otherwise Ray.

    One process keeps a GPU busy, since it trains many clients side by side. Several GPUs or a
    cluster need Ray.

    Every choice leads to the same model, and the run's summary names the choice.

    Args:
        options: options of the chosen engine: a Ray address selects Ray, a number of SuperNodes
            selects Flower.

    Example:
        >>> AutoEngine(EngineOptions(supernodes=2)).choose(None)
        'flower'
    """

    name = "auto"

    def __init__(self, options: EngineOptions | None = None) -> None:
        super().__init__(options)
        self.in_process = self.options.supernodes is None

    def choose(self, assembly: Assembly | None) -> str:
        """Name of the engine for a run; without one, for any run whose clients train on the CPU."""
        if self.options.supernodes is not None:
            return "flower"
        if self.options.ray_address is not None:
            return "ray"
        if assembly is not None and assembly.model.device.type != "cpu":
            import torch

            if assembly.model.device.index is not None or torch.cuda.device_count() <= 1:
                return "local"
        elif sys.platform == "linux":
            from simulations.engines.processes import fork_problem

            if not fork_problem(assembly):
                return "processes"
        return "ray" if importlib.util.find_spec("ray") is not None else "local"

    @override
    def started(self, assembly: Assembly) -> AbstractContextManager[Serve]:
        from simulations import engines

        return engines.get(self.choose(assembly), self.options).started(assembly)
