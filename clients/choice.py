"""The class and the planner that a mechanism needs on a client."""

from __future__ import annotations

from clients.layerwise import LayerwiseClient
from fedlgm.aggregation.client_release import ClientPlanner
from fedlgm.mechanisms.mechanism import Mechanism, PlansFromPrivateData


def client_class(mechanism: Mechanism) -> type[LayerwiseClient]:
    """`PublishedClient` for published variants that plan from private data, else
    `LayerwiseClient`.

    Example:
        >>> from fedlgm import mechanisms
        >>> client_class(mechanisms.get("uniform")).__name__
        'LayerwiseClient'
    """
    if not isinstance(mechanism, PlansFromPrivateData):
        return LayerwiseClient
    from clients.published_client import PublishedClient  # with the engine of single examples

    return PublishedClient


def planner_of(mechanism: Mechanism | None) -> ClientPlanner | None:
    """Make a new planner of a client's releases; None if clients follow the round's plan, or if
    there is no mechanism.

    Example:
        >>> from fedlgm import mechanisms
        >>> planner_of(mechanisms.get("uniform")) is None
        True
        >>> type(planner_of(mechanisms.get("client-ladp"))).__name__
        'AnswerFirst'
    """
    return None if mechanism is None else client_class(mechanism).planner(mechanism)
