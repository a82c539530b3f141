"""The client class of a mechanism."""

from __future__ import annotations

from clients.layerwise import LayerwiseClient
from clients.published_client import PublishedClient
from fedlgm.mechanisms.mechanism import Mechanism, PlansFromPrivateData


def client_class(mechanism: Mechanism) -> type[LayerwiseClient]:
    """`PublishedClient` for published variants that plan from private data, else
    `LayerwiseClient`.

    Example:
        >>> from fedlgm import mechanisms
        >>> client_class(mechanisms.get("uniform")).__name__
        'LayerwiseClient'
    """
    planned = isinstance(mechanism, PlansFromPrivateData)
    return PublishedClient if planned else LayerwiseClient
