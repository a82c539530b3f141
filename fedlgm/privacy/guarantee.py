"""The privacy guarantee of a release, which is printed beside every epsilon."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from typing_extensions import TypedDict  # before Python 3.12, pydantic checks only this `TypedDict`

from fedlgm.checks import check_fields
from fedlgm.errors import ConfigError, PrivacyError

Status = Literal["proven", "conditional", "none"]
"""Statuses from the strongest to the weakest."""
Accountant = Literal["pld", "rdp"]
"""Names of the accountants of `fedlgm.privacy.accountants`."""
ACCOUNTING: dict[Accountant, str] = {
    "pld": "privacy loss distributions on a grid, every rounding upwards",
    "rdp": "Renyi divergences at many orders, converted to epsilon at the best one",
}
"""How each accountant computes epsilon, in words. A new accountant needs an entry here."""
Relation = Literal["add-remove", "replace-one", "zero-out"]
Trust = Literal["central", "local", "distributed"]
Unit = Literal["client", "example", "user"]
SharedUnit = Literal["user"]
"""Units whose data several clients hold. A round draws units, and all clients of a drawn unit take
part.
"""

SENSITIVITY_FACTOR: dict[str, float] = {"add-remove": 1.0, "replace-one": 2.0, "zero-out": 1.0}
"""For each neighbouring relation, how far a neighbouring data set moves a sum, as a multiple of one
unit's bound. With "zero-out" the schedule of participations stays the same, and the unit's
contributions become zero.
"""

CLIENT_DATA, ONE_EXAMPLE = "client, replace-one", "example, add-remove"
COVERS = {CLIENT_DATA: (CLIENT_DATA, ONE_EXAMPLE), ONE_EXAMPLE: (ONE_EXAMPLE,)}
"""For each protection of a node's releases, the protections that it implies at the same cost. For
example, replacing all data includes adding or removing one example.
"""

_AT_NODES = re.compile(r"(.*?)(?: at (\d{1,3}) nodes)?")


def at_nodes(protection: str, overlap: int) -> str:
    """The text of a protection, extended to a person's data at up to `overlap` nodes together. It
    is unchanged if `overlap` is 1.

    Example:
        >>> at_nodes(ONE_EXAMPLE, 2), at_nodes(ONE_EXAMPLE, 1)
        ('example, add-remove at 2 nodes', 'example, add-remove')
    """
    return protection if overlap == 1 else f"{protection} at {overlap} nodes"


def covers(stated: str, wanted: str) -> bool:
    """Whether releases that protect `stated` also protect `wanted`, at the same cost.

    Example:
        >>> covers(at_nodes(CLIENT_DATA, 3), at_nodes(ONE_EXAMPLE, 2))
        True
        >>> covers(CLIENT_DATA, at_nodes(ONE_EXAMPLE, 2))
        False
    """
    parts = [_AT_NODES.fullmatch(text) for text in (stated, wanted)]
    (kind, nodes), (other, needed) = (part.groups("1") if part else ("", "0") for part in parts)
    return other in COVERS.get(kind, ()) and int(nodes) >= int(needed)


_REPRODUCIBLE = "simulation: the seed is public, and with it the noise can be drawn again"
WHO_ADDS_NOISE: dict[Trust, str] = {
    "central": "a trusted server adds the noise",
    "local": "each client adds its own noise",
    "distributed": "clients add the noise in shares and the server sees their sum alone",
}
_FITS = {True: "is accounted for", False: "is not private"}


class Claim(TypedDict, total=False):
    """The charge that a method's authors would state for a release, if it differs from the proven
    charge. It has one of two keys.

    Attributes:
        epsilon: an epsilon that is summed over the rows of a participant.
        event: JSON form of an event (see `fedlgm.privacy.events.encode`), which the accountant
            composes.

    Example:
        >>> from fedlgm.privacy.events import encode, gaussian_event
        >>> Claim(epsilon=0.5), Claim(event=encode(gaussian_event(1.0)))["event"]["type"]
        ({'epsilon': 0.5}, 'GaussianDpEvent')
    """

    epsilon: float
    event: dict[str, Any]


class AttackFigures(TypedDict):
    """Bounds on attacks, for JSON.

    Attributes:
        tpr: largest true-positive rate at each false-positive rate.
        advantage: see `fedlgm.privacy.AttackRates`.
        mu: see `fedlgm.privacy.AttackRates`; None instead of infinity.

    Example:
        >>> AttackFigures(tpr={"0.1": 0.1}, advantage=0.0, mu=0.0)["mu"]
        0.0
    """

    tpr: dict[str, float]
    advantage: float
    mu: float | None


def caveat_of(noise_reproducible: bool) -> str:
    """The caveat that follows every guarantee if noise came from a public seed; otherwise empty.

    Args:
        noise_reproducible: whether noise came from a public seed.

    Example:
        >>> f"proven{caveat_of(True)}"
        'proven; simulation: the seed is public, and with it the noise can be drawn again'
    """
    return f"; {_REPRODUCIBLE}" if noise_reproducible else ""


@dataclass(frozen=True)
class Guarantee:
    """The status of a privacy claim and its reason in words, which every output prints beside
    epsilon.

    Attributes:
        status: "proven", "conditional" (epsilon holds on a condition) or "none" (no epsilon is
            proven).
        reason: one sentence that says why the claim holds, on what condition, or why it fails. If
            it fails, the sentence cites a section of `docs/guarantees.md`.
        unit: the data by which neighbouring data sets differ: "client", "example" or "user".
        relation: the neighbouring relation: "add-remove", "replace-one" or "zero-out".
        trust: "central" (the server sees bounded contributions and adds the noise), "local" (each
            client adds its own noise) or "distributed" (clients add the noise in shares, and the
            server sees only the sum).

    Raises:
        ConfigError: a field has an unknown value, or the reason is not one line of text.
    """

    status: Status
    reason: str
    relation: Relation = "add-remove"
    trust: Trust = "central"
    unit: Unit = "client"

    def __post_init__(self) -> None:
        check_fields("a guarantee", self)
        if not (isinstance(self.reason, str) and self.reason.isprintable()):
            raise ConfigError(f"a guarantee's reason must be one line of text, got {self.reason!r}")

    def sentence(self, *, noise_reproducible: bool) -> str:
        """The whole guarantee in one line, as every output prints it beside an epsilon.

        Args:
            noise_reproducible: whether the noise came from a public seed.

        Example:
            >>> Guarantee("proven", "bounded, then noised").sentence(noise_reproducible=False)
            'proven (client-level, add-remove, a trusted server adds the noise): bounded, then noised'
        """
        frame = f"{self.unit}-level, {self.relation}, {WHO_ADDS_NOISE[self.trust]}"
        caveat = caveat_of(noise_reproducible)
        if self.status == "none":
            return f"NOT PRIVATE: {self.reason} [{frame}]{caveat}"
        return f"{self.status} ({frame}): {self.reason}{caveat}"

    def require(self, *, protected: bool) -> None:
        """Check that the status fits the kind of plan.

        Raises:
            PrivacyError: the status is "none" for a protected release, or it claims privacy for an
                unprotected release.
        """
        if (self.status != "none") != protected:
            raise PrivacyError(
                f"a guarantee {self.status!r} does not fit a plan that {_FITS[protected]}"
            )

    def require_unit(self, unit: Unit) -> None:
        """Check that the guarantee's unit is the unit that a mechanism's releases protect.

        Raises:
            PrivacyError: the units differ.
        """
        if self.unit != unit:
            raise PrivacyError(
                f"the guarantee is for one {self.unit}, but one {unit} is protected: state "
                f"Guarantee(..., unit={unit!r})"
            )

    def conditional_on(self, condition: str) -> Guarantee:
        """The guarantee with `condition` as a further condition. A guarantee does not change if its
        status is "none" or its reason already contains the condition.

        Example:
            >>> Guarantee("proven", "bounded, then noised").conditional_on("rows are public").status
            'conditional'
        """
        if self.status == "none":
            return self
        added = "" if condition in self.reason else f"; {condition}"
        return replace(self, status="conditional", reason=self.reason + added)

    def to_dict(self) -> dict[str, str]:
        """JSON form."""
        return asdict(self)
