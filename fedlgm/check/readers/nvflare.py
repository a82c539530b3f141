"""Reader of configurations of NVFlare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedlgm.check.readers.common import report
from fedlgm.check.report import Report
from fedlgm.check.verdict import Verdict
from fedlgm.errors import ConfigError

FILTERS = {
    "SVTPrivacy": "svt",
    "PercentilePrivacy": "percentile",
    "GaussianPrivacy": "percentile-gaussian",
}
_BOUNDS = ("clip", "clipping_norm", "max_grad_norm")


def nvflare(config: Mapping[str, Any], **settings: Any) -> Report:
    """Check the privacy filters of a client's configuration of NVFlare.

    Only filters for the results of the task "train" are read, in their order. NVFlare's own filters
    give no epsilon for a run. For any other filter, the arguments `noise_multiplier`, `clip` (or
    `clipping_norm`, `max_grad_norm`) and `delta` are read, but not the code.

    Args:
        config: the content of `config_fed_client.json`, or a job's configuration.
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
    rounds = list(_values(config, "num_rounds"))
    if rounds != rounds[:1] * len(rounds):
        raise ConfigError(f"num_rounds has several values: {', '.join(map(repr, rounds))}")
    read: dict[str, Any] = {"unit": "client", "trust": "local"}
    read["steps"] = rounds[0] if rounds else None
    assumed: dict[str, Any] = {"sampler": "all", "denominator": "expected"}
    for _, args in parts:
        if "epsilon" in args and "epsilon" not in assumed:
            assumed |= {"epsilon": args["epsilon"], "stated_for": "round"}
    noise = next((args for _, args in parts if "noise_multiplier" in args), None)
    unread = [name for name, _ in parts if not _is_known(name)]
    if noise is None:  # noise that a trainer may add
        trainers = _components(list(_values(config, "executors")))
        unread += [name for name, args in trainers if "noise_multiplier" in args]
    filters = [name.rpartition(".")[2] for name, _ in parts]
    if noise is not None:
        read |= {key: noise[key] for key in ("noise_multiplier", "delta") if key in noise}
        read |= {"mechanism": "gaussian", **_bound(parts, noise)}
        assumed |= {"relation": "replace-one"}
    elif unread:
        assumed |= {"mechanism": "gaussian"}
    else:
        private = [FILTERS[name] for name in filters if name in FILTERS]
        read |= {"mechanism": private[0] if private else "none", "clipping": "none"}
        read |= {"noise_multiplier": None if private else 0.0}
    reading = [
        Verdict(
            "conditional",
            f"The code of {name.rpartition('.')[2]} was not read: its bound and "
            "its noise are taken from its arguments.",
        )
        for name in unread
    ]
    return report(read, settings, *reading, assumed=assumed)


def _is_known(name: str) -> bool:
    """Whether a filter belongs to NVFlare."""
    return name.startswith("nvflare.") or name in FILTERS or name.rpartition(".")[2] in FILTERS


def _bound(parts: list[tuple[str, Mapping[str, Any]]], noise: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bound that holds when the noise is added. It is an argument of the filter that
    adds the noise, or of the last earlier filter that has such an argument.
    """
    bounds = [next((args[key] for key in _BOUNDS if key in args), None) for _, args in parts]
    place = next(index for index, (_, args) in enumerate(parts) if args is noise)
    before = [bound for bound in bounds[: place + 1] if bound is not None]
    if before:
        return {"clip": before[-1], "clipping": "unit"}
    return {"clipping": "none"} if any(bound is not None for bound in bounds) else {}


def _mappings(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all mappings in a configuration, outer mappings before inner ones."""
    if isinstance(config, Mapping):
        yield config
    if isinstance(config, Mapping | list | tuple):
        for value in config.values() if isinstance(config, Mapping) else config:
            yield from _mappings(value)


def _values(config: Any, name: str) -> Iterator[Any]:
    """Return all values of a key, anywhere in a configuration."""
    return (mapping[name] for mapping in _mappings(config) if name in mapping)


def _chains(config: Any) -> Iterator[Any]:
    """Yield all chains of filters for the results of training."""
    for value in _values(config, "task_result_filters"):
        for chain in value if isinstance(value, list | tuple) else [value]:
            tasks = chain.get("tasks", ["*"]) if isinstance(chain, Mapping) else ["*"]
            tasks = [tasks] if isinstance(tasks, str) else tasks
            if not isinstance(tasks, list | tuple):
                raise ConfigError(f"tasks must be a list of names, got {tasks!r:.100}")
            if "train" in tasks or "*" in tasks:
                yield chain


def _components(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the paths and arguments of all components in a configuration."""
    for mapping in _mappings(config):
        path = mapping.get("path", mapping.get("name", mapping.get("class_path")))
        if isinstance(path, str):
            args = mapping.get("args", {})
            if not isinstance(args, Mapping):
                raise ConfigError(f"args of {path} must be a mapping, got {args!r:.100}")
            yield path, args
