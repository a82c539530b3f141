"""Objects of a user's own, passed in Python instead of being named in a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from fedlgm import data as data_sets
from fedlgm import mechanisms
from fedlgm.data import DataSet, Partition
from fedlgm.errors import ConfigError
from fedlgm.extension import object_name
from fedlgm.layers import LayerTable
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.base import require_mechanism
from simulations.config.fingerprints import array_digest, fixed_digest, module_digest, object_digest
from simulations.config.sections import IMAGES

_OF_BUNDLED = ("dir", *IMAGES)
"""Keys of [data] about a bundled set's examples, whoever holds them."""

FIXED = "frozen part of the model"
"""Under which a run's provenance holds the hash of what its model does not train."""


@dataclass(frozen=True)
class Own:
    """What stands in the place of names in a recipe; None leaves the recipe's own.

    Attributes:
        model: an `nn.Module`, which every client starts from, or a class or function that gives one.
        task: a `Task`, a class of them, or a function (outputs, targets) -> losses per example.
        data: a `DataSet`, a mapping {"train": (x, y), "test": (x, y), ...}, or a function that gives one.
        mechanism: a `Mechanism`.
        partition: a Partitioner of flwr-datasets, or a function (data, clients, seed) -> indices per client.
        server_optimizer: an object with `step(model, mean_update)`.
    """

    model: Any = None
    task: Any = None
    data: Any = None
    mechanism: Mechanism | None = None
    partition: Any = None
    server_optimizer: Any = None

    def __bool__(self) -> bool:
        return bool(self.given())

    def given(self) -> list[str]:
        """What is given, by name."""
        return [name for name, value in vars(self).items() if value is not None]

    def loaded(self) -> Own:
        """The same with the data made into a `DataSet`, once."""
        if self.data is None or isinstance(self.data, DataSet):
            return self
        return dataclasses.replace(self, data=data_sets.load(self.data))

    def without_data(self) -> Own:
        """The same for a worker that is handed the arrays themselves."""
        return dataclasses.replace(self, data=None, partition=None)

    def into(self, raw: dict[str, Any]) -> None:
        """Write into a recipe's plain values what stands in for what: "<Net>" for an object of class Net.

        A registered mechanism is written out with its options, so that nothing but the recipe is needed to make it.
        """
        if self:
            raw.pop("title", None)  # it described the recipe as it was written
        if self.model is not None:
            raw["model"] = {"name": object_name(self.model)} | _kept(raw, "model", "seed")
        if self.task is not None:
            raw["task"] = {"name": object_name(self.task)}
        if self.mechanism is not None:
            raw["mechanism"] = _written(self.mechanism) | _kept(raw, "mechanism", "group_by")
        if self.data is not None:
            section = {"name": object_name(self.data)} | _kept(raw, "data", "partition_seed")
            own_clients = _clients_of(self.data)
            if own_clients is not None:
                section["partition"] = "natural"
                raw["federation"]["clients"] = own_clients
            else:
                section |= {k: v for k, v in raw["data"].items() if k not in ("name", *_OF_BUNDLED)}
            raw["data"] = section
        if self.partition is not None:
            raw["data"] = {k: v for k, v in raw["data"].items() if k in ("name", "partition_seed", *_OF_BUNDLED)}
            raw["data"]["partition"] = object_name(self.partition)
        if self.server_optimizer is not None:
            raw["federation"]["server_optimizer"] = object_name(self.server_optimizer)

    def fingerprints(self, initial: nn.Module, division: Partition) -> dict[str, str]:
        """Hash of each object, by which a resumed run recognises it, also in another process.

        A model is known by its initial weights, its code and what it does not train; data by their arrays and by whose
        they are in the run; a partition by the division that it makes.

        Args:
            initial: the run's model with its initial weights.
            division: whose examples are whose in the run.
        """
        table = LayerTable.from_module(initial)
        prints = {
            "model": lambda: array_digest(table.flatten(initial).numpy(), np.array(table.sizes)),
            "task": lambda: object_digest(self.task),
            "data": lambda: array_digest(*self.data.parts().values()),
            "mechanism": lambda: object_digest(self.mechanism),
            "partition": lambda: array_digest(division.order, division.offsets),
            "server_optimizer": lambda: object_digest(self.server_optimizer, state=False),
        }
        found = {name: prints[name]() for name in self.given()}
        if self.model is not None:
            found["structure of the model"] = module_digest(initial)
            found[FIXED] = fixed_digest(initial)
        if self.data is not None:
            found["division of the data"] = array_digest(division.order, division.offsets)
        return found


def _clients_of(data: Any) -> int | None:
    """How many clients, or users, a data set has of its own; None where a partition has to divide it."""
    if not isinstance(data, DataSet):
        return None
    if data.clients is not None:
        return len(data.clients)
    return None if data.train_user is None else len(np.unique(data.train_user))


def _kept(raw: dict[str, Any], section: str, key: str) -> dict[str, Any]:
    value = raw.get(section, {}).get(key)
    return {} if value is None else {key: value}


def _written(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism as a recipe's section: all of it where it is registered, else the name that it was given."""
    require_mechanism(mechanism)
    values = {
        field.name: value
        for field in dataclasses.fields(mechanism)
        if field.name != "name" and (value := getattr(mechanism, field.name)) is not None
    }
    try:
        same = mechanisms.get(mechanism.name, variant=mechanism.variant, **values) == mechanism
    except ConfigError:
        same = False
    if not same:
        return {"name": f"<{mechanism.name.strip('<>')}>"}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {"name": mechanism.name, "variant": mechanism.variant, **plain}


def own_of(values: Mapping[str, Any]) -> Own:
    """The objects among the keyword arguments of `simulate`."""
    return Own(**values).loaded()
