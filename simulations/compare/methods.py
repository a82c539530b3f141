"""Methods of a comparison: "mechanism", "mechanism:variant" or "package.module:Class"."""

from __future__ import annotations

from fedlgm import mechanisms
from fedlgm.privacy.guarantee import Unit
from simulations.config.recipe import Recipe

PLAIN: dict[Unit, tuple[str, ...]] = {"client": ("uniform", "gaussian"), "example": ("dp-sgd", "auto-s")}
"""What a recipe's own mechanism is compared with where nothing is said."""


def named(method: str) -> tuple[str, str]:
    """Mechanism and variant of a method: a registered name may have a variant, "package.module:Class" has none.

    >>> named("ladp:published"), named("ladp"), named("mypackage.rules:InverseSize")
    (('ladp', 'published'), ('ladp', ''), ('mypackage.rules:InverseSize', ''))
    """
    name, _, variant = method.partition(":")
    return (name, variant) if not variant or name in mechanisms.names(None) else (method, "")


def options(method: str) -> tuple[str, ...]:
    """Names of the options that a method has.

    Raises:
        ConfigError: an unknown mechanism or variant.
    """
    name, variant = named(method)
    return mechanisms.options(name, variant or "sound")


def usual(recipe: Recipe) -> tuple[str, ...]:
    """The recipe's own mechanism, then the plain ones of its unit.

    >>> from simulations.config import recipe as recipes
    >>> usual(recipes.load("digits")), usual(recipes.load("dp-sgd-digits"))
    (('snr-consistent', 'uniform', 'gaussian'), ('dp-sgd', 'auto-s'))
    """
    section = recipe.mechanism
    own = section.name if section.variant == "sound" else f"{section.name}:{section.variant}"
    return (own, *(name for name in PLAIN[recipe.unit] if name != own))
