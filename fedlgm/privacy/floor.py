"""A lower limit on the cost of a release: the cost of a Gaussian release with a given noise
multiplier.
"""

from __future__ import annotations

from dp_accounting import dp_event

from fedlgm.checks import check_share
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import RENYI_ONLY, decode, encode, gaussian_event


def at_least(event: dp_event.DpEvent, multiplier: float, delta: float) -> dp_event.DpEvent:
    """The given event if it costs at least as much as the Gaussian release; otherwise an event of
    the same kind with so little noise that it does. An event without a noise multiplier is composed
    with the Gaussian release instead.

    Args:
        event: cost of a release.
        multiplier: noise multiplier of the Gaussian release.
        delta: delta at which events that are not Gaussian are compared.

    Raises:
        ConfigError: the multiplier is negative, or delta is outside (0, 1).

    Example:
        >>> at_least(gaussian_event(50.0), 10.0, 1e-5), at_least(gaussian_event(5.0), 10.0, 1e-5)
        (GaussianDpEvent(noise_multiplier=10.0), GaussianDpEvent(noise_multiplier=5.0))
    """
    check_share(delta=delta)
    least = gaussian_event(multiplier)
    if isinstance(event, RENYI_ONLY):
        return type(event)(max(event.rho, 0.5 / multiplier**2))
    if isinstance(event, dp_event.GaussianDpEvent):
        return least if event.noise_multiplier > multiplier else event
    floor, record = composed_epsilon([(least, 1)], delta), encode(event)
    inner = record
    while "event" in inner:
        inner = inner["event"]
    while composed_epsilon([(event, 1)], delta) < floor:  # less noise never costs less
        if "noise_multiplier" not in inner:
            return dp_event.ComposedDpEvent([event, least])
        inner["noise_multiplier"] = min(0.8 * inner["noise_multiplier"], 1e3 * multiplier)
        event = decode(record)
    return event
