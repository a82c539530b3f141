"""The plan of a release: what was bounded, how much noise it had, and what that costs."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from fedlgm.errors import FedlgmError
from fedlgm.privacy import events
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Unit
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused, parse

_FIELDS = {
    *("protected", "clip", "sigma", "released", "family", "queries", "bounded_by", "facts"),
    *("guarantee", "claim", "downlink"),
}
_OPTIONAL = {"freezes", "fills"}
_FACTS = {
    *("noise_multiplier", "sampling", "relation", "trust", "rounds", "epsilon", "delta"),
    *("accountant", "max_participations", "training"),
}
_PROVEN = {("poisson", "add-remove"), ("poisson", "replace-one"), ("fixed", "replace-one")}
"""Pairs of sampling and relation whose cost `event` computes; replacement under sampling is
conditional."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The checked numbers of one plan.

    Attributes:
        clip: l2 bound (l1 for Laplace noise) of a unit's contribution to each layer, [K].
        sigma: scale of each layer's noise in the sum, [K]; infinite where nothing is released.
        released: whether each layer is released, [K].
        family: "gaussian" or "laplace".
        facts: public facts of the run.
        guarantee: words of the plan's guarantee.
        bounded_by: the party that bounds contributions.
    """

    clip: np.ndarray
    sigma: np.ndarray
    released: np.ndarray
    family: str
    facts: dict[str, Any]
    guarantee: dict[str, Any]
    bounded_by: str

    @property
    def rate(self) -> float:
        """Probability that a unit takes part in a round."""
        return float(self.facts["sampling"]["rate"])

    @property
    def population(self) -> int:
        """Number of units from which a round draws."""
        return int(self.facts["sampling"]["population"])

    @property
    def protects(self) -> str:
        """Unit and relation, as in the ledger."""
        return f"{self.guarantee['unit']}, {self.facts['relation']}"

    @property
    def status(self) -> str:
        """The status "proven", or "conditional" if plan or sampling has a condition."""
        replaced = self.facts["relation"] == "replace-one" and self.rate < 1
        certain = self.guarantee["status"] == "proven" and not self.facts.get("assumes")
        return "proven" if certain and not replaced else "conditional"

    def event(self) -> str:
        """Text of the accounting event, computed from clip and sigma alone."""
        used = self.released & (self.clip > 0)
        ratio = self.clip[used] / self.sigma[used]
        factor = SENSITIVITY_FACTOR[self.facts["relation"]]
        if self.family == "laplace":
            parts = self.clip[self.released] / self.sigma[self.released]
            loss = float(np.sum(parts))
            multiplier = floor_nine(1 / loss) / factor if loss > 0 else math.inf
            event = events.laplace_event(1 / multiplier, self.rate, self.facts["relation"])
        else:
            with np.errstate(over="ignore"):
                precision = float(np.sum(ratio**2))
            multiplier = floor_nine(precision**-0.5) / factor if precision > 0 else math.inf
            event = events.gaussian_event(multiplier, self.rate)
        return json.dumps(events.encode(event))


def floor_nine(value: float) -> float:
    """A positive number rounded down to nine significant digits, as plans keep their multiplier.

    Example:
        >>> floor_nine(2 / 3)
        0.666666666
    """
    scale = 10.0 ** (8 - math.floor(math.log10(value)))
    return math.floor(value * scale) / scale


def read_plan(text: str, named: str, layers: int) -> Plan:
    """A plan from its text.

    Args:
        text: the text.
        named: SHA-256 that names it.
        layers: number K of the model's layers.

    Raises:
        Refused: it is not a plan for these layers.
        NotCheckable: it has parts whose cost this program cannot compute.
    """
    what = f"plan {named[:8]}"
    if hashlib.sha256(text.encode()).hexdigest() != named:
        raise Refused(5, f"{what} has another text than its hash says")
    raw = parse(text.encode(), 5, what)
    try:
        if not _FIELDS <= set(raw) <= _FIELDS | _OPTIONAL:
            raise NotCheckable(f"{what} has parts that this program does not know")
        if raw["queries"]:
            raise NotCheckable(f"{what} asks auxiliary queries, whose cost its text does not state")
        facts, sampling = raw["facts"], raw["facts"]["sampling"]
        if not _FACTS <= set(facts) <= _FACTS | {"assumes"}:
            raise NotCheckable(f"{what} states facts that this program does not know")
        if (
            not {"scheme", "population", "rate"}
            <= set(sampling)
            <= {*("scheme", "population", "rate", "of")}
        ):
            raise NotCheckable(f"{what} has a sampling that this program does not know")
        plan = Plan(
            np.array([_real(value) for value in raw["clip"]]),
            np.array([math.inf if value is None else _real(value) for value in raw["sigma"]]),
            np.array(raw["released"]),
            raw["family"],
            facts,
            raw["guarantee"],
            raw["bounded_by"],
        )
        _check(plan, raw, layers, what)
        plan.event()
    except (KeyError, TypeError, ValueError, ArithmeticError, FedlgmError) as error:
        raise Refused(5, f"{what} is not a plan ({error})") from None
    return plan


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"a bound or scale must be a number of at least 0, not {value!r}")
    return float(value)


def _check(plan: Plan, raw: dict[str, Any], layers: int, what: str) -> None:
    facts, sampling = plan.facts, plan.facts["sampling"]
    if {plan.clip.shape, plan.sigma.shape, plan.released.shape} != {(layers,)}:
        raise Refused(5, f"{what} is not for the {layers} layers of the model")
    if plan.released.dtype != np.bool_ or plan.family not in ("gaussian", "laplace"):
        raise Refused(5, f"{what} does not say what is released with which noise")
    if not np.isfinite(plan.sigma[plan.released]).all() or (plan.sigma[plan.released] <= 0).any():
        raise Refused(5, f"{what} releases a layer without noise")
    if raw["protected"] is not True or plan.guarantee["status"] not in ("proven", "conditional"):
        raise Refused(3, f"{what} is not private: {plan.guarantee.get('reason')!r}")
    unit = plan.guarantee["unit"]
    if unit not in get_args(Unit) or sampling.get("of") != ("user" if unit == "user" else None):
        raise Refused(5, f"{what} does not sample the unit that it protects")
    if plan.bounded_by != ("trainer" if unit == "example" else "aggregator"):
        raise Refused(5, f"{what} does not bound the unit that it protects")
    if facts["trust"] != "central" or plan.guarantee["trust"] != "central":
        raise NotCheckable(f"{what} has the trust model {facts['trust']!r}, not 'central'")
    if plan.guarantee["relation"] != facts["relation"]:
        raise Refused(5, f"{what} states two relations")
    if (sampling["scheme"], facts["relation"]) not in _PROVEN:
        full = plan.rate == 1 and facts["relation"] in ("add-remove", "zero-out")
        if not (full and sampling["scheme"] in ("poisson", "fixed")):
            raise NotCheckable(
                f"{what} has {sampling['scheme']} sampling under {facts['relation']}, whose cost "
                "this program cannot compute"
            )
    if not (type(sampling["population"]) is int and sampling["population"] > 0):
        raise Refused(5, f"{what} has no population")
    if not (type(sampling["rate"]) in (int, float) and 0 < sampling["rate"] <= 1):
        raise Refused(5, f"{what} has no sampling rate")
