"""Reader of configurations of NVFlare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedlgm.check.readers.common import report
from fedlgm.check.report import Report
from fedlgm.check.verdict import Verdict
from fedlgm.errors import ConfigError

_FILTERS = {
    "SVTPrivacy": "svt",
    "PercentilePrivacy": "percentile",
    "GaussianPrivacy": "percentile-gaussian",
}


def nvflare(config: Mapping[str, Any], **settings: Any) -> Report:
    """Check the privacy filters of a client's configuration of NVFlare.

    Only filters for the task "train" count. NVFlare's own filters state no epsilon of a run. Of
    another filter, the arguments `noise_multiplier`, `clip` (or `clipping_norm`, `max_grad_norm`)
    and `delta` are read, and its code is not.

    Args:
        config: the content of `config_fed_client.json`, or of a job's configuration.
        settings: further settings, such as `rounds`.

    Raises:
        ConfigError: the configuration is not a mapping, or a value cannot be used.

    Example:
        >>> filters = [{"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": {}}]
        >>> report = nvflare({"task_result_filters": [{"tasks": ["train"], "filters": filters}]})
        >>> report.status, report.epsilon is None
        ('broken', True)
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"a configuration of NVFlare must be a mapping, got {config!r:.100}")
    parts = [part for chain in _chains(config) for part in _components(chain)]
    read: dict[str, Any] = {"unit": "client", "trust": "local", "mechanism": "none"}
    read |= {"sampler": "all", "denominator": "expected", "clipping": "none"}
    rounds = [args["num_rounds"] for _, args in _components(config) if "num_rounds" in args]
    read["steps"] = rounds[0] if rounds else None
    epsilons = [args["epsilon"] for name, args in parts if "epsilon" in args]
    if epsilons:
        read |= {"epsilon": epsilons[0], "stated_for": "round"}
    for name, args in parts:
        if "noise_multiplier" in args and name not in _FILTERS:
            clips = [args[key] for key in ("clip", "clipping_norm", "max_grad_norm") if key in args]
            read |= {key: args[key] for key in ("noise_multiplier", "delta") if key in args}
            read |= {"mechanism": "gaussian", "relation": "replace-one", "clipping": "unit"}
            read |= {"clip": clips[0]} if clips else {"clipping": None}
            why = f"The code of {name} was not read: it must bound each update, then add the noise."
            return report(read, settings, Verdict("conditional", why))
    own = [_FILTERS[name] for name, _ in parts if name in _FILTERS]
    read["mechanism"] = own[0] if own else "none"
    read["noise_multiplier"] = None if own else 0.0
    return report(read, settings)


def _chains(config: Any) -> Iterator[Any]:
    """All chains of filters for the results of training."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "task_result_filters":
                for chain in value if isinstance(value, list | tuple) else [value]:
                    tasks = chain.get("tasks", ["*"]) if isinstance(chain, Mapping) else ["*"]
                    if {"train", "*"} & set(map(str, tasks)):
                        yield chain
            else:
                yield from _chains(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _chains(value)


def _components(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Class names and arguments of all components in a configuration."""
    if isinstance(config, Mapping):
        path = config.get("path", config.get("name", config.get("class_path")))
        if isinstance(path, str):
            args = config.get("args", {})
            if not isinstance(args, Mapping):
                raise ConfigError(f"args of {path} must be a mapping, got {args!r:.100}")
            yield path.rpartition(".")[2], args
        for value in config.values():
            yield from _components(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _components(value)
