"""Reader of Flower's strategies for differential privacy, `LocalDpMod` and `PrivacyConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from fedlgm.check.readers.common import attribute, report
from fedlgm.check.report import Report
from fedlgm.check.verdict import Verdict
from fedlgm.checks import check_count, check_positive, check_share
from fedlgm.errors import ConfigError
from fedlgm.wording import alternatives

MEANS = ("FedAvg", "FedAvgM", "FedAdam", "FedAdagrad", "FedYogi", "FedProx")
"""Flower's strategies that use the updates only through their mean."""
_ACCOUNTED = {"poisson": "poisson", "without-replacement": "fixed", "no-amplification": "none"}


def flower(
    source: Any, values: Mapping[str, Any] | None = None, *reading: Verdict, **settings: Any
) -> Report:
    """Check a privacy strategy, mod or `PrivacyConfig` of Flower.

    Args:
        source: the object, or the name of its class together with `values`.
        values: arguments of the class, by name.
        reading: verdicts on what could not be read.
        settings: further settings, such as `rounds`, `population` and `sampler`. By default, a
            strategy is assumed to behave as Flower's FedAvg, which draws a fixed number of clients
            and weights them by their numbers of examples. If the strategy has an accountant, equal
            weights are assumed.

    Raises:
        ConfigError: the class is unknown, an attribute is missing, or a value cannot be used.

    Example:
        >>> report = flower("LocalDpMod", {
        ...     "clipping_norm": 1.0, "sensitivity": 1.0, "epsilon": 1.0, "delta": 1e-5,
        ... }, rounds=10, population=1000, stated_for="round")
        >>> report.status, round(report.epsilon, 1)  # ten messages, each with a replaced update
        ('broken', 6.0)
    """
    name = source if isinstance(source, str) else type(source).__name__
    if name not in _ARGUMENTS:
        raise ConfigError(f"unknown class {name!r} of Flower; {alternatives(name, _ARGUMENTS)}")
    if isinstance(source, str):
        names = _ARGUMENTS[name]
        for key in values or {}:
            if key not in names:
                raise ConfigError(f"{name}: unknown argument {key!r}; {alternatives(key, names)}")
        source = SimpleNamespace(**(values or {}))
    if name == "LocalDpMod":
        read, assumed = _local_mod(source)
        return report(read, settings, *reading, assumed=assumed)
    read = {"unit": "client", **_flower_config(source if name == "PrivacyConfig" else None)}
    assumed = {}
    if name != "PrivacyConfig":
        facts, assumed = _strategy(source, "Adaptive" in name, settings)
        read |= facts
        inner = type(getattr(source, "strategy", None)).__name__
        if source.num_sampled_clients is None:
            why = "The noise is scaled for num_sampled_clients, which is not known."
            reading = (*reading, Verdict("conditional", why, bound=False, missing=("noise_size",)))
        if inner not in ("NoneType", *MEANS):
            why = f"The noise is scaled for a mean, and what {inner} computes is not known."
            reading = (*reading, Verdict("conditional", why, bound=False))
    if "ClientSide" in name and "clipping" not in settings:
        why = "The clients must bound their updates with Flower's mod: a strategy does not show it."
        reading = (*reading, Verdict("conditional", why))
    return report(read, settings, *reading, assumed=assumed)


FEDAVG = ("fraction_train", "fraction_fit", "min_train_nodes", "min_fit_clients")
_FIXED = ("noise_multiplier", "clipping_norm", "num_sampled_clients")
_ADAPTIVE = (
    *("noise_multiplier", "num_sampled_clients", "initial_clipping_norm"),
    *("target_clipped_quantile", "clip_norm_lr", "clipped_count_stddev"),
)
STRATEGIES = {
    f"DifferentialPrivacy{side}Side{kind}Clipping": names
    for side in ("Server", "Client")
    for kind, names in (("Fixed", _FIXED), ("Adaptive", _ADAPTIVE))
}
"""Names of the parameters of each strategy in their order, without the first parameter."""
LOCAL_MOD = ("clipping_norm", "sensitivity", "epsilon", "delta")
_ARGUMENTS = {
    "LocalDpMod": LOCAL_MOD,
    "PrivacyConfig": (
        *("target_delta", "population_size", "neighboring_relation", "sampling_method"),
        "max_epsilon",
    ),
    **{name: (*names, *FEDAVG) for name, names in STRATEGIES.items()},
}


