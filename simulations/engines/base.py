"""Interface of engines, which connect a run with its clients."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr.serverapp import Grid
from typing_extensions import override

from fedlgm.checks import check_count
from fedlgm.errors import ConfigError

# the code that starts a deployment's processes is in this package and needs no torch
if TYPE_CHECKING:
    from fedlgm.noise.keys import KeyRing
    from simulations.config.assembly import Assembly
    from simulations.config.recipe import Recipe
    from simulations.runs.folder import RunFolder
    from simulations.runs.rows import OnRound, RunSummary
    from simulations.runs.trackers import Tracker


@dataclass(frozen=True)
class EngineOptions:
    """The caller's options of an engine; None keeps the engine's default.

    Attributes:
        workers: processes that train.
        ray_address: a Ray cluster to join.
        supernodes: simulated SuperNodes of Flower's runtime.

    Raises:
        ConfigError: a number is below 1.
    """

    workers: int | None = None
    ray_address: str | None = None
    supernodes: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("workers", self.workers), ("supernodes", self.supernodes)):
            if number is not None:
                check_count(name, number)


_OWNED = {
    "ray_address": ("a Ray address", "ray"),
    "supernodes": ("a number of SuperNodes", "flower"),
}


class Engine(ABC):
    """Runs a federation, with one object per call of `simulate`.

    Subclass `GridEngine` for an engine that has a Flower `Grid`.

    Args:
        options: the caller's options.

    Raises:
        ConfigError: the engine does not support an option, or a package is not installed.
    """

    name: str = ""
    in_process: bool = True
    """Whether the run's server runs in this process, so that objects of this process can follow the
    run."""
    refuses: tuple[str, ...] = ()
    """Options that the engine does not support."""

    def __init__(self, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        for name in self.refuses:
            if getattr(self.options, name) is not None:
                what, owner = _OWNED[name]
                raise ConfigError(f"{what} is for engine {owner!r}, not {self.name!r}")

    def workers(self, recipe: Recipe) -> int:
        """Number of processes that train: the caller's, otherwise the recipe's, otherwise one per
        core.
        """
        return self.options.workers or recipe.run.workers or os.cpu_count() or 1

    @contextmanager
    def start(self, assembly: Assembly) -> Iterator[None]:
        """Refuse a run that the engine cannot serve, and keep the services that the run needs until
        the block ends.

        The block checks the run, while slow services start, and then calls `wait` and `serve`.

        Args:
            assembly: the run's objects. The objects that are served later may differ in the
                clients' training, but not in data or model.

        Raises:
            ConfigError: the engine cannot serve this run.
        """
        yield

    def wait(self) -> None:  # noqa: B027  (most engines hold nothing)
        """Wait until the services are up, within a block of `start`.

        Raises:
            RunError: a service cannot start; nothing has been written yet.
        """

    @abstractmethod
    def serve(
        self,
        assembly: Assembly,
        folder: RunFolder,
        progress: OnRound | None,
        trackers: Sequence[Tracker],
    ) -> RunSummary:
        """Run, or continue, the checked run in a folder, within a block of `start`.

        Args:
            assembly: the run's objects.
            folder: the run's folder.
            progress: called with each round's row.
            trackers: objects that follow the run.
        """


class GridEngine(Engine):
    """An engine with a grid, over which the run's server runs in this process.

    Example:
        >>> from contextlib import contextmanager
        >>> import simulations, tempfile
        >>> from clients import AnyClient
        >>> from simulations.engines.local import LocalGrid
        >>> class Here(GridEngine):
        ...     name = "here"
        ...
        ...     @contextmanager
        ...     def grid(self, assembly, keys):
        ...         yield LocalGrid.of(assembly.client(keys, AnyClient()))
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> simulations.simulate(overrides=["federation.rounds=1"], engine=Here(), run_dir=folder)["engine"]
        'here'
    """

    @abstractmethod
    def grid(self, assembly: Assembly, keys: KeyRing) -> AbstractContextManager[Grid]:
        """The grid whose clients are made from the run's objects, until the block ends.

        Args:
            assembly: the run's objects.
            keys: key ring of the clients.
        """

    @override
    def serve(
        self,
        assembly: Assembly,
        folder: RunFolder,
        progress: OnRound | None,
        trackers: Sequence[Tracker],
    ) -> RunSummary:
        from simulations.runs.server import serve  # workers do not need this import

        keys, _ = folder.keys(assembly.recipe.run.seed)
        with self.grid(assembly, keys) as grid:
            return serve(grid, assembly, folder, self.name, progress, trackers=trackers)


def require_ray(engine: str, address: str | None = None) -> None:
    """Refuse an engine that needs Ray if Ray is missing, or cannot be started in this machine's
    temporary folder.

    Args:
        engine: its name.
        address: a running cluster, which needs no folder here.

    Raises:
        ConfigError: Ray cannot start; the message says what to do.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"engine {engine!r} needs the package ray, which is not installed: pip install "
            "'fedlgm[ray]', or use engine 'local'"
        )
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR", "")
    if address is None and not place.isascii():
        raise ConfigError(
            f"engine {engine!r}: Ray cannot keep its files under {place} (TMPDIR), whose name is "
            "not ASCII: set RAY_TMPDIR to another folder, such as /tmp"
        )
