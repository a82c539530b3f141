"""The Flower client: trains, bounds and, under local trust, adds its own noise.

>>> from clients import AnyClient, PartitionedSource
>>> from fedlgm import Partition, data, mechanisms, models
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

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from clients.consent import Consent
from clients.serving import OneClient, Serving
from clients.source import ClientSource
from fedlgm import inputs, wire
from fedlgm.aggregation import BoundedSum, sum_on
from fedlgm.contributions import Updates, unbounded
from fedlgm.devices import Numerics, torch_threads
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.facts import LocalTraining
from fedlgm.keys import KeyRing, Purpose
from fedlgm.layers import LayerTable
from fedlgm.mechanisms import Mechanism, UsesPrivateUpdates
from fedlgm.plan import ReleasePlan
from fedlgm.release import local_release
from fedlgm.tasks import Classification, Task, evaluate
from fedlgm.training import ClientTask, Trainer

if TYPE_CHECKING:
    from fedlgm.example_level.trainer import ExampleTrainer


@dataclass(frozen=True)
class LocalWork:
    """What a client does with its data before anything is bounded.

    Attributes:
        trainer: local training; an `ExampleTrainer` for `ExampleClient`.
        settings: its settings.
        source: the clients' data.
        straggler_rate: probability that a client stops after one epoch in a round (simulations only).
        evaluator: a model of its own for `LayerwiseClient.evaluate`; without one the client refuses to evaluate.
        task: owns the figures of an evaluation.
    """

    trainer: Trainer | ExampleTrainer
    settings: LocalTraining
    source: ClientSource
    straggler_rate: float = 0.0
    evaluator: nn.Module | None = None
    task: Task = field(default_factory=Classification)


class LayerwiseClient:
    """Serves one client or, in a simulation, any block of clients.

    Args:
        work: training and data.
        mechanism: the run's mechanism; only published variants that are not private act on the client beyond the plan.
        layers: the mechanism's view of the model's layers.
        keys: key ring for batch order and, under local trust, for the client's own noise.
        serves: which clients this object answers for.
        consent: under local trust, what a client agrees to; it refuses more, whatever the server asks.
        numerics: threads, device and noise backend; results depend on them, so they are part of a recipe.

    Raises:
        ConfigError: a public seed on a real node.
    """

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
                "run.seed: a real node refuses a public seed, with which its noise could be drawn again: leave it out "
                "(--set run.seed=none)"
            )
        self._work, self._mechanism, self._layers, self._keys = work, mechanism, layers, keys
        self._serves, self._consent, self._numerics = serves, consent, numerics or Numerics()

    def as_app(self) -> ClientApp:
        """The client as a Flower `ClientApp`."""
        app = ClientApp()
        app.train()(self.train)
        app.train("norms")(self.train_norms)
        app.evaluate()(self.evaluate)
        app.query()(self.query)
        return app

    def query(self, message: Message, context: Context) -> Message:
        """Tell the strategy which client lives here: one, or any."""
        return place_reply(message, self._serves)

    def train(self, message: Message, context: Context) -> Message:
        """Reply with the sum of the block's bounded (and, under local trust, noised) contributions [plan.size].

        Raises:
            ConfigError, PrivacyError: a message that holds no plan, a plan that the client has not agreed to, or
                clients that it does not serve.
        """
        config = message.content.config_records[wire.CONFIG]
        plan = ReleasePlan.from_json(self._layers, str(config[wire.PLAN]))
        round_ = int(config[wire.ROUND])  # type: ignore[arg-type]
        model = _model(message)
        if self._consent is not None:
            self._consent.check(plan)
        if plan.facts.trust == "local":
            block, notes = self._release_each(message, context, plan, model, round_)
        else:
            block, notes = self._sum(message, plan, model, round_)
        metrics = {
            wire.CLIENT_COUNT: block.count,
            # Under local trust the server learns nothing that was not noised.
            wire.DISCARDED: 0 if plan.facts.trust == "local" else int(block.discarded),
        }
        arrays = {wire.SUM: block.total.cpu().numpy()}
        arrays |= {wire.NOTE + name: np.stack([note[name] for note in notes]) for name in (notes[0] if notes else ())}
        return _reply(message, arrays, metrics)

    def _sum(
        self, message: Message, plan: ReleasePlan, model: Tensor, round_: int
    ) -> tuple[BoundedSum, list[dict[str, np.ndarray]]]:
        """Central trust: the bounded contributions of the block, added up where they lie."""
        block = sum_on(plan, self._numerics.device, self._kernels)
        for clients, updates in self._updates(self._members(message), model, round_):
            block.skip(len(clients)) if updates is None else block.add(updates)
        return block, []

    def _release_keys(self, plan: ReleasePlan, model: Tensor) -> KeyRing:
        """Keys of a client's own draws: another model or plan in a round is another release, with other noise."""
        return self._keys.derive(model.numpy().tobytes(), plan.to_json().encode())

    def _release_each(
        self, message: Message, context: Context, plan: ReleasePlan, model: Tensor, round_: int
    ) -> tuple[BoundedSum, list[dict[str, np.ndarray]]]:
        """Local trust: every client of the block bounds its update and adds its own noise, with or without data."""
        total = BoundedSum.empty(plan)
        keys = self._release_keys(plan, model)
        notes: list[dict[str, np.ndarray]] = []
        for clients, updates in self._updates(self._members(message), model, round_):
            for row, client in enumerate(clients):
                update, own_plan = None if updates is None else updates[row : row + 1], plan
                if isinstance(self._mechanism, UsesPrivateUpdates) and update is not None:
                    own_plan, note = self._mechanism.plan_from_private_update(plan, unbounded(update)[0].cpu(), model)
                    notes.append(note)
                own, name = local_release(
                    update, own_plan, keys, round_, client, self._numerics.noise_backend, self._numerics.device
                )
                if self._consent is not None:
                    # Before anything leaves: a release beyond what was agreed to is refused here.
                    self._consent.record(context.state, client, name, own_plan)
                total.merge(own.total.to(total.total), own.count, own.discarded)
        return total, notes

    def evaluate(self, message: Message, context: Context) -> Message:
        """Reply with the task's metrics of the global model on the block's own data, and the number of examples.

        These figures are not noised: they are one more look at private data that no budget covers. A client answers
        only if its work has an `evaluator`; the strategies of this package never ask.

        Raises:
            PrivacyError: its work has none.
        """
        evaluator = self._work.evaluator
        if evaluator is None:
            raise PrivacyError("this client does not evaluate: unprotected figures of its data would leave it")
        self._layers.load_(evaluator, _model(message))
        data = [own for own in map(self._work.source, self._members(message)) if len(own)]
        figures: dict[str, Any] = {wire.EXAMPLE_COUNT: sum(map(len, data))}
        if data:
            x, y = inputs.concatenate([own.x for own in data]), torch.cat([own.y for own in data])
            figures |= evaluate(self._work.task, evaluator, x, y)
        return Message(content=RecordDict({wire.METRICS: MetricRecord(figures)}), reply_to=message)

    def train_norms(self, message: Message, context: Context) -> Message:
        """Reply with each client's raw layer norms [clients, K]. Only published, NOT PRIVATE variants ask for them."""
        if self._consent is not None:
            self._consent.check_raw_figures()
        round_ = int(message.content.config_records[wire.CONFIG][wire.ROUND])  # type: ignore[arg-type]
        rows = self._raw_norms(message, _model(message), round_)
        return _reply(message, {wire.NORMS: rows}, {wire.CLIENT_COUNT: len(rows)})

    def _raw_norms(self, message: Message, model: Tensor, round_: int) -> np.ndarray:
        """Layer norms of the block's updates, [clients, K]."""
        rows: list[np.ndarray] = []
        for clients, updates in self._updates(self._members(message), model, round_):
            if updates is None:
                rows += [np.zeros(len(self._layers)) for _ in clients]
            else:
                rows += [self._layers.norms(update).numpy() for update in unbounded(updates).cpu()]
        return np.stack(rows)

    @property
    def _kernels(self) -> Any:
        backend = self._numerics.noise_backend
        return None if backend == "cpu" else backend

    def _members(self, message: Message) -> list[int]:
        """The clients that the message asks for."""
        clients = [int(c) for c in message.content.config_records[wire.CONFIG][wire.CLIENTS]]  # type: ignore[union-attr]
        self._serves.check(clients)
        return clients

    def _updates(self, clients: list[int], model: Tensor, round_: int) -> Iterator[tuple[list[int], Updates | None]]:
        """(clients, their updates [b, D]) of the block in the order of the message; None for those without data."""
        tasks = {client: self._task(client, round_) for client in clients}
        with torch_threads(self._numerics.threads):
            blocks = cast(Trainer, self._work.trainer).updates(
                model, [task for task in tasks.values() if task is not None]
            )
            rows: Updates = torch.empty(0)
            for trained, run in groupby(tasks, key=lambda client: tasks[client] is not None):
                waiting = list(run)
                if not trained:
                    yield waiting, None
                    continue
                while waiting:
                    if len(rows) == 0:
                        rows = next(blocks)
                    yield waiting[: len(rows)], rows[: len(waiting)]
                    waiting, rows = waiting[len(rows) :], rows[len(waiting) :]

    def _task(self, client: int, round_: int) -> ClientTask | None:
        data = self._work.source(client)
        if len(data) == 0:
            return None
        epochs = self._work.settings.epochs
        if self._work.straggler_rate > 0:
            # Path (round, client, 1): dropouts, drawn by the strategy, use 0.
            late = self._keys.numpy_generator(Purpose.DROPOUT, round_, client, 1).random() < self._work.straggler_rate
            epochs = 1 if late else epochs
        return ClientTask(data.x, data.y, self._keys.torch_generator(Purpose.TRAIN, round_, client), epochs)


def place_reply(message: Message, serves: Serving) -> Message:
    """The reply that tells a strategy which clients are served here."""
    return Message(content=RecordDict({wire.CONFIG: ConfigRecord(dict(serves.place()))}), reply_to=message)


def _model(message: Message) -> Tensor:
    return torch.from_numpy(wire.view(message.content.array_records[wire.ARRAYS][wire.MODEL].data).copy())


def _reply(message: Message, arrays: dict[str, np.ndarray], metrics: dict[str, int]) -> Message:
    record = ArrayRecord({name: Array(**wire.fields(array)) for name, array in arrays.items()})
    content = RecordDict({wire.ARRAYS: record, wire.METRICS: MetricRecord(dict(metrics))})
    return Message(content=content, reply_to=message)
