"""Everything that launches: recipes, engines, the Flower app, the command line and reports.

>>> import simulations
>>> sorted(simulations.__all__)
['Recipe', 'RunResult', 'difference', 'load_recipe', 'resume', 'simulate']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulations.api import RunResult, resume, simulate
    from simulations.config.recipe import Recipe
    from simulations.config.recipe import load as load_recipe
    from simulations.studies.statistics import difference

__all__ = ["Recipe", "RunResult", "difference", "load_recipe", "resume", "simulate"]

_HOMES = {
    "simulate": ("simulations.api", "simulate"),
    "resume": ("simulations.api", "resume"),
    "RunResult": ("simulations.api", "RunResult"),
    "Recipe": ("simulations.config.recipe", "Recipe"),
    "difference": ("simulations.studies.statistics", "difference"),
    "load_recipe": ("simulations.config.recipe", "load"),
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: the command answers `--help` without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'simulations' has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
