"""The client of published variants that are NOT PRIVATE: it reports figures of its updates without
noise.

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

from clients.example_level import ExampleSteps
from clients.layerwise import LayerwiseClient, asked_of, reply_with
from fedlgm import wire
from fedlgm.aggregation.client_release import Asked, Follow, Noised
from fedlgm.aggregation.contributions import Updates, raw_updates
from fedlgm.errors import PrivacyError
from fedlgm.mechanisms import Mechanism, UsesPrivateUpdates
from fedlgm.noise.keys import KeyRing


class RawUpdatePlanner:
    """Planner of a client that plans from its raw update. NOT PRIVATE.

    Args:
        mechanism: the published variant.
    """

    def __init__(self, mechanism: UsesPrivateUpdates) -> None:
        self._mechanism, self._notes = mechanism, list[dict[str, np.ndarray]]()

    def release(
        self, follow: Follow, update: Updates | None, asked: Asked, noise: KeyRing
    ) -> Noised:
        """See `ClientPlanner`; a client without data follows the common plan."""
        if update is not None:
            raw = raw_updates(update)[0].cpu()
            plan, note = self._mechanism.plan_from_private_update(asked.plan, raw, asked.model)
            asked = asked._replace(plan=plan)
            self._notes.append(note)
        return follow(asked, noise)

    def take_notes(self) -> list[dict[str, np.ndarray]]:
        """Return the figures, each [K], of each release since the last call."""
        notes, self._notes = self._notes, []
        return notes


class PublishedClient(LayerwiseClient):
    """`LayerwiseClient` for a mechanism that plans from private data. NOT PRIVATE."""

    plans_from_private_data = True

    @override
    def as_app(self, app: ClientApp | None = None) -> ClientApp:
        app = super().as_app(app)
        app.train("norms")(self.train_norms)
        return app

    @override
    def train(self, message: Message, context: Context) -> Message:
        planner = self._contributions.planner
        if not isinstance(planner, RawUpdatePlanner):
            return super().train(message, context)
        planner.take_notes()  # drop the figures of a release that failed
        reply, notes = super().train(message, context), planner.take_notes()
        for name in notes[0] if notes else ():
            figures = Array(**wire.fields(np.stack([note[name] for note in notes])))
            reply.content.array_records[wire.ARRAYS][wire.NOTE + name] = figures
        return reply

    def train_norms(self, message: Message, context: Context) -> Message:
        """Reply with the figures from which the server plans, [rows, K]: raw layer norms of the
        updates, or the figures of `ExampleTrainer.figures`.
        """
        asked = asked_of(message, self._layers, self._serves)
        contributions, layers = self._contributions, len(self._layers)
        rows = [np.empty((0, layers))]
        with self._training():
            if isinstance(contributions, ExampleSteps):
                for _, data, drawn in contributions.batches(asked, self._keys):
                    rows.append(contributions.trainer.figures(data.x, data.y, drawn))
            else:
                for clients, updates in contributions.updates(asked, self._keys):
                    if updates is None:
                        rows.append(np.zeros((len(clients), layers)))
                    else:
                        rows += [
                            self._layers.norms(update).numpy()[None]
                            for update in raw_updates(updates).cpu()
                        ]
        norms = np.concatenate(rows)
        return reply_with(message, {wire.NORMS: norms}, {wire.CLIENT_COUNT: len(norms)})

    @override
    @staticmethod
    def planner(mechanism: Mechanism) -> RawUpdatePlanner | None:
        return RawUpdatePlanner(mechanism) if isinstance(mechanism, UsesPrivateUpdates) else None


def train_norms(client: LayerwiseClient, message: Message, context: Context) -> Message:
    """Call `PublishedClient.train_norms` if the client is a `PublishedClient`.

    Raises:
        PrivacyError: the client's mechanism is private, so nothing leaves it without noise.
    """
    if not isinstance(client, PublishedClient):
        raise PrivacyError(
            "this client agreed to private releases: it returns no layer norms without noise"
        )
    return client.train_norms(message, context)
