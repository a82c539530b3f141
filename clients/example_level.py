"""The client of example-level runs: it bounds its examples' gradients and, under local trust, noises its own steps."""

from __future__ import annotations

from typing import cast

import numpy as np
from flwr.app import Context, Message
from torch import Tensor

from clients.layerwise import LayerwiseClient
from clients.source import ClientData
from fedlgm import wire
from fedlgm.aggregation import BoundedSum
from fedlgm.devices import torch_threads
from fedlgm.errors import ConfigError
from fedlgm.example_level.trainer import ExampleTrainer, batch_keys, digest_of, local_steps, poisson_rows
from fedlgm.plan import ReleasePlan


class ExampleClient(LayerwiseClient):
    """Serves one client or, in a simulation, any block of clients, for mechanisms that bound examples.

    Under central trust a round is one step: the client samples a Poisson batch of its examples and hands over the sum
    of their bounded gradients. Under local trust it makes the plan's local steps, adds noise to each and hands over
    the private change of its model; it refuses what goes beyond its consent.

    Arguments as for `LayerwiseClient`; the work's trainer is an `ExampleTrainer`.
    """

    _held: tuple[int, ClientData, bytes] | None = None

    def _sum(
        self, message: Message, plan: ReleasePlan, model: Tensor, round_: int
    ) -> tuple[BoundedSum, list[dict[str, np.ndarray]]]:
        """Central trust: one Poisson batch of every client of the block, bounded and added up."""
        if plan.facts.steps is not None:
            raise ConfigError("a plan with local steps asks for clients that noise them, under local trust")
        total, trainer = BoundedSum.empty(plan), self._trainer
        trainer.weights.copy_(model)
        with torch_threads(self._numerics.threads):
            for client in self._members(message):
                data, rows = self._batch(client, plan, round_)
                total.add(trainer.sum(data.x, data.y, rows, plan))
        return total, []

    def _release_each(
        self, message: Message, context: Context, plan: ReleasePlan, model: Tensor, round_: int
    ) -> tuple[BoundedSum, list[dict[str, np.ndarray]]]:
        """Local trust: every client of the block makes its own private steps, with or without data."""
        total = BoundedSum.empty(plan)
        keys = self._release_keys(plan, model)
        settings, backend = self._work.settings, self._numerics.noise_backend
        with torch_threads(self._numerics.threads):
            for client in self._members(message):
                data, digest = self._examples(client)
                examples = (data.x, data.y, digest)
                update, name = local_steps(
                    self._trainer, settings, model, examples, plan, keys, round_, client, backend
                )
                if self._consent is not None:
                    # Before anything leaves: a release beyond what was agreed to is refused here.
                    self._consent.record(context.state, client, name, plan)
                total.merge(update, 1, 0)
        return total, []

    def _raw_norms(self, message: Message, model: Tensor, round_: int) -> np.ndarray:
        """What the mechanism plans by (`ExampleTrainer.figures`) for the step's batches, [rows, K]."""
        plan = ReleasePlan.from_json(self._layers, str(message.content.config_records[wire.CONFIG][wire.PLAN]))
        found, trainer = [np.empty((0, len(self._layers)))], self._trainer
        trainer.weights.copy_(model)
        with torch_threads(self._numerics.threads):
            for client in self._members(message):
                data, rows = self._batch(client, plan, round_)
                found.append(trainer.figures(data.x, data.y, rows))
        return np.concatenate(found)

    def _batch(self, client: int, plan: ReleasePlan, round_: int) -> tuple[ClientData, Tensor]:
        """A client's examples, and the rows of its Poisson batch of this round."""
        data, digest = self._examples(client)
        rows = poisson_rows(batch_keys(self._keys, digest), len(data), plan.facts.sampling.rate, round_, client)
        return data, rows

    @property
    def _trainer(self) -> ExampleTrainer:
        return cast(ExampleTrainer, self._work.trainer)

    def _examples(self, client: int) -> tuple[ClientData, bytes]:
        """A client's data and their digest; the last client's are kept (in a federation of one, all there are)."""
        if self._held is None or self._held[0] != client:
            data = self._work.source(client)
            self._held = client, data, digest_of(data.x, data.y)
        return self._held[1], self._held[2]
