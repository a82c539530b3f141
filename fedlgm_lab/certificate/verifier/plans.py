"""The plan of a release: the bounds of contributions, the noise, and the cost that follows."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from typing import Any, get_args

import numpy as np

from fedlgm.errors import FedlgmError
from fedlgm.noise import correlation, integer_noise
from fedlgm.noise.correlation import Correlation
from fedlgm.planning.allocation import effective_multiplier, floor_digits
from fedlgm.planning.records import Sampling, Shares
from fedlgm.privacy import events
from fedlgm.privacy.events import DpEvent
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Trust, Unit, at_nodes
from fedlgm_lab.certificate.verifier.envelope import (
    Maybe,
    NotCheckable,
    Refused,
    is_count,
    is_number,
    is_text,
    must,
    read_json,
    require,
    write_json,
)

_SAMPLING = {
    **{"scheme": is_text, "population": is_count, "rate": is_number, "of?": is_text},
    **dict.fromkeys(("separation?", "participations?", "block?"), is_count),
}
_FACTS = {
    **{"noise_multiplier": is_number, "sampling": _SAMPLING, "relation": is_text},
    **{"trust": is_text, "rounds": is_count, "epsilon": Maybe(is_number)},
    **{"delta": Maybe(is_number), "accountant": is_text, "max_participations": Maybe(is_count)},
    **{"training": lambda value: True, "assumes?": is_text, "noise?": lambda value: True},
    "steps?": {"count": is_count, "rate": is_number, "batch": is_number},
    "overlap?": is_count,
    "shares?": {"threshold": is_count, "colluders": is_count, "noise?": is_text},
}
_PLAN = {
    **{"protected": lambda value: True, "clip": [is_number], "sigma": [Maybe(is_number)]},
    **{"released": [lambda value: isinstance(value, bool)], "bounded_by": is_text},
    "family": lambda value: value in ("gaussian", "laplace"),
    **{"queries": lambda value: True, "facts": _FACTS, "claim": lambda value: True},
    "guarantee": dict.fromkeys(("status", "reason", "relation", "trust", "unit"), is_text),
    **{"downlink": is_number, "freezes?": lambda value: True, "fills?": [is_count]},
}
_RELATIONS = {
    "poisson": ("add-remove", "replace-one", "zero-out"),
    "fixed": ("replace-one",),
    "allocation": ("add-remove", "zero-out"),
    "cyclic": ("add-remove", "replace-one", "zero-out"),
    "min-separation": ("replace-one", "zero-out"),
    "grouped-poisson": ("add-remove", "zero-out"),
}
"""Relations under which the cost of a sampling scheme is known."""
_KEPT = 2e-8
"""Relative tolerance for rounding, by which the noise of a plan may be less than planned if all
rounds of the run are one mechanism.
"""


class Plan:
    """The checked numbers of one plan.

    Attributes:
        clip: l2 bound (l1 for Laplace noise) of a unit's contribution to each layer, [K].
        sigma: scale of each layer's noise, [K]; infinite for a layer that is not released.
        released: whether each layer is released, [K].
        overlap: largest number of clients at which one person has data.
        copies: number of releases with separate noise that a person's data enter when each client
            makes one release.
        family: "gaussian" or "laplace".
        facts: public facts of the run.
        sampling: rule that chooses the participants.
        relation: neighbouring relation.
        trust: trust model.
        unit: unit of protection.
        guarantee: words of the plan's guarantee.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self.clip = np.array(raw["clip"], dtype=np.float64)
        self.sigma = np.array([math.inf if s is None else s for s in raw["sigma"]])
        self.released = np.array(raw["released"], dtype=bool)
        self.family, self.facts, self.guarantee = raw["family"], raw["facts"], raw["guarantee"]
        self.sampling = Sampling(**self.facts["sampling"])
        self.relation, self.trust = self.facts["relation"], self.facts["trust"]
        self.unit, self.steps = self.guarantee["unit"], self.facts.get("steps")
        self.overlap = self.facts.get("overlap", 1)
        self.copies = self.overlap if self.trust == "local" else 1
        known = not (self.sampling.scheduled or "noise" in self.facts or "shares" in self.facts)
        known = known and self.family == "gaussian"
        known = known and (self.unit == "example" or self.relation == "replace-one")
        must(
            5,
            self.overlap == 1 or known,
            "this joint cost of a person at several nodes is not known",
        )

    @property
    def protects(self) -> str:
        """Unit and relation, in the words of the ledger."""
        return at_nodes(f"{self.unit}, {self.relation}", self.overlap)

    @property
    def rate(self) -> float:
        """Sampling rate by which the cost of a release is reduced; 1 without a reduction."""
        if self.steps is not None:
            return float(self.steps["rate"])
        if self.overlap > self.copies:
            return self.sampling.rate_of_any(self.overlap)
        amplified = self.trust == "central" and self.sampling.amplifies
        return self.sampling.within_group if amplified else 1.0

    @property
    def status(self) -> str:
        """The status "proven", or "conditional" if the plan or its sampling has a condition."""
        replaced = self.relation == "replace-one" and self.rate < 1 and self.family == "gaussian"
        certain = self.guarantee["status"] == "proven" and not self.facts.get("assumes")
        # the largest number of clients at which a person has data is not checked
        certain = certain and self.overlap == 1
        return "proven" if certain and not replaced else "conditional"

    @cached_property
    def multiplier(self) -> float:
        """Ratio of the noise to the largest change of a release by adding or removing a unit."""
        clip, sigma = self.clip[self.released], self.sigma[self.released]
        if self.family == "gaussian":
            with np.errstate(over="ignore"):
                return floor_digits(effective_multiplier(clip, sigma), 9)
        loss = float(np.sum(clip / sigma))
        return floor_digits(1 / loss, 9) if loss > 0 else math.inf

    @property
    def least(self) -> float:
        """Least multiplier that a plan may have if all rounds of the run are one mechanism."""
        return floor_digits(self.facts["noise_multiplier"] * (1 - _KEPT), 9)

    @cached_property
    def correlation(self) -> Correlation:
        """C, the matrix that correlates the noise over the rounds; the identity for independent
        noise.
        """
        raw = self.facts.get("noise")
        if raw is None:
            return correlation.get("identity", self.facts["rounds"])
        return Correlation.from_dict(raw)

    @property
    def joint(self) -> bool:
        """Whether several rounds are one mechanism."""
        return self.sampling.scheduled or "noise" in self.facts

    def event(self, round: int) -> str:
        """Write the text of a round's accounting event, which follows from bounds, noise and
        sampling.
        """
        return write_json(events.encode(self._event(round - 1))).decode()

    def _event(self, position: int) -> DpEvent:
        factor, sampling = SENSITIVITY_FACTOR[self.relation], self.sampling
        factor *= self.overlap / self.copies
        multiplier = self.multiplier / factor
        if sampling.block is not None:  # the charge for the first round of a block covers the block
            first, count = position % sampling.block == 0, sampling.participations or 0
            least = self.least / factor if first else math.inf
            return events.allocation_event(least, count, sampling.block)
        if self.joint:
            moved = self._moved[position] * factor
            least = floor_digits(self.least / moved, 9) if moved > 0 else math.inf
            return events.gaussian_event(least, self.rate)
        if self.family == "laplace":
            return events.laplace_event(1 / multiplier, self.rate, self.relation)
        if self.trust == "distributed":
            return Shares(**self.facts["shares"]).law.event(multiplier)
        event = events.gaussian_event(multiplier, self.rate)
        count = self.steps["count"] if self.steps else 1
        return events.repeat_event(event, count * self.copies)

    @cached_property
    def _moved(self) -> np.ndarray:
        """How much each round adds to the change of C x by one unit, relative to the unit's bounds,
        [T]. With secret draws in groups, the first round of each cycle accounts for the complete
        change.
        """
        separation, rounds = self.sampling.separation or 1, np.arange(self.facts["rounds"])
        if not self.sampling.amplifies:
            return self.correlation.round_sensitivities(separation)
        largest = self.correlation.amplified_column_norm()
        return np.where(rounds % separation == 0, largest, 0.0)


