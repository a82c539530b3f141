"""Flower client side of fedlgm."""

from clients.layerwise import LayerwiseClient
from clients.source import ClientData, ClientSource, PartitionedSource

__all__ = ["ClientData", "ClientSource", "LayerwiseClient", "PartitionedSource"]
