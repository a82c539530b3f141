"""Flower client side of fedlgm."""

from clients.consent import Consent
from clients.layerwise import LayerwiseClient, LocalWork
from clients.mod import PrivateClientApp, PrivateUpdates
from clients.serving import AnyClient, OneClient
from clients.source import ClientData, ClientSource, PartitionedSource

__all__ = [
    "AnyClient",
    "ClientData",
    "ClientSource",
    "Consent",
    "LayerwiseClient",
    "LocalWork",
    "OneClient",
    "PartitionedSource",
    "PrivateClientApp",
    "PrivateUpdates",
]
