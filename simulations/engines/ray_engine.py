"""The `ray` engine, with resident actors on this machine or on a cluster. It imports Ray when it
starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.serverapp import Grid
from typing_extensions import override

from fedlgm.noise.keys import KeyRing
from simulations.config.assembly import Assembly
from simulations.engines.base import EngineOptions, GridEngine, require_ray


class RayEngine(GridEngine):
    """Resident actors, which start while the run is checked.

    Args:
        options: workers, and a cluster's address.

    Raises:
        ConfigError: Ray is not installed, or an option belongs to another engine.

    Example:
        >>> RayEngine(EngineOptions(supernodes=2))
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: a number of SuperNodes is for engine 'flower', not 'ray'
    """

    name = "ray"
    refuses = ("supernodes",)

    def __init__(self, options: EngineOptions | None = None) -> None:
        super().__init__(options)
        require_ray(self.name, self.options.ray_address)

    @contextmanager
    @override
    def start(self, assembly: Assembly) -> Iterator[None]:
        from simulations.engines import cluster
        from simulations.engines.ray import RayGrid, gpu_share

        workers, address = self.workers(assembly.recipe), self.options.ray_address

        def start_actors() -> RayGrid:
            return RayGrid(workers, gpu_share(assembly.model.device, workers))

        with cluster.session(address, workers, start_actors, leave=RayGrid.close) as ready:
            if address is not None:
                ready()  # joining is quick, so report a wrong address now
            self._ready = ready
            yield

    @override
    def wait(self) -> None:
        self._ready()

    @contextmanager
    @override
    def grid(self, assembly: Assembly, keys: KeyRing) -> Iterator[Grid]:
        yield self._ready().serving(assembly, keys)
