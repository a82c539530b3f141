"""Engines, which run a simulation's clients.

`get` finds an engine by name. Users add their own as "package.module:name" or with `register`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import misfit, shown_name
from fedlgm.extension.registration import registers
from fedlgm.extension.registry import Registry
from simulations.engines.base import Engine, EngineOptions, GridEngine

__all__ = ["Engine", "EngineOptions", "GridEngine", "get", "names", "register"]

_ENGINES: Registry[Callable[[EngineOptions], Engine]] = Registry(
    "engine",
    {
        "local": "simulations.engines.local:LocalEngine",
        "ray": "simulations.engines.ray_engine:RayEngine",
        "flower": "simulations.engines.flower:FlowerEngine",
        "processes": "simulations.engines.processes:ProcessEngine",
    },
)
_AUTO = "auto"
"""The name for which `get` chooses one of the engines."""


def names() -> list[str]:
    """Names of the engines.

    Example:
        >>> {"local", "ray", "flower"} <= set(names())
        True
    """
    return [*_ENGINES.names(), _AUTO]


@registers
def register(name: str, make: Callable[[EngineOptions], Engine]) -> None:
    """Add an engine under a name, for `simulate(engine=name)` and `fedlgm simulate --engine NAME`.

    Args:
        name: a new name.
        make: the engine's class, or a function of the caller's options.

    Raises:
        ConfigError: the name is taken, or `make` cannot be called.

    Example:
        >>> from simulations.engines.local import LocalEngine
        >>> register("in-process", LocalEngine)
        >>> get("in-process").name
        'local'
    """
    if not callable(make):
        raise ConfigError(
            f"engine {name!r}: it must be a class or function of the options, got {make!r}"
        )
    if name == _AUTO:
        raise ConfigError(f"there is an engine {_AUTO!r} already: choose another name")
    _ENGINES.add(name, make)


def get(
    engine: str | Engine,
    options: EngineOptions | None = None,
    *,
    device: str = "cpu",
    threads: int = 1,
) -> Engine:
    """An engine by name, by reference ("package.module:name"), or the given object.

    Args:
        engine: a name, a reference, or an `Engine`, which has its own options.
        options: the caller's options.
        device: device of the run's clients, by which "auto" chooses.
        threads: threads of each of the engine's workers, by which "auto" also chooses.

    Returns:
        The engine. "auto" chooses forked processes on one Linux machine. For one GPU it chooses
        this process, which keeps the GPU busy with many clients side by side. Otherwise it chooses
        Ray. If the options belong to one engine, "auto" chooses that engine. Every choice leads to
        the same model.

    Raises:
        ConfigError: the engine is unknown, or does not support the options.

    Example:
        >>> get("locl")
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: unknown engine 'locl'; did you mean 'local'?
    """
    asked = options or EngineOptions()
    if isinstance(engine, Engine):
        if asked != EngineOptions():
            raise ConfigError(
                f"engine {engine.name!r} was given as an object: pass its options to it"
            )
        return engine
    if engine == _AUTO:
        import torch

        from simulations.engines.processes import fork_problem

        if asked.supernodes is not None:
            engine = "flower"
        elif asked.ray_address is not None:
            engine = "ray"
        elif device != "cpu" and (
            torch.device(device).index is not None or torch.cuda.device_count() <= 1
        ):
            engine = "local"
        elif device == "cpu" and sys.platform == "linux" and not fork_problem(device, threads):
            engine = "processes"
        else:
            engine = "ray" if importlib.util.find_spec("ray") is not None else "local"
    maker = engine if callable(engine) else _ENGINES.find(engine)
    label = f"engine {shown_name(engine)}"
    wrong = misfit(maker, asked) if callable(maker) else ""
    if wrong:
        raise ConfigError(f"{label} is made from its options alone: {wrong}")
    instance = maker(asked) if callable(maker) else maker
    if not isinstance(instance, Engine):
        raise ConfigError(f"{label} is of type {type(instance).__name__}, not an `Engine`")
    return instance
