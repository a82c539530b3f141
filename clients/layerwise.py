"""The Flower client: trains, bounds and, under local trust, adds its own noise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from clients.consent import Consent
from clients.source import ClientSource
from fedlgm import wire
from fedlgm.aggregation.device_sum import sum_on
from fedlgm.devices import torch_threads
from fedlgm.errors import PrivacyError
from fedlgm.keys import KeyRing, Purpose
from fedlgm.layers import LayerTable
from fedlgm.mechanisms import Mechanism
from fedlgm.noise import NoiseBackend
from fedlgm.plan import ReleasePlan
from fedlgm.release import add_released, fingerprint
from fedlgm.training import ClientTask, LocalTraining, Trainer, evaluate


class LayerwiseClient:
    """Serves one client or, in a simulation, any block of clients.

    Args:
        trainer: local training.
        settings: its settings.
        source: the clients' data.
        mechanism: the run's mechanism; only published variants that are not private act on the client beyond the plan.
        layers: the mechanism's view of the model's layers.
        keys: key ring for batch order and, under local trust, for the client's own noise.
        straggler_rate: probability that a client stops after one epoch in a round.
        threads: torch threads while training; results depend on it, so it is part of a recipe.
        evaluator: a model of its own for `evaluate`; without one the client refuses to evaluate.
        consent: under local trust, what a client agrees to; it refuses more, whatever the server asks.
        population: number N of registered clients. A node whose config says that it is one of N partitions answers for
            that client alone; any other node answers for every client that it is asked for.
        device: where the trainer leaves its updates, and so where they are bounded and added up.
        noise_backend: who draws the clients' noise under local trust, see `fedlgm.release`.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: LocalTraining,
        source: ClientSource,
        mechanism: Mechanism,
        layers: LayerTable,
        keys: KeyRing,
        *,
        straggler_rate: float = 0.0,
        threads: int = 1,
        evaluator: nn.Module | None = None,
        consent: Consent | None = None,
        population: int | None = None,
        device: torch.device | str = "cpu",
        noise_backend: NoiseBackend = "cpu",
    ) -> None:
        self._trainer, self._settings, self._source = trainer, settings, source
        self._mechanism, self._layers, self._keys = mechanism, layers, keys
        self._straggler_rate, self._threads, self._evaluator = straggler_rate, threads, evaluator
        self._consent, self._population = consent, population
        self._device, self._noise_backend = torch.device(device), noise_backend

    def as_app(self) -> ClientApp:
        """The client as a Flower `ClientApp`."""
        app = ClientApp()
        app.train()(self.train)
        app.train("norms")(self.train_norms)
        app.evaluate()(self.evaluate)
        app.query()(self.query)
        return app

    @staticmethod
    def query(message: Message, context: Context) -> Message:
        """Tell the strategy which client lives here: this node's partition, or any client."""
        own, partitions = _place(context)
        answer: dict[str, Any] = {wire.PARTITION: own, wire.PARTITIONS: partitions}
        return Message(content=RecordDict({wire.CONFIG: ConfigRecord(answer)}), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Reply with the sum of the block's bounded (and, under local trust, noised) contributions [plan.size]."""
        config = message.content.config_records[wire.CONFIG]
        plan = ReleasePlan.from_json(self._layers, str(config[wire.PLAN]))
        round_ = int(config[wire.ROUND])  # type: ignore[arg-type]
        model = _model(message)
        if self._consent is not None:
            self._consent.check(plan)
        block = sum_on(plan, self._device, None if self._noise_backend == "cpu" else self._noise_backend)
        local = plan.budget.trust == "local"
        # Another model or plan in the same round is another release: its noise must not be the same.
        noise_keys = self._keys.derive(model.numpy().tobytes(), plan.to_json().encode()) if local else None
        notes: list[dict[str, np.ndarray]] = []
        for clients, updates in self._updates(self._members(message, context), model, round_):
            own_plans = [plan]
            if self._mechanism.plans_from_private_updates and updates is not None:
                own = [self._mechanism.plan_from_private_update(plan, update, model) for update in updates.cpu()]
                own_plans = [own_plan for own_plan, _ in own]
                notes += [note for _, note in own]
            if noise_keys is None:
                block.skip(len(clients)) if updates is None else block.add(updates)
                continue
            if self._consent is not None:
                for row, client in enumerate(clients):
                    key = fingerprint(noise_keys, round_, client, self._noise_backend)
                    self._consent.record(context.state, client, key, own_plans[row % len(own_plans)])
            # Also without data: whether a client holds any must not show.
            add_released(block, updates, clients, own_plans, noise_keys, round_, self._noise_backend)
        metrics = {
            wire.BLOCK: int(config[wire.BLOCK]),  # type: ignore[arg-type]
            wire.EXAMPLES: block.count,
            # Under local trust the server learns nothing that was not noised.
            wire.DISCARDED: 0 if local else int(block.discarded),
        }
        arrays = {wire.SUM: block.total.cpu().numpy()}
        arrays |= {wire.NOTE + name: np.stack([note[name] for note in notes]) for name in (notes[0] if notes else ())}
        return _reply(message, arrays, metrics)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Reply with loss, accuracy and number of examples of the global model on the block's own data.

        These figures are not noised: they are one more look at private data that no budget covers. A client answers
        only if it was built with an `evaluator`; the strategies of this house never ask.
        """
        if self._evaluator is None:
            raise PrivacyError("this client does not evaluate: unprotected figures of its data would leave it")
        self._layers.load_(self._evaluator, _model(message))
        data = [own for own in map(self._source, self._members(message, context)) if len(own)]
        examples = sum(len(own) for own in data)
        scores = [(*evaluate(self._evaluator, own.x, own.y), len(own) / examples) for own in data]
        figures: dict[str, Any] = {
            "loss": sum(loss * share for loss, _, share in scores),
            "accuracy": sum(accuracy * share for _, accuracy, share in scores),
            wire.EXAMPLES: examples,
        }
        return Message(content=RecordDict({wire.METRICS: MetricRecord(figures)}), reply_to=message)

    def train_norms(self, message: Message, context: Context) -> Message:
        """Reply with each client's raw layer norms [clients, K]. Only published, NOT PRIVATE variants ask for them."""
        if self._consent is not None:
            self._consent.check_raw_figures()
        config = message.content.config_records[wire.CONFIG]
        round_ = int(config[wire.ROUND])  # type: ignore[arg-type]
        rows: list[np.ndarray] = []
        for clients, updates in self._updates(self._members(message, context), _model(message), round_):
            if updates is None:
                rows += [np.zeros(len(self._layers)) for _ in clients]
            else:
                rows += [self._layers.norms(update).numpy() for update in updates.cpu()]
        metrics = {wire.BLOCK: int(config[wire.BLOCK]), wire.EXAMPLES: len(rows)}  # type: ignore[arg-type]
        return _reply(message, {wire.NORMS: np.stack(rows)}, metrics)

    def _members(self, message: Message, context: Context) -> list[int]:
        """The clients that the message asks for."""
        clients = [int(c) for c in message.content.config_records[wire.CONFIG][wire.CLIENTS]]  # type: ignore[union-attr]
        own, partitions = _place(context)
        if partitions == self._population and clients != [own]:
            # Under other numbers a client's data would count more than once.
            raise PrivacyError(f"this node is client {own} of {self._population}: it does not answer for {clients}")
        return clients

    def _updates(self, clients: list[int], model: Tensor, round_: int) -> Iterator[tuple[list[int], Tensor | None]]:
        """(clients, their updates [b, D]) of the block in the order of the message; None for those without data."""
        tasks = {client: self._task(client, round_) for client in clients}
        with torch_threads(self._threads):
            blocks = self._trainer.updates(model, [task for task in tasks.values() if task is not None])
            rows = torch.empty(0)
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
        data = self._source(client)
        if len(data) == 0:
            return None
        epochs = self._settings.epochs
        if self._straggler_rate > 0:
            # Path (round, client, 1): dropouts, drawn by the strategy, use 0.
            late = self._keys.numpy(Purpose.DROPOUT, round_, client, 1).random() < self._straggler_rate
            epochs = 1 if late else epochs
        return ClientTask(data.x, data.y, self._keys.torch(Purpose.TRAIN, round_, client), epochs)


def _place(context: Context) -> tuple[int, int]:
    """The node's own client and how many it is one of, or `wire.ANY_CLIENT` where its config does not say."""
    own, partitions = (context.node_config.get(key, wire.ANY_CLIENT) for key in (wire.PARTITION, wire.PARTITIONS))
    return int(own), int(partitions)


def _model(message: Message) -> Tensor:
    return torch.from_numpy(wire.view(message.content.array_records[wire.ARRAYS][wire.MODEL].data).copy())


def _reply(message: Message, arrays: dict[str, np.ndarray], metrics: dict[str, int]) -> Message:
    record = ArrayRecord({name: Array(**wire.fields(array)) for name, array in arrays.items()})
    content = RecordDict({wire.ARRAYS: record, wire.METRICS: MetricRecord(dict(metrics))})
    return Message(content=content, reply_to=message)