def read_plan(text: str, named: str, layers: int) -> Plan:
    """Read the plan in a text with the SHA-256 `named`, for a model of `layers` layers.

    Raises:
        Refused: the text has another SHA-256, or is not a plan.
        NotCheckable: the plan asks auxiliary queries.
    """
    what = f"plan {named[:8]}"
    right = hashlib.sha256(text.encode()).hexdigest()
    must(5, right == named, f"{what} has another text than its hash says")
    raw = read_json(text.encode(), 5, what, write_json)
    require(raw, _PLAN, what, 5)
    if raw["queries"] != []:
        raise NotCheckable(f"{what} asks auxiliary queries, whose cost its text does not state")
    try:
        plan = Plan(raw)
        _check(plan, raw, layers, what)
        plan.event(1)
    except (LookupError, TypeError, ValueError, ArithmeticError, FedlgmError) as error:
        raise Refused(5, f"{what} is not a plan ({error})") from None
    return plan


def _check(plan: Plan, raw: dict[str, Any], layers: int, what: str) -> None:
    facts, sampling, guarantee = plan.facts, plan.sampling, plan.guarantee
    noisy, clients = plan.sigma[plan.released], plan.trust != "central"
    private = raw["protected"] is True and guarantee["status"] in ("proven", "conditional")
    must(3, private, f"{what} is not private: {guarantee['reason']!r}")
    bounded_by = "trainer" if plan.unit == "example" else "aggregator"
    joint_noise = plan.family == "gaussian" and plan.multiplier >= plan.least
    wrong = {
        f"is not for the {layers} layers of the model": any(
            part.shape != (layers,) for part in (plan.clip, plan.sigma, plan.released)
        ),
        "releases a layer without noise": not (np.isfinite(noisy) & (noisy > 0)).all(),
        "does not sample the unit that it protects": plan.unit not in get_args(Unit)
        or sampling.of != ("user" if plan.unit == "user" else None),
        "does not bound the unit that it protects": raw["bounded_by"] != bounded_by,
        "states two relations or two trust models": (
            (guarantee["relation"], guarantee["trust"]) != (plan.relation, plan.trust)
        ),
        "has an unknown trust model": plan.trust not in get_args(Trust),
        "has local steps, which only examples under local trust have": (
            (plan.unit == "example" and plan.trust == "local") != (plan.steps is not None)
            or (plan.steps is not None and plan.family != "gaussian")
        ),
        "has shares of the noise, which only distributed trust has": (
            ("shares" in facts) != (plan.trust == "distributed")
        ),
        f"has rounds that depend on each other under {plan.trust} trust": clients and plan.joint,
        "has less noise than its run was planned with": plan.joint and not joint_noise,
    }
    for problem, holds in wrong.items():
        must(5, not holds, f"{what} {problem}")
    everybody = sampling.rate == 1 and sampling.scheme == "fixed"
    allowed = _RELATIONS["poisson" if everybody or plan.steps else sampling.scheme]
    if clients and plan.steps is None:
        allowed = ("replace-one",)
    if plan.relation not in allowed:
        raise NotCheckable(
            f"{what} has {sampling.scheme} sampling under {plan.relation} and {plan.trust} trust, "
            "whose cost this program cannot compute"
        )
    if plan.trust == "distributed":
        _check_shares(plan, what)
    if "noise" in facts:
        _check_correlation(plan, what)


def _check_shares(plan: Plan, what: str) -> None:
    shares, sampling = Shares(**plan.facts["shares"]), plan.sampling
    shares.check(round(sampling.expected))
    integer_noise.get(shares.noise)
    if sampling.rate < 1 or plan.family != "gaussian" or plan.facts["accountant"] != "rdp":
        raise NotCheckable(
            f"{what} adds noise in shares, whose cost is known for Gaussian noise of all clients, "
            "composed by 'rdp'"
        )


def _check_correlation(plan: Plan, what: str) -> None:
    noise, separation = plan.correlation, plan.sampling.separation
    same = noise.rounds == plan.facts["rounds"] and separation is not None
    must(5, same, f"{what} correlates its noise over other rounds than its run's")
    few = noise.bands is not None and noise.bands <= (separation or 1)
    fits = few or not plan.sampling.amplifies
    must(5, fits, f"{what} has more bands of noise than groups of clients")
