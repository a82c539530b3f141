"""The Flower client, which trains, bounds and, under local trust, adds its own noise.

>>> from clients import AnyClient, PartitionedSource
>>> from fedlgm import LocalTraining, Partition, data, mechanisms, models
>>> from fedlgm.training import SequentialTrainer
>>> digits, settings = data.load("digits"), LocalTraining(lr=0.1)
>>> source = PartitionedSource(digits, Partition.from_clients([[0, 1, 2], [3, 4]], samples=len(digits.train_y)))
>>> model = models.build("mlp", in_shape=digits.shape, classes=10)
>>> layers = LayerTable.from_module(model)
>>> work = LocalWork(SequentialTrainer(model, layers, settings), settings, source)
>>> client = LayerwiseClient(work, mechanisms.get("uniform"), layers, KeyRing.from_seed(1), AnyClient())
>>> app: ClientApp = client.as_app()
>>> LayerwiseClient(work, mechanisms.get("uniform"), layers, KeyRing.from_seed(1), OneClient(0, population=2))
Traceback (most recent call last):
    ...
fedlgm.errors.ConfigError: run.seed: a real node refuses a public seed, ...
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.consent import Agreed, Consent
from clients.own_plans import answer_first
from clients.replying import ReplyingApp, quiet
from clients.serving import AnyClient, OneClient, Serving
from clients.updates import LocalWork
from fedlgm import wire
from fedlgm.aggregation.client_release import Asked, ClientPlanner, client_release
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms.mechanism import Mechanism, PlansFromPrivateData
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.training.devices import Numerics


class LayerwiseClient:
    """The Flower client of a run. It represents one client or, in a simulation, any block of
    clients.

    Args:
        work: training and data.
        mechanism: the run's mechanism; a client uses only its plans.
        layers: the mechanism's view of the model's layers.
        keys: key ring from which the order of the batches and, under local trust, the client's
            noise are drawn.
        serves: clients that this object represents.
        consent: the limits that a client agrees to under local trust. The client refuses requests
            beyond these limits.
        numerics: threads, device and noise backend. Results depend on them, so they are part of a
            recipe.

    Raises:
        ConfigError: a real node has a public seed, or the mechanism needs another client class.
    """

    plans_from_private_data: ClassVar[bool] = False
    """Whether this client plans from its own private data, as `PublishedClient` alone does."""

    def __init__(
        self,
        work: LocalWork,
        mechanism: Mechanism,
        layers: LayerTable,
        keys: KeyRing,
        serves: Serving,
        *,
        consent: Consent | None = None,
        numerics: Numerics | None = None,
    ) -> None:
        if isinstance(serves, OneClient) and not serves.simulated and not keys.secret:
            raise ConfigError(
                "run.seed: a real node refuses a public seed, with which its noise could be drawn "
                "again: leave it out (--set run.seed=none)"
            )
        self._work, self._layers, self._keys, self._serves, self._consent = (
            work,
            layers,
            keys,
            serves,
            consent,
        )
        if isinstance(mechanism, PlansFromPrivateData) != self.plans_from_private_data:
            raise ConfigError(
                f"{mechanism.name}: clients.choice.client_class names the client of this mechanism"
            )
        self._contributions = work.contributions(numerics)
        self._contributions.planner = self.planner(mechanism)

    def as_app(self, app: ClientApp | None = None) -> ClientApp:
        """Register the client's functions with a Flower `ClientApp` and return the app.

        Args:
            app: the app that calls this client; by default an app that answers with the text of a
                refusal.
        """
        app = ReplyingApp() if app is None else app
        app.train()(self.train)
        app.query()(self.query)
        return app

    def query(self, message: Message, context: Context) -> Message:
        """Reply with the client that is served here, or state that any client is served."""
        return place_reply(message, self._serves)

    def train(self, message: Message, context: Context) -> Message:
        """Reply with the sum of the block's bounded (and, under local trust, noised) contributions
        [plan.size].

        Raises:
            ConfigError, PrivacyError: the message contains no valid plan, the client has not agreed
                to the plan, or the message is for clients that are not served here.
            RunError: training fails on a real node. The log of the node says why, and this error
                does not: Flower sends the text of any error to the server, and the text of the
                original error may quote private data.
        """
        asked = asked_of(message, self._layers, self._serves)
        agreed = Agreed(self._keys, self._consent, context.state, summed=self._simulated)
        with self._training():
            block = client_release(self._contributions, agreed, asked)
        return reply_with(
            message,
            {wire.SUM: block.total.cpu().numpy()},
            {wire.CLIENT_COUNT: block.count, wire.DISCARDED: int(block.discarded)},
        )

    @staticmethod
    def planner(mechanism: Mechanism) -> ClientPlanner | None:
        """Return the planner with which clients plan their own releases; None if clients follow the
        round's plan.
        """
        return answer_first(mechanism)

    @property
    def _simulated(self) -> bool:
        return isinstance(self._serves, AnyClient) or self._serves.simulated

    def _training(self) -> AbstractContextManager[None]:
        """Replace the texts of errors on a real node. The texts of refusals are sent, because they
        quote only the plan and the consent.
        """
        return nullcontext() if self._simulated else quiet("training", PrivacyError)


def place_reply(message: Message, serves: Serving) -> Message:
    """Make the reply that names the clients served here."""
    return Message(
        content=RecordDict({wire.CONFIG: ConfigRecord(dict(serves.place()))}), reply_to=message
    )


def asked_of(message: Message, layers: LayerTable, serves: Serving) -> Asked:
    """Read from a train message what is requested of which clients.

    Args:
        message: a train message of the strategy.
        layers: the model's layers.
        serves: clients that this process represents.

    Raises:
        PrivacyError: the message asks for another client.
    """
    config = message.content.config_records[wire.CONFIG]
    clients = [int(client) for client in config[wire.CLIENTS]]  # type: ignore[union-attr]
    serves.check(clients)
    model = torch.from_numpy(
        wire.view(message.content.array_records[wire.ARRAYS][wire.MODEL].data).copy()
    )
    plan = ReleasePlan.from_json(layers, str(config[wire.PLAN]))
    return Asked(plan, model, int(config[wire.ROUND]), clients)  # type: ignore[arg-type]


def reply_with(message: Message, arrays: dict[str, np.ndarray], metrics: dict[str, int]) -> Message:
    """Make a reply that contains arrays and counts."""
    record = ArrayRecord({name: Array(**wire.fields(array)) for name, array in arrays.items()})
    content = RecordDict({wire.ARRAYS: record, wire.METRICS: MetricRecord(dict(metrics))})
    return Message(content=content, reply_to=message)
