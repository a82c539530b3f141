"""The `local` engine, which runs everything in this process, for notebooks, tests, debugging and
one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from typing_extensions import override

from clients import AnyClient, LayerwiseClient
from fedlgm.noise.keys import KeyRing
from simulations.config.assembly import Assembly
from simulations.engines.base import GridEngine
from simulations.engines.grid import WorkerGrid


class LocalGrid(WorkerGrid):
    """Calls the ClientApp directly."""

    def __init__(self, client_app: ClientApp) -> None:
        super().__init__(workers=1)
        self._app = client_app
        self._context = Context(
            run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={}
        )

    @classmethod
    def of(cls, client: LayerwiseClient, *more: Any) -> LocalGrid:
        """The grid of one client object, whose exceptions reach the caller unchanged.

        Args:
            client: the client object.
            more: further arguments of the class.
        """
        return cls(client.as_app(ClientApp()), *more)

    @override
    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        for message in messages:
            yield self._app(message, self._context)


class LocalEngine(GridEngine):
    """Runs everything in this process.

    Args:
        options: options of the caller. `workers` has no effect.

    Raises:
        ConfigError: an option belongs to another engine.

    Example:
        >>> from simulations.engines.base import EngineOptions
        >>> LocalEngine(EngineOptions(ray_address="auto"))
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: a Ray address is for engine 'ray', not 'local'
    """

    name = "local"
    refuses = ("ray_address", "supernodes")

    @contextmanager
    @override
    def grid(self, assembly: Assembly, keys: KeyRing) -> Iterator[LocalGrid]:
        yield LocalGrid.of(assembly.client(keys, AnyClient()))
