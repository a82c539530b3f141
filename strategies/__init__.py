"""Flower server side of fedlgm."""

from fedlgm.mechanisms.mechanism import Mechanism, PlansFromPrivateData
from strategies.cohort import CohortSampler
from strategies.layerwise import LayerwiseFedAvg, RoundRecord
from strategies.nodes import AnyNode, OneNodePerClient
from strategies.private_fedavg import PrivateFedAvg
from strategies.published_strategy import PublishedFedAvg
from strategies.releaser import Releaser
from strategies.replies import Failure
from strategies.server_optimizer import ServerOptimizer, ServerStep


def strategy_class(mechanism: Mechanism) -> type[LayerwiseFedAvg]:
    """`PublishedFedAvg` for published variants that plan from private data, else
    `LayerwiseFedAvg`.

    Example:
        >>> from fedlgm import mechanisms
        >>> strategy_class(mechanisms.get("uniform")).__name__
        'LayerwiseFedAvg'
    """
    return PublishedFedAvg if isinstance(mechanism, PlansFromPrivateData) else LayerwiseFedAvg


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
    "strategy_class",
]
