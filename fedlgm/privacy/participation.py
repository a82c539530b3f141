"""How a unit is drawn for the rounds of a run, as an argument of `epsilon` and `calibrate`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dp_accounting import dp_event

from fedlgm.checks import check_count, check_known, check_rate
from fedlgm.errors import ConfigError
from fedlgm.privacy.events import allocation_event, gaussian_event
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Relation

SecretDraw = Literal["poisson", "allocation"]
"""Secret draws that lower the cost of Gaussian releases."""


class Allocation(NamedTuple):
    """A secret draw of exactly `participations` out of `rounds` rounds.

    Example:
        >>> release_event(1.0, Allocation(10, 100))
        AllocationDpEvent(event=GaussianDpEvent(noise_multiplier=1.0), participations=10, rounds=100)
    """

    participations: int
    rounds: int


Draws = float | Allocation
"""Probability of taking part in one release, or an allocation. All releases of an allocation are
one event."""


def release_event(multiplier: float, draws: Draws) -> dp_event.DpEvent:
    """Event of one sampled release, or of all releases of one allocation.

    Args:
        multiplier: noise std of a release divided by the largest change of the release between
            neighbouring data sets.
        draws: the sampling rate, or the allocation.

    Example:
        >>> release_event(1.0, 0.1) == gaussian_event(1.0, 0.1)
        True
    """
    if isinstance(draws, Allocation):
        return allocation_event(multiplier, *draws)
    return gaussian_event(multiplier, draws)


def draws_of(
    sampling: SecretDraw,
    sampling_rate: float,
    steps: int,
    participations: int | None,
    relation: Relation,
) -> tuple[Draws, int]:
    """The draws that the arguments of `epsilon` and `calibrate` describe, and how often the draws
    are repeated.

    Raises:
        ConfigError: an argument is out of range, or does not belong to the sampling.

    Example:
        >>> draws_of("allocation", 1.0, 100, 10, "add-remove")
        (Allocation(participations=10, rounds=100), 1)
        >>> draws_of("poisson", 0.1, 100, None, "add-remove")
        (0.1, 100)
    """
    check_known("sampling", sampling, SecretDraw)
    check_count("steps", steps, least=0)
    check_rate(sampling_rate=sampling_rate)
    check_known("relation", relation, SENSITIVITY_FACTOR)
    if sampling == "poisson":
        if participations is not None:
            raise ConfigError(
                "participations is for sampling = 'allocation'; Poisson sampling has a "
                "sampling_rate"
            )
        return float(sampling_rate), int(steps)
    if participations is None:
        raise ConfigError(
            "sampling = 'allocation' needs participations, the number of the steps in which each "
            "unit takes part"
        )
    if sampling_rate != 1:
        raise ConfigError(
            "sampling = 'allocation' has no sampling_rate: participations and steps state how "
            "often a unit takes part"
        )
    check_allocated(relation)
    check_participations(participations, steps)
    return Allocation(int(participations), int(steps)), 1


def check_participations(participations: int, rounds: int) -> None:
    """Refuse participations that are not a whole number from 1 to the number of rounds.

    Raises:
        ConfigError: the number is outside this range.
    """
    check_count("participations", participations, most=check_count("rounds", rounds))


def check_allocated(relation: Relation) -> None:
    """Refuse the relation that is not proven for random allocation.

    Raises:
        ConfigError: the relation is "replace-one".
    """
    if relation == "replace-one":
        raise ConfigError(
            "random allocation is proven for 'add-remove' and 'zero-out', not for relation = "
            "'replace-one'"
        )
