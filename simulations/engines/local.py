"""The `local` engine: everything in this process. For notebooks, tests, debugging and single-GPU work."""

from __future__ import annotations

from collections.abc import Iterator

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from simulations.engines.grid import WorkerGrid


class LocalGrid(WorkerGrid):
    """Calls the ClientApp directly; a client's exception reaches the caller as it is."""

    def __init__(self, client_app: ClientApp) -> None:
        super().__init__(workers=1)
        self._app = client_app
        self._context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        """See `WorkerGrid.deliver`."""
        for message in messages:
            yield self._app(message, self._context)
