"""Models of a study: bundled or dotted names with options, and Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import object_name
from fedlgm.training import models
from fedlgm.training.models.huggingface import instance_of, is_huggingface
from fedlgm.wording import alternatives
from fedlgm_lab.studies.methods import FORMS, parse_entry
from simulations.config.own import Own

_SECTION = ("weights", "adapters")  # keys of [model] for every model


@dataclass(frozen=True)
class Network:
    """One entry of a study's models.

    Attributes:
        label: label of the entry in tables.
        what: bundled or dotted name, or an object as in `simulations.simulate(model=...)`.
        options: options of the model if `what` is a name.
    """

    label: str
    what: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: Any) -> Network:
        """Parse an entry of a grid's models.

        Raises:
            ConfigError: the entry is malformed, or a name or option is unknown.

        Example:
            >>> Network.of(("wide", "mlp", {"hidden": [64]}))
            Network(label='wide', what='mlp', options={'hidden': [64]})
        """
        label, what, options = parse_entry(entry, "model")
        if isinstance(what, str):
            option_names = (*models.options(what), *_SECTION)
            for key in options:
                if key not in option_names:
                    raise ConfigError(
                        f"{label!r}: {what} has no option {key!r}; {alternatives(key, option_names)}"
                    )
            return cls(label or what, what, options)
        if not callable(what):
            raise ConfigError(f"{FORMS['model']}; got {entry!r}")
        if options:
            raise ConfigError(
                f"{label!r}: a model object takes no further options, got {sorted(options)}"
            )
        return cls(label or object_name(what).strip("<>"), what)

    def into(self, raw: dict[str, Any], own: Own) -> Own:
        """Replace the model in the [model] section of a recipe's plain values, except for its seed,
        and return the run's Python objects.
        """
        seed = {key: value for key, value in raw["model"].items() if key == "seed"}
        if isinstance(self.what, str):
            raw["model"] = {"name": self.what, **self.options} | seed
            return replace(own, model=None)
        Own(model=self.what).into(raw)
        return replace(own, model=self.what)


def networks_of(entries: Iterable[Any]) -> dict[str, Network]:
    """Parse the models of a study, by label.

    Raises:
        ConfigError: two entries have the same label; or as in `Network.of`.
    """
    networks: dict[str, Network] = {}
    for network in map(Network.of, entries):
        if network.label in networks:
            raise ConfigError(
                f"two models have the label {network.label!r}: label one of them, as in ('second', "
                "model)"
            )
        networks[network.label] = network
    return networks


def first_of_huggingface(entries: Iterable[Any]) -> Any:
    """Return the first of a study's models if all of them are Hugging Face models; otherwise None.

    A study of such models has a different default recipe.

    Example:
        >>> first_of_huggingface(["mlp", "cnn"]) is None
        True
    """
    found = [network.what for network in networks_of(entries).values()]
    return found[0] if found and all(is_huggingface(instance_of(what)) for what in found) else None


def task_of(entries: Iterable[Any]) -> str | None:
    """Find the task that the models' classes imply, see `fedlgm.training.models.task_of`; None if
    there is none.

    Raises:
        ConfigError: the models have different tasks, whose figures cannot be compared.
    """
    tasks = {models.task_of(network.what) for network in networks_of(entries).values()}
    if len(tasks) > 1:
        raise ConfigError(
            f"grid['model']: models of different tasks ({', '.join(sorted(map(str, tasks)))}): "
            "give task=..."
        )
    return tasks.pop() if tasks else None
