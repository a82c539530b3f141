"""The registry of all mechanisms, with `get(name, **options)`, `names()` and `register(name,
kind)`.

A mechanism is a frozen dataclass derived from `Mechanism`, and its fields are its options. To use
your own mechanism, pass it as an object, call `register`, or name it in a recipe as
"package.module:Class". If its plans use multipliers other than the run's multiplier, also override
`costs`. `fedlgm.extension.testing.check_mechanism` tests it. docs/references.md lists the papers
that describe the bundled mechanisms.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_reference, load_object, package_of
from fedlgm.extension.registration import registers
from fedlgm.extension.registry import Registry
from fedlgm.mechanisms import group_noise
from fedlgm.mechanisms import options as _options
from fedlgm.mechanisms.adaptive import AdaptiveAllocation
from fedlgm.mechanisms.alternate import Alternate
from fedlgm.mechanisms.dp_sgd import DPSGD, PSACSGD, NormalisedSGD, PlainSGD, PublishedDPSGD
from fedlgm.mechanisms.inid import gaussian_inid, laplace_inid
from fedlgm.mechanisms.ladp import LaDP
from fedlgm.mechanisms.layer_vote import VotedLayers
from fedlgm.mechanisms.layerwise_gaussian import (
    FlatGaussian,
    LayerwiseGaussian,
    NoPrivacy,
    PublishedMedClip,
)
from fedlgm.mechanisms.mechanism import (
    BoundsExamples,
    Mechanism,
    PlansFromAnswers,
    PlansFromPrivateData,
    code_of,
    rule_hint,
)
from fedlgm.mechanisms.private_plans import (
    UsesPrivateNorms,
    UsesPrivateSums,
    UsesPrivateUpdates,
)
from fedlgm.mechanisms.risk_aware import LMDPSGD, PublishedLMDPSGD
from fedlgm.mechanisms.voted_filling import VotedFilling
from fedlgm.mechanisms.water_filling import WaterFilling
from fedlgm.planning import allocation
from fedlgm.privacy.guarantee import Unit

_PAPERS = {
    "full-dp": "fedlgm.papers.ladp.full_dp:FullDP",
    "time-varying": "fedlgm.papers.ladp.time_varying:TimeVaryingDP",
    "sensitive": "fedlgm.papers.ladp.sensitive:SensitiveDP",
    "dpa": "fedlgm.papers.ladp.dpa:DynamicPrivacyAllocation",
    "adapldp": "fedlgm.papers.ladp.adapldp:AdapLDP",
    "client-ladp": "fedlgm.papers.ladp.client_choice:ClientLaDP",
}
"""Mechanisms that only the tables of one paper need. They are imported on first use, and the unit
of privacy of each of them is a client.
"""
_Variants = Mapping[str, type[Mechanism] | str]
_REGISTRY: Registry[_Variants] = allocation.MECHANISMS
_RULE: _Variants = {"sound": LayerwiseGaussian, "published": PublishedMedClip}
"""The two variants of every mechanism that is an allocation rule."""


@registers
def register(name: str, kind: type[Mechanism], published: type[Mechanism] | None = None) -> None:
    """Register a mechanism under a name, for recipes, `fedlgm compare` and `get`.

    Args:
        name: the name in recipes.
        kind: class of the sound variant, a frozen dataclass derived from `Mechanism`.
        published: class of the variant that runs a paper's algorithm literally, if the algorithm is
            not private.

    Raises:
        ConfigError: another class is registered under the name, or `kind` is not a mechanism.

    Example:
        >>> register("gaussian", FlatGaussian)  # as it is registered already
        >>> register("gaussian", AdaptiveAllocation)
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: there is a mechanism 'gaussian' already: choose another name
    """
    for candidate in filter(None, (kind, published)):
        if not (isinstance(candidate, type) and issubclass(candidate, Mechanism)):
            raise ConfigError(
                "a mechanism must be a class derived from fedlgm.Mechanism, got "
                f"{candidate!r}{rule_hint(candidate)}"
            )
        if candidate.unit == "example" and not issubclass(candidate, BoundsExamples):
            raise ConfigError(
                "a mechanism of unit 'example' must also be derived from BoundsExamples, got "
                f"{candidate!r}"
            )
    _enter(name, {"sound": kind, **({"published": published} if published else {})})


def _enter(name: str, entry: _Variants) -> None:
    _all_mechanisms().check_free(name, entry)
    _REGISTRY.add(name, entry)


def _all_mechanisms() -> Registry[_Variants]:
    """Return all mechanisms by name, with one mechanism for each allocation rule."""
    rules = dict.fromkeys(allocation.names(), _RULE)
    return Registry("mechanism", rules | dict(_REGISTRY.items()))


for _name in group_noise.names():
    register(_name, group_noise.GroupNoise)
register("gaussian", FlatGaussian)
register("adaptive", AdaptiveAllocation)
register("alternate", Alternate)
register("layer-vote", VotedLayers)
register("water-filling", WaterFilling)
register("voted-filling", VotedFilling)
register("none", NoPrivacy)
_enter("ladp", {"sound": LaDP, "published": "fedlgm.papers.ladp.published:PublishedLaDP"})
for _name, _reference in _PAPERS.items():
    _enter(_name, {"sound": _reference})
register("dp-sgd", DPSGD, PublishedDPSGD)
register("auto-s", NormalisedSGD)
register("dp-psac", PSACSGD)
register("sgd", PlainSGD)
register("lm-dp-sgd", LMDPSGD, PublishedLMDPSGD)


def names(unit: Unit | None = "client") -> tuple[str, ...]:
    """Return the names of the registered mechanisms.

    Args:
        unit: "client" or "example" to return only the mechanisms with this unit of privacy; None to
            return all.

    Example:
        >>> "dp-sgd" in names(), "dp-sgd" in names("example")
        (False, True)
    """
    return tuple(
        name
        for name in _all_mechanisms().names()
        if unit in (None, "client" if name in _PAPERS else unit_of(name))
    )


def is_private(name: str) -> bool:
    """Whether the mechanism `name` has a privacy budget; `none` and `sgd` have none and ignore
    epsilon.

    Raises:
        ConfigError: unknown name.

    Example:
        >>> is_private("gaussian"), is_private("none")
        (True, False)
    """
    return not issubclass(_kind(name, "sound"), NoPrivacy)


def unit_of(name: str) -> Unit:
    """Return the unit of privacy of the mechanism `name`.

    Raises:
        ConfigError: unknown name.

    Example:
        >>> unit_of("gaussian"), unit_of("dp-sgd")
        ('client', 'example')
    """
    return _kind(name, "sound").unit


def is_own(name: str) -> bool:
    """Whether a name in a recipe stands for a user's mechanism, which may be registered, referred to
    as "package.module:name", or an object.

    Example:
        >>> is_own("gaussian"), is_own("mine:Mechanism")
        (False, True)
    """
    return name not in names(None) or package_of(_kind(name, "sound")) != "fedlgm"


def options(name: str, variant: str | None = None) -> tuple[str, ...]:
    """Return the names of a mechanism's options, for one variant or for all of its variants.

    Raises:
        ConfigError: unknown name or variant.

    Example:
        >>> options("gaussian"), "weights" in options("lm-dp-sgd", "published")
        (('bound',), True)
    """
    kinds = [_kind(name, choice) for choice in (_variants(name) if variant is None else (variant,))]
    return tuple(dict.fromkeys(option for kind in kinds for option in _options.names(kind)))


def get(name: str, *, variant: str = "sound", **values: Any) -> Mechanism:
    """Make the mechanism `name` with the given options.

    Args:
        name: a registered name, or "package.module:Class" for an unregistered mechanism.
        variant: "sound", or "published" for a paper's algorithm that is not private.
        values: options of the mechanism.

    Example:
        >>> get("snr-consistent", bound=0.5).bound
        0.5

    Raises:
        ConfigError: a name, variant or option is unknown (the message lists the known ones), or an
            option is outside its range.
    """
    kind = _kind(name, variant)
    checked = _options.check_values(name, kind, values)
    with code_of(kind, name):
        return kind(name=name, **checked)


def split(method: str) -> tuple[str, str]:
    """Split the name of a method into a mechanism's name and a variant. The variant is empty if it
    is not given, and for "package.module:Class", which has no variants.

    >>> split("ladp:published"), split("ladp"), split("mypackage.rules:InverseSize")
    (('ladp', 'published'), ('ladp', ''), ('mypackage.rules:InverseSize', ''))
    """
    name, _, variant = method.partition(":")
    return (name, variant) if not variant or name in names(None) else (method, "")


def _kind(name: str, variant: str) -> type[Mechanism]:
    variants = _variants(name)
    if variant not in variants:
        raise ConfigError(f"{name} has no variant {variant!r}; known: {', '.join(variants)}")
    kind = variants[variant]
    if isinstance(kind, str):
        kind = load_object(kind, what="mechanism")
    # the object is an allocation rule, which `allocation.shares` finds by the same reference
    if inspect.isfunction(kind):
        kind = LayerwiseGaussian
    if not (isinstance(kind, type) and issubclass(kind, Mechanism)):
        raise ConfigError(
            f"mechanism {name!r} is neither a class derived from fedlgm.Mechanism nor an "
            "allocation rule, a function (bounds, sizes) -> shares"
        )
    return kind


def _variants(name: str) -> _Variants:
    if is_reference(name):
        return {"sound": name}
    variants: _Variants = _all_mechanisms().find(name)
    return variants


__all__ = [
    "BoundsExamples",
    "Mechanism",
    "PlansFromAnswers",
    "PlansFromPrivateData",
    "UsesPrivateNorms",
    "UsesPrivateSums",
    "UsesPrivateUpdates",
    "gaussian_inid",
    "get",
    "is_own",
    "is_private",
    "laplace_inid",
    "names",
    "options",
    "register",
    "split",
    "unit_of",
]
