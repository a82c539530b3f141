"""Flower server side of fedlgm."""

from strategies.cohort import CohortSampler
from strategies.layerwise import LayerwiseFedAvg, RoundRecord
from strategies.server_optimizer import ServerOptimizer, ServerStep

__all__ = ["CohortSampler", "LayerwiseFedAvg", "RoundRecord", "ServerOptimizer", "ServerStep"]
