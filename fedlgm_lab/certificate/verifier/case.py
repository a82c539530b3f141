"""A certificate with the files and keys for its checks, and the values that several checks use."""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import dp_event

from fedlgm.privacy.attackers import AttackRates, attack_rates
from fedlgm.privacy.spending import Spending
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused, must
from fedlgm_lab.certificate.verifier.plans import Plan, read_plan
from fedlgm_lab.certificate.verifier.replay import STEPS
from fedlgm_lab.certificate.verifier.statement import PROTECTED_FROM

UNANCHORED, UNREPLAYED, SIMULATION = "unanchored", "unreplayed", "simulation"
ACCEPTABLE = (UNANCHORED, UNREPLAYED, SIMULATION)
"""Shortcomings that a caller may accept: missing anchors of a witness, a model that is not
recomputed, and a public seed.
"""
SERVER = -1
"""Number of the server as the releasing party in the ledger's rows; clients are numbered from 0."""


def hash_of(data: str | bytes) -> str:
    """Compute the SHA-256 of a text or of bytes, in hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def words_of(recipe: dict[str, Any], plans: Collection[Plan]) -> dict[str, Any]:
    """Derive the words and figures of the claim, except both epsilons, from the recipe and the
    plans.
    """
    privacy, mechanism, seed = recipe["privacy"], recipe["mechanism"], recipe["run"].get("seed")
    proven = all(plan.status == "proven" for plan in plans)
    return {
        "unit": privacy.get("unit", "client"),
        "relation": next(iter(plans)).relation,
        "trust": privacy["trust"],
        "protected_from": PROTECTED_FROM[privacy["trust"]],
        "delta": privacy["delta"],
        "status": SIMULATION if seed is not None else "proven" if proven else "conditional",
        "mechanism": mechanism["name"],
        "variant": mechanism["variant"],
        "composition": privacy["accountant"],
        "audited_lower_bound": None,
        "seed": None if seed is None else str(seed),
    }


def population_of(plan: Plan) -> dict[str, Any]:
    """Derive the certificate's description of the population from a plan."""
    sampling = plan.sampling
    return {
        "size": sampling.population,
        "rate": sampling.rate,
        "sampling": sampling.scheme,
        "denominator": sampling.expected,
    }


@dataclass
class Case:
    """A statement, and the files and keys with which the caller checks it.

    Attributes:
        statement: the statement.
        signer: public key that signed it, in hexadecimal.
        model: content of the model file.
        releases: folder of the released vectors; None if the caller does not have the vectors.
        witnesses: public keys of the witnesses whom the caller trusts.
        accepts: the shortcomings among `ACCEPTABLE` that the caller accepts.
        codes: SHA-256 of code that the caller trusts in addition to the installed code.
        notes: sentences on what was not checked.
    """

    statement: dict[str, Any]
    signer: str
    model: bytes
    releases: Path | None = None
    witnesses: Collection[str] = ()
    accepts: Collection[str] = ()
    codes: Collection[str] = ()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.predicate: dict[str, Any] = self.statement["predicate"]
        self.claim: dict[str, Any] = self.predicate["claim"]
        self.start: dict[str, Any] = self.predicate["start"]
        self.rounds: list[dict[str, Any]] = self.predicate["rounds"]
        self.charges: list[dict[str, Any]] = self.predicate["ledger"]["rows"]
        self.events: dict[str, str] = self.predicate["events"]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of coordinates of each layer, [K]."""
        return np.array([size for _, size, _ in self.start["layers"]], dtype=np.int64)

    @cached_property
    def plans(self) -> list[Plan]:
        """Plan of each round, [T]."""
        texts = self.predicate["plans"]
        must(4, self.rounds, "the certificate has no round")
        used = {entry["plan"] for entry in self.rounds}
        must(
            5,
            set(texts) == used,
            "the plans of the certificate differ from the plans of its rounds",
        )
        plans = {name: read_plan(text, name, len(self.sizes)) for name, text in texts.items()}
        return [plans[entry["plan"]] for entry in self.rounds]

    @cached_property
    def spending(self) -> Spending:
        """Charges of the server and of each client, with the number of equal charges."""
        counts = Counter((row["client"], self.events[row["event"]]) for row in self.charges)
        return Spending.of([(*row, count) for row, count in counts.items()], SERVER)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe's values.

        Raises:
            Refused: the recipe is not TOML, or has another hash than is stated.
        """
        text, named = (self.predicate["recipe"][name] for name in ("text", "sha256"))
        must(3, hash_of(text) == named, "the recipe has another text than its hash says")
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise Refused(3, f"the recipe is not TOML ({error})") from None

    @cached_property
    def step(self) -> tuple[str, float, float]:
        """Name, learning rate and momentum of the server's step, from the recipe.

        Raises:
            NotCheckable: the step has a schedule or an unknown name, so it cannot be repeated.
        """
        federation, training = self.recipe["federation"], self.recipe["training"]
        step = tuple(federation[f"server_{name}"] for name in ("optimizer", "lr", "momentum"))
        if self.claim["unit"] == "example" and self.claim["trust"] == "central":
            step = tuple(training[name] for name in ("optimizer", "lr", "momentum"))
            if step[0] == "sgd" and step[2]:
                step = ("momentum", *step[1:])
        if step[0] not in STEPS or "server_schedule" in federation:
            raise NotCheckable(
                f"the server's step is {step[0]!r}; only {', '.join(STEPS)} without a "
                "schedule can be repeated bit for bit"
            )
        return step


def worst_rates(spending: Spending) -> AttackRates:
    """Compute the bounds on all attacks on one unit, for the client that has spent most."""
    composed = [
        dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(*pair) for pair in profile])
        for profile in spending.worst()
    ]
    return max(map(attack_rates, composed), key=lambda rates: rates.tpr(0.01))