def _local_mod(mod: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return facts and defaults of a `LocalDpMod`, which bounds an update by `clipping_norm` and
    computes the noise of a message by the classical formula.
    """
    number = {name: attribute(mod, name, "LocalDpMod") for name in LOCAL_MOD}
    check_positive("LocalDpMod", **{key: number[key] for key in ("clipping_norm", "epsilon")})
    check_share("LocalDpMod", delta=number["delta"])
    if number["sensitivity"] != 0:
        check_positive("LocalDpMod", sensitivity=number["sensitivity"])
    deviation = number["sensitivity"] * math.sqrt(2 * math.log(1.25 / number["delta"]))
    read = {
        "unit": "client",
        "trust": "local",
        "clip": number["clipping_norm"],
        "noise_multiplier": deviation / number["epsilon"] / number["clipping_norm"],
        "clipping": "unit",
    }
    assumed = {
        "relation": "replace-one",
        "sampler": "all",
        "denominator": "expected",
        "epsilon": number["epsilon"],
        "delta": number["delta"],
        "stated_for": "round",
        "accountant": "classical",
        "accounted_as": "none",
    }
    return read, assumed


def _flower_config(config: Any) -> dict[str, Any]:
    """Return the settings in a `PrivacyConfig`; none for None."""
    if config is None:
        return {}
    relation = _word(attribute(config, "neighboring_relation", "PrivacyConfig"))
    sampling = _word(attribute(config, "sampling_method", "PrivacyConfig"))
    if sampling not in _ACCOUNTED:
        raise ConfigError(f"sampling_method: unknown {sampling!r}; known: {', '.join(_ACCOUNTED)}")
    return {
        "relation": "add-remove" if relation == "add-or-remove-one" else relation,
        "accounted_as": _ACCOUNTED[sampling],
        "delta": attribute(config, "target_delta", "PrivacyConfig"),
        "population": attribute(config, "population_size", "PrivacyConfig"),
        "epsilon": getattr(config, "max_epsilon", None),
        "accountant": "rdp",
    }


def privacy_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the arguments of a `PrivacyConfig`."""
    return _flower_config(
        SimpleNamespace(**{"target_delta": None, "population_size": None, **values})
    )


def _word(value: Any) -> str:
    """Return a setting's name, or its value if it is an enum, in lower case with hyphens."""
    return str(getattr(value, "value", value)).lower().replace("_", "-")


def _strategy(
    strategy: Any, adaptive: bool, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return facts about a privacy strategy, and the defaults of the FedAvg that it wraps."""
    inner = getattr(strategy, "strategy", strategy)
    size = attribute(strategy, "num_sampled_clients", "the strategy")
    read: dict[str, Any] = {
        "noise_multiplier": attribute(strategy, "noise_multiplier", "the strategy"),
        "noise_size": size,
    }
    assumed: dict[str, Any] = {
        "clipping": "adaptive-late" if adaptive else "unit",
        "sampler": "fixed",
        "denominator": "realised",
        "weights": "examples",
    }
    if not adaptive:
        read["clip"] = attribute(strategy, "clipping_norm", "the strategy")
    if getattr(inner, "weighted_by_key", "num-examples") != "num-examples":
        assumed["weights"] = None
    accountant = getattr(strategy, "accountant", None)
    if accountant is not None:  # an accountant refuses missing replies and unequal weights
        config = attribute(accountant, "config", "the accountant")
        assumed |= {"denominator": "expected", "weights": "uniform"}
        read |= _flower_config(config)
        read["batch_size"] = size
        read["steps"] = attribute(accountant, "num_releases", "the accountant") or None
        if read["steps"]:
            assumed |= {"epsilon": accountant.get_epsilon(read["delta"]), "stated_for": "run"}
    elif not {"batch_size", "sampling_rate"} & set(settings):
        share, least = (
            next((getattr(inner, name) for name in names if hasattr(inner, name)), default)
            for names, default in ((FEDAVG[:2], None), (FEDAVG[2:], 0))
        )
        assumed["batch_size"] = _cohort(settings.get("population"), share, least) or size
    return read, assumed


def _cohort(population: Any, share: Any, least: Any) -> int | None:
    """Return the number of clients that FedAvg draws in a round; None if it is not known."""
    if share is None or isinstance(population, bool) or not isinstance(population, int):
        return None
    check_positive("FedAvg", fraction_train=share)
    return min(population, max(int(population * share), check_count("min_train_nodes", least, 0)))
