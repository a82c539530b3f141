"""Flower server side of fedlgm."""

from strategies.cohort import CohortSampler
from strategies.layerwise import LayerwiseFedAvg, RoundRecord
from strategies.nodes import AnyNode, OneNodePerClient
from strategies.private_fedavg import PrivateFedAvg
from strategies.releaser import Releaser
from strategies.replies import Failure
from strategies.server_optimizer import ServerOptimizer, ServerStep

__all__ = [
    "AnyNode",
    "CohortSampler",
    "Failure",
    "LayerwiseFedAvg",
    "OneNodePerClient",
    "PrivateFedAvg",
    "Releaser",
    "RoundRecord",
    "ServerOptimizer",
    "ServerStep",
]
