"""The text of a plan, which travels to clients and lies in checkpoints.

Clients' noise is keyed by this text. The order of its keys is therefore fixed, and so is the
omission of fields that a plan does not have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from fedlgm.errors import ConfigError
from fedlgm.noise.draws import Family
from fedlgm.planning import queries
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.queries import NoisyQuery
from fedlgm.privacy.guarantee import Claim, Guarantee

_P = TypeVar("_P")


class _Plan(Protocol):
    """The fields of a plan that its text states."""

    @property
    def protected(self) -> bool: ...
    @property
    def clip(self) -> np.ndarray: ...
    @property
    def sigma(self) -> np.ndarray: ...
    @property
    def released(self) -> np.ndarray: ...
    @property
    def family(self) -> Family: ...
    @property
    def queries(self) -> tuple[NoisyQuery, ...]: ...
    @property
    def bounded_by(self) -> str: ...
    @property
    def facts(self) -> RunFacts: ...
    @property
    def guarantee(self) -> Guarantee: ...
    @property
    def claim(self) -> Claim | None: ...
    @property
    def position(self) -> int | None: ...
    @property
    def freezes(self) -> bool: ...
    @property
    def fills(self) -> tuple[int, ...]: ...


def text_of(plan: _Plan) -> str:
    """The plan in JSON, without its layers and notes."""
    return json.dumps(
        {
            "protected": plan.protected,
            "clip": plan.clip.tolist(),
            "sigma": [s if math.isfinite(s) else None for s in plan.sigma.tolist()],
            "released": plan.released.tolist(),
            "family": plan.family,
            "queries": [[noisy.query.name, noisy.sigma] for noisy in plan.queries],
            "bounded_by": plan.bounded_by,
            "facts": plan.facts.to_dict(),
            "guarantee": plan.guarantee.to_dict(),
            "claim": plan.claim,
            "downlink": 0.0,  # no plan has broadcast noise
        }
        | ({} if plan.position is None else {"position": plan.position})
        | ({"freezes": True} if plan.freezes else {})
        | ({"fills": plan.fills} if plan.fills else {})
    )


def read(
    layers: LayerTable, text: str, protected: Callable[..., _P], unprotected: Callable[..., _P]
) -> _P:
    """The plan with this text.

    Args:
        layers: the model's layers.
        text: see `text_of`.
        protected: class of a plan that protects.
        unprotected: class of one that does not.

    Raises:
        ConfigError, PrivacyError: the text is not a plan, or an inconsistent one.
    """
    try:
        raw = json.loads(text)
        kind = protected if raw["protected"] else unprotected
        return kind(
            layers=layers,
            clip=np.array(raw["clip"], dtype=np.float64),
            sigma=np.array([math.inf if s is None else s for s in raw["sigma"]], dtype=np.float64),
            facts=RunFacts.from_dict(raw["facts"]),
            guarantee=Guarantee(**raw["guarantee"]),
            family=raw["family"],
            released=np.array(raw["released"], dtype=bool),
            queries=tuple(
                NoisyQuery(queries.get(name, layers.sizes), float(s)) for name, s in raw["queries"]
            ),
            bounded_by=raw["bounded_by"],
            claim=raw["claim"],
            position=raw.get("position"),
            freezes=raw.get("freezes", False) is True,
            fills=tuple(raw.get("fills", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"not a release plan: {error}") from error
