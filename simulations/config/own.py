"""Users' objects, passed in Python instead of being named in a recipe."""

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
from fedlgm.extension.loader import object_name
from fedlgm.extension.registration import registrations, repeat
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.mechanism import require_mechanism
from fedlgm.planning.layers import LayerTable
from fedlgm.training.tasks.own_figures import Evaluate
from fedlgm.training.tasks.set_metrics import Metric, check_metrics
from simulations.config.fingerprints import array_digest, fixed_digest, module_digest, object_digest
from simulations.config.named_sections import READING

_OF_BUNDLED = ("dir", *READING)
"""Keys of [data] that select a bundled set's examples, whichever clients hold them."""

_MEASURE = ("metrics", "evaluate")
"""Objects that measure a run without changing it."""

FEW_SITES = 20
"""If a user's own data have fewer clients than this number, a bundled recipe uses all clients in
every round.
"""

FIXED = "frozen part of the model"
"""Name of the frozen parts of a run's model, under which provenance holds their hash."""


@dataclass(frozen=True)
class Own:
    """Objects that replace names in a recipe; None keeps the recipe's name.

    Attributes:
        model: an `nn.Module`, from which every client starts, or a class or function that returns
            one.
        task: a `Task`, a class of tasks, or a function (outputs, targets) -> losses per example.
        data: a `DataSet`, a mapping {"train": (x, y), "test": (x, y), ...}, or a function that
            returns one.
        mechanism: a `Mechanism`.
        partition: a Partitioner of flwr-datasets, or a function (data, clients, seed) -> indices
            per client.
        server_optimizer: an object with `step(model, mean_update)`.
        trainer: a class or function (module, layers, settings, *, device, task) ->
            `fedlgm.training.Trainer`.
        metrics: functions (outputs, targets) of the whole test set, by name. They measure a run
            without changing it, so a resumed run may have other functions.
        evaluate: (round, module) -> figures of the released model by name; a resumed run may have a
            different function.
    """

    model: Any = None
    task: Any = None
    data: Any = None
    mechanism: Mechanism | None = None
    partition: Any = None
    server_optimizer: Any = None
    trainer: Any = None
    metrics: Mapping[str, Metric] | None = None
    evaluate: Evaluate | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())

    def __getstate__(self) -> dict[str, Any]:
        """The objects, and the registrations by which another process finds the objects that a
        recipe names.
        """
        return {**vars(self), "registered": registrations()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        repeat(state.pop("registered"))
        vars(self).update(state)

    def object_names(self) -> list[str]:
        """The objects that replace a recipe's names, by name."""
        return [
            name for name, value in vars(self).items() if value is not None and name not in _MEASURE
        ]

    def without_data(self) -> Own:
        """The objects for a worker that receives the arrays: all but the data and the partition."""
        return dataclasses.replace(self, data=None, partition=None)

    def into(self, raw: dict[str, Any]) -> None:
        """Write the objects' names into a recipe's plain values: "<Net>" for an object of class
        Net.

        A registered mechanism is written with its options, so the recipe defines it completely.
        """
        if self.object_names():
            raw.pop("title", None)  # it described the recipe as it was written
        if self.model is not None:
            raw["model"] = {"name": object_name(self.model)} | _key_if_set(raw, "model", "seed")
        if self.task is not None:
            raw["task"] = {"name": object_name(self.task)}
        if self.mechanism is not None:
            raw["mechanism"] = _mechanism_section(self.mechanism) | _key_if_set(
                raw, "mechanism", "group_by"
            )
        if self.data is not None:
            section = {"name": object_name(self.data)} | _key_if_set(raw, "data", "partition_seed")
            own_clients = _clients_of(self.data)
            if own_clients is not None:
                section["partition"] = "natural"
                raw["federation"] |= _everyone(raw, own_clients) | {"clients": own_clients}
            else:
                section |= {k: v for k, v in raw["data"].items() if k not in ("name", *_OF_BUNDLED)}
            raw["data"] = section
        if self.partition is not None:
            raw["data"] = {
                k: v
                for k, v in raw["data"].items()
                if k in ("name", "partition_seed", *_OF_BUNDLED)
            }
            raw["data"]["partition"] = object_name(self.partition)
        if self.server_optimizer is not None:
            raw["federation"]["server_optimizer"] = object_name(self.server_optimizer)
        if self.trainer is not None:
            raw["trainer"] = {"name": object_name(self.trainer)}

    def fingerprints(self, initial: nn.Module, division: Partition) -> dict[str, str]:
        """Hash of each object, by which a resumed run recognises it in any process.

        The hash covers a model's initial weights, code and frozen values, the arrays and the
        division of data, and the division that a partition makes.

        Args:
            initial: the run's model with its initial weights.
            division: the run's division of examples among clients.
        """
        table = LayerTable.from_module(initial)
        prints = {
            "model": lambda: array_digest(table.flatten(initial).numpy(), np.array(table.sizes)),
            "task": lambda: object_digest(self.task),
            "data": lambda: array_digest(*self.data.parts().values()),
            "mechanism": lambda: object_digest(self.mechanism),
            "partition": lambda: array_digest(division.order, division.offsets),
            "server_optimizer": lambda: object_digest(self.server_optimizer, state=False),
            "trainer": lambda: object_digest(self.trainer, state=False),
        }
        hashes = {name: prints[name]() for name in self.object_names()}
        if self.model is not None:
            hashes["structure of the model"] = module_digest(initial)
            hashes[FIXED] = fixed_digest(initial)
        if self.data is not None:
            if self.data.spent is not None:
                hashes["cost of the data's statistics"] = object_digest(self.data.spent)
            hashes["division of the data"] = array_digest(division.order, division.offsets)
        return hashes


def _everyone(raw: dict[str, Any], clients: int) -> dict[str, Any]:
    """Set a rate of 1 if a recipe for one client states no rate."""
    federation = raw["federation"]
    return (
        {"rate": 1.0}
        if clients > 1 and "rate" not in federation and "cohort" not in federation
        else {}
    )


def few_sites(raw: dict[str, Any]) -> None:
    """Change a bundled recipe's plain values so that all clients take part in every round, if there
    are few clients.
    """
    federation = raw["federation"]
    if 1 < federation["clients"] < FEW_SITES and federation.get("sampling", "poisson") == "poisson":
        federation.pop("cohort", None)
        federation["rate"] = 1.0


def _clients_of(data: Any) -> int | None:
    """Number of clients, or users, that a data set names; None if a partition must divide it."""
    if not isinstance(data, DataSet):
        return None
    if data.clients is not None:
        return len(data.clients)
    return None if data.train_user is None else len(np.unique(data.train_user))


def _key_if_set(raw: dict[str, Any], section: str, key: str) -> dict[str, Any]:
    value = raw.get(section, {}).get(key)
    return {} if value is None else {key: value}


def _mechanism_section(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism as a recipe's section. It holds the options if the mechanism is registered,
    otherwise only the name.
    """
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
    plain = {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
    return {"name": mechanism.name, "variant": mechanism.variant, **plain}


def own_of(values: Mapping[str, Any]) -> Own:
    """The objects among the keyword arguments of `simulate`.

    Raises:
        ConfigError: an argument cannot be used as its kind of object.
    """
    if isinstance(values.get("model"), list | tuple):
        raise ConfigError(
            f"model {type(values['model']).__name__!r} is neither an nn.Module nor a class or "
            "function that gives one: join layers in nn.Sequential; to compare several models use "
            "a study with grid={'model': [...]}"
        )
    own = Own(**values)
    if own.evaluate is not None and not callable(own.evaluate):
        raise ConfigError(
            f"evaluate must be a function (round, module) -> {{name: number}}, got {own.evaluate!r}"
        )
    return dataclasses.replace(
        own,
        data=None if own.data is None else data_sets.load(own.data),
        metrics=None if own.metrics is None else check_metrics(own.metrics),
    )
