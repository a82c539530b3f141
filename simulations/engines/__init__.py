"""Engines, which run a simulation's clients.

`get` finds an engine by name. Users add their own as "package.module:name" or with `register`.
"""

from __future__ import annotations

from collections.abc import Callable

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import load_object, look_up, misfit, shown_name
from fedlgm.extension.registration import enter, registers
from simulations.engines.base import Engine, EngineOptions, GridEngine

__all__ = ["Engine", "EngineOptions", "GridEngine", "get", "names", "register"]

_ENGINES: dict[str, str | Callable[[EngineOptions], Engine]] = {
    "local": "simulations.engines.local:LocalEngine",
    "ray": "simulations.engines.ray_engine:RayEngine",
    "flower": "simulations.engines.flower:FlowerEngine",
    "processes": "simulations.engines.processes:ProcessEngine",
    "auto": "simulations.engines.auto:AutoEngine",
}


def names() -> list[str]:
    """Names of the engines.

    Example:
        >>> {"local", "ray", "flower"} <= set(names())
        True
    """
    return list(_ENGINES)


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
    enter(_ENGINES, name, make, "engine")


def get(engine: str | Engine, options: EngineOptions | None = None) -> Engine:
    """An engine by name, by reference ("package.module:name"), or the given object.

    Args:
        engine: a name, a reference, or an `Engine`, which has its own options.
        options: the caller's options.

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
    found = engine if callable(engine) else look_up(_ENGINES, engine, "engine")
    if isinstance(found, str):
        found = load_object(found, "engine")
    label = f"engine {shown_name(engine)}"
    wrong = misfit(found, asked) if callable(found) else ""
    if wrong:
        raise ConfigError(f"{label} is made from its options alone: {wrong}")
    made = found(asked) if callable(found) else found
    if not isinstance(made, Engine):
        raise ConfigError(f"{label} is of type {type(made).__name__}, not an `Engine`")
    return made
