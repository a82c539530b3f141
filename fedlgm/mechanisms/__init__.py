"""Every mechanism under one registry: `get(name, **options)`, `names()`, `register(name, kind)`.

A mechanism is a frozen dataclass derived from `Mechanism` whose fields are its options. One of your own needs no change
here: pass it as an object, call `register`, or name it in a recipe as "package.module:Class". If its plans have another
multiplier than the run's, it overrides `costs`, too. `fedlgm.testing.check_mechanism` checks it. The papers' names:
docs/references.md.
"""

from __future__ import annotations

from typing import Any

from fedlgm import allocation
from fedlgm.errors import ConfigError, alternatives
from fedlgm.extension import load_object
from fedlgm.mechanisms import group_noise
from fedlgm.mechanisms import options as _options
from fedlgm.mechanisms.adapldp import AdapLDP
from fedlgm.mechanisms.adaptive import AdaptiveAllocation
from fedlgm.mechanisms.base import (
    BoundsExamples,
    Mechanism,
    UsesPrivateNorms,
    UsesPrivateSums,
    UsesPrivateUpdates,
    code_of,
)
from fedlgm.mechanisms.dp_sgd import DPSGD, PSACSGD, NormalisedSGD, PlainSGD, PublishedDPSGD
from fedlgm.mechanisms.dpa import DynamicPrivacyAllocation
from fedlgm.mechanisms.full_dp import FullDP
from fedlgm.mechanisms.inid import gaussian_inid, laplace_inid
from fedlgm.mechanisms.ladp import LaDP
from fedlgm.mechanisms.ladp_published import PublishedLaDP
from fedlgm.mechanisms.layerwise_gaussian import FlatGaussian, LayerwiseGaussian, NoPrivacy, PublishedMedClip
from fedlgm.mechanisms.risk_aware import LMDPSGD, PublishedLMDPSGD
from fedlgm.mechanisms.sensitive import SensitiveDP
from fedlgm.mechanisms.time_varying import TimeVaryingDP
from fedlgm.privacy.guarantee import Unit

_REGISTRY: dict[str, dict[str, type[Mechanism]]] = {}


def register(name: str, kind: type[Mechanism], published: type[Mechanism] | None = None) -> None:
    """Make a mechanism known by a name, for recipes, `fedlgm compare` and `get`.

    Args:
        name: the name in recipes.
        kind: class of its sound variant, a frozen dataclass derived from `Mechanism`.
        published: class of the variant that runs a paper's text literally where that is not private.

    Raises:
        ConfigError: the name is taken by another class, or `kind` is no mechanism.

    Example:
        >>> register("gaussian", FlatGaussian)  # as it is registered already
        >>> register("gaussian", AdaptiveAllocation)
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: there is a mechanism 'gaussian' already: choose another name
    """
    for known in filter(None, (kind, published)):
        if not (isinstance(known, type) and issubclass(known, Mechanism)):
            raise ConfigError(f"a mechanism is a class derived from fedlgm.Mechanism, got {known!r}")
        if known.unit == "example" and not issubclass(known, BoundsExamples):
            raise ConfigError(f"a mechanism of unit 'example' is derived from BoundsExamples, too, got {known!r}")
    entry = {"sound": kind} | ({"published": published} if published else {})
    if _REGISTRY.setdefault(name, entry) != entry:
        raise ConfigError(f"there is a mechanism {name!r} already: choose another name")


for _name in allocation.names():
    register(_name, LayerwiseGaussian, PublishedMedClip)
for _name in group_noise.names():
    register(_name, group_noise.GroupNoise)
register("gaussian", FlatGaussian)
register("adaptive", AdaptiveAllocation)
register("none", NoPrivacy)
register("ladp", LaDP, PublishedLaDP)
register("full-dp", FullDP)
register("time-varying", TimeVaryingDP)
register("sensitive", SensitiveDP)
register("dpa", DynamicPrivacyAllocation)
register("adapldp", AdapLDP)
register("dp-sgd", DPSGD, PublishedDPSGD)
register("auto-s", NormalisedSGD)
register("dp-psac", PSACSGD)
register("sgd", PlainSGD)
register("lm-dp-sgd", LMDPSGD, PublishedLMDPSGD)


def names(unit: Unit | None = "client") -> tuple[str, ...]:
    """Registered mechanism names.

    Args:
        unit: "client" or "example": those that protect that unit; None: all.

    Example:
        >>> "dp-sgd" in names(), "dp-sgd" in names("example")
        (False, True)
    """
    return tuple(name for name in _REGISTRY if unit in (None, unit_of(name)))


def is_private(name: str) -> bool:
    """Whether the mechanism `name` has a budget at all: False for `none` and `sgd`, which no epsilon changes.

    Raises:
        ConfigError: unknown name.

    Example:
        >>> is_private("gaussian"), is_private("none")
        (True, False)
    """
    return not issubclass(next(iter(_variants(name).values())), NoPrivacy)


def unit_of(name: str) -> Unit:
    """Whose data a neighbour changes for the mechanism `name`.

    Raises:
        ConfigError: unknown name.

    Example:
        >>> unit_of("gaussian"), unit_of("dp-sgd")
        ('client', 'example')
    """
    return next(iter(_variants(name).values())).unit


def options(name: str, variant: str | None = None) -> tuple[str, ...]:
    """Option names that `get(name, ...)` takes, besides `variant`: those of one variant, or of any.

    Raises:
        ConfigError: unknown name or variant.

    Example:
        >>> options("gaussian"), "weights" in options("lm-dp-sgd", "published")
        (('bound',), True)
    """
    kinds = _variants(name).values() if variant is None else (_kind(name, variant),)
    return tuple(dict.fromkeys(option for kind in kinds for option in _options.names(kind)))


def get(name: str, *, variant: str = "sound", **values: Any) -> Mechanism:
    """The mechanism `name` with the given options.

    Args:
        name: a registered name, or "package.module:Class" for one that is not.
        variant: "sound", or "published" where a paper's text is not private.
        values: its options.

    Example:
        >>> get("snr-consistent", bound=0.5).bound
        0.5

    Raises:
        ConfigError: unknown name, variant or option (the message says what is known), or an option outside its range.
    """
    kind = _kind(name, variant)
    checked = _options.checked(name, kind, values)
    with code_of(kind, name):
        return kind(name=name, **checked)


def _kind(name: str, variant: str) -> type[Mechanism]:
    variants = _variants(name)
    if variant not in variants:
        raise ConfigError(f"{name} has no variant {variant!r}; known: {', '.join(variants)}")
    return variants[variant]


def _variants(name: str) -> dict[str, type[Mechanism]]:
    if ":" in name:
        kind = load_object(name, what="mechanism")
        if not (isinstance(kind, type) and issubclass(kind, Mechanism)):
            raise ConfigError(f"mechanism {name!r} is not a class derived from fedlgm.Mechanism")
        return {"sound": kind}
    if name not in _REGISTRY:
        raise ConfigError(
            f"unknown mechanism {name!r}; {alternatives(name, _REGISTRY, 'your own as package.module:Class')}"
        )
    return _REGISTRY[name]


__all__ = [
    "BoundsExamples",
    "Mechanism",
    "UsesPrivateNorms",
    "UsesPrivateSums",
    "UsesPrivateUpdates",
    "gaussian_inid",
    "get",
    "is_private",
    "laplace_inid",
    "names",
    "options",
    "register",
    "unit_of",
]
