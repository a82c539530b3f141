"""Models of a study: bundled or dotted names with options, and Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedlgm import models
from fedlgm.errors import ConfigError, alternatives
from fedlgm.extension import object_name
from simulations.config.own import Own
from simulations.studies.methods import opened

_FORMS = (
    "an entry of grid['model'] is a name, 'package.module:Class', a module, a class or function that makes one, or "
    "(label, one of these[, {option: value}])"
)
_SECTION = ("weights", "adapters")  # keys of [model] for every model


@dataclass(frozen=True)
class Network:
    """One entry of a study's models.

    Attributes:
        label: label in tables.
        what: bundled or dotted name, or an object as in `simulations.simulate(model=...)`.
        options: options of a named model.
    """

    label: str
    what: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: Any) -> Network:
        """The model for an entry.

        Raises:
            ConfigError: the entry has another form, or a name or option is unknown.

        Example:
            >>> Network.of(("wide", "mlp", {"hidden": [64]}))
            Network(label='wide', what='mlp', options={'hidden': [64]})
        """
        entry = opened(entry, "model")
        if isinstance(entry, str):
            models.options(entry)
            return cls(entry, entry)
        if callable(entry):
            return cls(object_name(entry).strip("<>"), entry)
        if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3) or not isinstance(entry[0], str):
            raise ConfigError(f"{_FORMS}; got {entry!r}")
        made = cls(*entry)
        named = isinstance(made.what, str)
        if not (named or callable(made.what)) or not isinstance(made.options, Mapping):
            raise ConfigError(f"{_FORMS}; got {entry!r}")
        if made.options and not named:
            raise ConfigError(f"{made.label!r}: an object has its options already, got {sorted(made.options)}")
        known = (*models.options(made.what), *_SECTION) if named else ()
        for key in made.options:
            if key not in known:
                raise ConfigError(f"{made.label!r}: {made.what} has no option {key!r}; {alternatives(key, known)}")
        return made

    def into(self, raw: dict[str, Any], own: Own) -> Own:
        """Replace the [model] section of a recipe's plain values, except its seed, and return the run's objects."""
        seed = {key: value for key, value in raw["model"].items() if key == "seed"}
        if isinstance(self.what, str):
            raw["model"] = {"name": self.what, **self.options} | seed
            return replace(own, model=None)
        Own(model=self.what).into(raw)
        return replace(own, model=self.what)


def networks_of(entries: Iterable[Any]) -> dict[str, Network]:
    """The models of a study by label.

    Raises:
        ConfigError: two entries have the same label; or as in `Network.of`.
    """
    found: dict[str, Network] = {}
    for network in map(Network.of, entries):
        if network.label in found:
            raise ConfigError(f"two models have the label {network.label!r}: give one another, as (label, model)")
        found[network.label] = network
    return found


def task_of(entries: Iterable[Any]) -> str | None:
    """The task that the models' classes imply, as `fedlgm.models.task_of`.

    Raises:
        ConfigError: the models have different tasks, whose figures cannot be compared.
    """
    found = {models.task_of(network.what) for network in networks_of(entries).values()}
    if len(found) > 1:
        raise ConfigError(
            f"grid['model']: models of different tasks ({', '.join(sorted(map(str, found)))}): give task=..."
        )
    return found.pop() if found else None
