"""From a recipe to the objects of a run: the same ones for every engine and for a deployment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor, nn

from clients import LayerwiseClient, PartitionedSource
from fedlgm import data, models
from fedlgm.data import DataSet, Partition
from fedlgm.keys import KeyRing
from fedlgm.layers import LayerTable
from fedlgm.mechanisms import Mechanism
from fedlgm.plan import Budget
from fedlgm.training import SequentialTrainer
from fedlgm.transcript import Transcript
from simulations.recipe import Recipe


@dataclass(frozen=True)
class Assembly:
    """Everything that a recipe defines, made when it is first needed.

    Attributes:
        recipe: the recipe.
    """

    recipe: Recipe

    @cached_property
    def dataset(self) -> DataSet:
        """The data, held once per process."""
        return data.load(self.recipe.data.name, self.recipe.data.dir)

    @cached_property
    def partition(self) -> Partition:
        """Whose data is whose; it depends on the recipe only."""
        section = self.recipe.data
        labels = self.dataset.train_y
        clients = self.recipe.federation.clients
        return data.partition(labels, clients, section.partition, seed=section.partition_seed, **section.options)

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client, [clients]."""
        return self.partition.sizes

    def module(self) -> nn.Module:
        """A fresh model, initialised from the recipe's seed (0 without one: the initial model is public)."""
        section = self.recipe.model
        return models.build(
            section.name,
            in_shape=self.dataset.shape,
            classes=self.dataset.classes,
            seed=self.recipe.run.seed or 0,
            **section.options,
        )

    @cached_property
    def mechanism(self) -> Mechanism:
        """The mechanism."""
        return self.recipe.mechanism.build()

    @cached_property
    def layers(self) -> LayerTable:
        """The model's layers as the mechanism sees them."""
        return self.mechanism.table(LayerTable.from_module(self.module(), self.recipe.mechanism.group_by))

    @cached_property
    def budget(self) -> Budget:
        """What one round may spend so that the whole run stays within the recipe's (epsilon, delta)."""
        return budget_of(self.recipe, self.mechanism)

    def initial_model(self) -> Tensor:
        """The initial global model [D]."""
        return self.layers.flatten(self.module())

    def start(self) -> Transcript:
        """The transcript before the first round."""
        return Transcript.start(self.initial_model())

    def client(self, keys: KeyRing) -> LayerwiseClient:
        """A client object that serves any simulated client."""
        training = self.recipe.training.local
        return LayerwiseClient(
            SequentialTrainer(self.module(), self.layers, training),
            training,
            PartitionedSource(self.dataset, self.partition),
            self.mechanism,
            self.layers,
            keys,
            straggler_rate=self.recipe.federation.stragglers,
            threads=self.recipe.run.threads,
        )


def budget_of(recipe: Recipe, mechanism: Mechanism) -> Budget:
    """See `Assembly.budget`."""
    privacy, federation = recipe.privacy, recipe.federation
    sampling = federation.plan_sampling
    local = privacy.trust == "local"
    multiplier = mechanism.calibrate(
        privacy.epsilon,
        privacy.delta,
        steps=privacy.max_participations or federation.rounds,
        # Whoever receives a client's own noisy update knows that the client takes part: no amplification by sampling.
        sampling_rate=1.0 if local else sampling.rate,
        relation=recipe.relation,
        accountant=privacy.accountant,
    )
    return Budget(multiplier, sampling, recipe.relation, privacy.trust, federation.rounds)
