"""The client of published variants that are NOT PRIVATE: it reports raw figures of its own updates.

>>> from fedlgm import mechanisms
>>> from clients.choice import client_class
>>> client_class(mechanisms.get("ladp", variant="published", threshold=1.0)).__name__
'PublishedClient'
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp
from typing_extensions import override

from clients.example_level import ExampleSteps, ExampleWork
from clients.layerwise import LayerwiseClient, asked_of, reply_with
from clients.updates import ClientUpdates, LocalWork
from fedlgm import wire
from fedlgm.aggregation.client_release import Asked, Noised
from fedlgm.aggregation.contributions import Updates, raw_updates
from fedlgm.errors import PrivacyError
from fedlgm.mechanisms import Mechanism, UsesPrivateUpdates
from fedlgm.noise.keys import KeyRing
from fedlgm.training.devices import Numerics


class PublishedUpdates(ClientUpdates):
    """Whole updates of clients that may plan from their own update.

    Args:
        work: training and data.
        mechanism: the published variant.
        numerics: see `Contributions`.
    """

    def __init__(
        self, work: LocalWork, mechanism: Mechanism, numerics: Numerics | None = None
    ) -> None:
        super().__init__(work, numerics)
        self._mechanism, self._notes = mechanism, list[dict[str, np.ndarray]]()

    @override
    def release(self, client: int, update: Updates | None, asked: Asked, noise: KeyRing) -> Noised:
        if update is not None and isinstance(self._mechanism, UsesPrivateUpdates):
            raw = raw_updates(update)[0].cpu()
            plan, note = self._mechanism.plan_from_private_update(asked.plan, raw, asked.model)
            asked = asked._replace(plan=plan)
            self._notes.append(note)
        return super().release(client, update, asked, noise)

    def take_notes(self) -> list[dict[str, np.ndarray]]:
        """The figures, each [K], of each release since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def figures(self, asked: Asked, order: KeyRing) -> np.ndarray:
        """Raw layer norms [clients, K] of the updates; 0 for clients without data. PRIVATE."""
        layers, rows = asked.plan.layers, list[np.ndarray]()
        for clients, updates in self.updates(asked, order):
            if updates is None:
                rows += [np.zeros(len(layers)) for _ in clients]
            else:
                rows += [layers.norms(update).numpy() for update in raw_updates(updates).cpu()]
        return np.stack(rows)


class PublishedSteps(ExampleSteps):
    """Steps on examples whose private figures the mechanism asks for."""

    def take_notes(self) -> list[dict[str, np.ndarray]]:
        """No figures: the steps follow the common plan."""
        return []

    def figures(self, asked: Asked, order: KeyRing) -> np.ndarray:
        """The mechanism's figures of the batches (`ExampleTrainer.figures`), [rows, K]. PRIVATE."""
        parts = [
            self.trainer.figures(data.x, data.y, rows)
            for _, data, rows in self.batches(asked, order)
        ]
        return np.concatenate([np.empty((0, len(asked.plan.layers))), *parts])


class PublishedClient(LayerwiseClient):
    """`LayerwiseClient` for a mechanism that plans from private data. NOT PRIVATE."""

    plans = True
    _contributions: PublishedUpdates | PublishedSteps

    @override
    def as_app(self, app: ClientApp | None = None) -> ClientApp:
        app = super().as_app(app)
        app.train("norms")(self.train_norms)
        return app

    @override
    def train(self, message: Message, context: Context) -> Message:
        self._contributions.take_notes()  # of a release that failed
        reply = super().train(message, context)
        notes = self._contributions.take_notes()
        for name in notes[0] if notes else ():
            figures = np.stack([note[name] for note in notes])
            reply.content.array_records[wire.ARRAYS][wire.NOTE + name] = Array(
                **wire.fields(figures)
            )
        return reply

    def train_norms(self, message: Message, context: Context) -> Message:
        """Reply with the figures from which the server plans, [rows, K]."""
        asked = asked_of(message, self._layers, self._serves)
        with self._training():
            rows = self._contributions.figures(asked, self._keys)
        return reply_with(message, {wire.NORMS: rows}, {wire.CLIENT_COUNT: len(rows)})

    @override
    def _contribute(
        self, work: LocalWork, mechanism: Mechanism, numerics: Numerics | None
    ) -> PublishedUpdates | PublishedSteps:
        if isinstance(work, ExampleWork):
            return PublishedSteps(work, numerics)
        return PublishedUpdates(work, mechanism, numerics)


def train_norms(client: LayerwiseClient, message: Message, context: Context) -> Message:
    """`PublishedClient.train_norms` of a client that may be another.

    Raises:
        PrivacyError: the client's mechanism is private, so nothing leaves it without noise.
    """
    if not isinstance(client, PublishedClient):
        raise PrivacyError(
            "this client agreed to private releases: it returns no layer norms without noise"
        )
    return client.train_norms(message, context)
