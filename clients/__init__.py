"""Flower client side of fedlgm."""

from clients.consent import Consent
from clients.layerwise import LayerwiseClient
from clients.source import ClientData, ClientSource, PartitionedSource

__all__ = ["ClientData", "ClientSource", "Consent", "LayerwiseClient", "PartitionedSource"]
